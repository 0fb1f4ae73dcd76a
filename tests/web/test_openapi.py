"""What is promised at /openapi.json, asked with whatever fits it and whatever does not."""

import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from attnscope.web.server import create


def by_its_own_name(app):
    """The test's client calls the server by a name that the page does not answer to."""

    async def asked(scope, receive, send):
        if scope["type"] == "http":
            others = [(name, value) for name, value in scope["headers"] if name != b"host"]
            scope = {**scope, "headers": [*others, (b"host", b"127.0.0.1:8765")]}
        await app(scope, receive, send)

    return asked


def test_every_answer_is_as_promised(tmp_path):
    app = create(tmp_path, longest=50)
    schema = schemathesis.openapi.from_asgi("/openapi.json", by_its_own_name(app))
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 12
    for operation in operations:

        @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def check(case):
            # What no schema can say (an unknown layer, SQL) is refused in words, as declared.
            case.call_and_validate(excluded_checks=[positive_data_acceptance])

        check()
