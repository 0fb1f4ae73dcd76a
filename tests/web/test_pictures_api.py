"""The routes of pictures: a page for each question, and an error for each bad picture."""

import io
import time
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image, ImageDraw
from starlette.testclient import TestClient

from attnscope.web import picture_page
from attnscope.web.jobs import GoneError
from attnscope.web.server import create

MODEL = "zoo:shapes-vlm"


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create(), base_url="http://127.0.0.1:8765") as opened:
        yield opened


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{b64encode(data).decode()}"


def picture(side: int = 96) -> bytes:
    """A red circle in the upper left."""
    drawn = Image.new("RGB", (side, side), "white")
    ImageDraw.Draw(drawn).ellipse((10, 10, 40, 40), fill="red")
    buffer = io.BytesIO()
    drawn.save(buffer, "PNG")
    return buffer.getvalue()


def outcome(client: TestClient, **changed: Any) -> dict[str, Any]:
    body = {"model": MODEL, "image": url_of(picture()), "questions": ["What shape is red?"]}
    ticket = client.post("/api/pictures", json=body | changed)
    assert ticket.status_code == 202, ticket.text
    last = time.monotonic() + 200
    while True:
        now: dict[str, Any] = client.get(f"/api/jobs/{ticket.json()['job']}").json()
        if now["state"] not in ("waiting", "running"):
            return now
        assert time.monotonic() < last
        time.sleep(0.01)


def test_each_question_has_a_page_of_its_own(client: TestClient) -> None:
    result = outcome(client, questions=["What shape is red?", "Where is it?"], completion=4)
    first, second = (client.get(f"/api/pictures/{id}.html") for id in result["result"]["pages"])
    assert "sandbox" in first.headers["content-security-policy"]
    assert ">What<" in first.text
    assert "144 tokens" in first.text
    assert ">Where<" in second.text
    assert ">Where<" not in first.text


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"image": url_of(picture()[:100])}, "broken-image"),
        ({"image": url_of(b"")}, "broken-image"),
        ({"image": "data:image/png;base64,%%"}, "broken-image"),
        ({"questions": [" "]}, "empty-prompt"),
        ({"model": "zoo:math-qwen2"}, "no-processor"),
        ({"model": "zoo:none"}, "unknown-model"),
    ],
)
def test_bad_input_is_an_error(client: TestClient, changed: dict[str, Any], code: str) -> None:
    now = outcome(client, **changed)
    assert (now["state"], now["code"]) == ("failed", code)
    assert outcome(client)["state"] == "done"  # the server goes on


def test_a_large_picture_is_refused(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnscope.vision.pictures.MAX_PIXELS", 96 * 96 - 1)
    assert outcome(client)["code"] == "image-too-large"


def test_a_path_is_never_read(client: TestClient) -> None:
    body = {"model": MODEL, "image": "/etc/hostname", "questions": ["What?"]}
    assert client.post("/api/pictures", json=body).status_code == 422


def test_old_pages_are_dropped() -> None:
    pages = picture_page.PicturePages()
    ids = [pages.put(str(n)) for n in range(picture_page.KEPT + 1)]
    assert pages.get(ids[1]) == "1"
    with pytest.raises(GoneError):
        pages.get(ids[0])
