"""The scripts and styles of the page: readable lines, and requests only to routes that exist."""

import re
from pathlib import Path

from attnscope.web import server

STATIC = Path(server.__file__).parent / "static"
FILES = sorted(path for path in STATIC.iterdir() if path.suffix in (".js", ".css", ".html"))


def test_no_line_is_longer_than_100_columns() -> None:
    long = [
        f"{path.name}:{n}"
        for path in FILES
        for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 100
    ]
    assert len(FILES) > 10
    assert not long


def test_every_requested_route_exists() -> None:
    app = server.create().app
    known = {re.sub(r"\{.*?\}", "*", route.path) for route in app.routes}
    for path in FILES:
        for address in re.findall(r"[\"`](/api/[^\"`?]*)", path.read_text(encoding="utf-8")):
            if address.endswith("/${path}"):  # a download, by its name
                continue
            assert re.sub(r"\$\{.*?\}+", "*", address.replace(".get(key)", "")) in known, address
