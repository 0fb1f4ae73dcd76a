"""Every response matches /openapi.json, for valid and invalid requests."""

import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from attnscope.web.server import create


def with_local_host(app):
    """Replace the test client's host name, which the server refuses."""

    async def application(scope, receive, send):
        if scope["type"] == "http":
            others = [(name, value) for name, value in scope["headers"] if name != b"host"]
            scope = {**scope, "headers": [*others, (b"host", b"127.0.0.1:8765")]}
        await app(scope, receive, send)

    return application


def test_every_response_matches_the_schema(tmp_path):
    app = create(tmp_path, longest=50)
    schema = schemathesis.openapi.from_asgi("/openapi.json", with_local_host(app))
    operations = [each.ok() for each in schema.get_all_operations()]
    assert len(operations) > 12
    for operation in operations:

        @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def check(case):
            # A schema cannot express an unknown layer or wrong SQL, so valid data may be refused.
            case.call_and_validate(excluded_checks=[positive_data_acceptance])

        check()
