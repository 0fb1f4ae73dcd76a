"""The page's address without a browser: numbers are the library's, and nothing hostile gets in."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

import attnscope
from attnscope.tokens import DEFAULT, pad, tokenize
from attnscope.tokens.regions import Prompt
from attnscope.web import guard
from attnscope.web.jobs import BusyError, Queue
from attnscope.web.server import create
from made_runs import made_run, write_run

MODEL = "zoo:math-qwen2"
TEXT = "Tom has 12 apples # and buys 3 / more. * How many?"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(made_run(), folder / "one")
    return folder


@pytest.fixture(scope="module")
def client(runs: Path) -> Iterator[TestClient]:
    with TestClient(create(runs, longest=200), base_url="http://127.0.0.1:8765") as opened:
        yield opened


def result(client: TestClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    ticket = client.post(path, json=body)
    assert ticket.status_code == 202, ticket.text
    while True:
        now = client.get(f"/api/jobs/{ticket.json()['job']}").json()
        if now["state"] not in ("waiting", "running"):
            return now
        time.sleep(0.005)


@pytest.fixture(scope="module")
def view(client: TestClient) -> dict[str, Any]:
    made = result(client, "/api/views", {"model": MODEL, "text": TEXT})
    assert made["state"] == "done", made
    return client.get(f"/api/views/{made['result']['view']}").json()


@pytest.fixture(scope="module")
def loaded() -> Any:
    return attnscope.load(MODEL)


@pytest.fixture(scope="module")
def scope(loaded: Any) -> Any:
    model, tokenizer = loaded
    tokens = tokenize(Prompt(TEXT), tokenizer)
    with torch.no_grad(), attnscope.watch(model, keep=True) as scope:
        model(**pad([tokens]).inputs)
    return scope


def test_numbers_are_the_librarys(
    client: TestClient, view: dict[str, Any], scope: Any, loaded: Any
) -> None:
    at = f"/api/views/{view['id']}"
    count = float(scope.count(2)[0])
    got = client.get(f"{at}/shade", params={"layer": 2, "head": 3}).json()["values"]
    wanted = scope.received(2)[0, 3] / count
    torch.testing.assert_close(torch.tensor(got), wanted, rtol=0, atol=1e-6)
    got = client.get(f"{at}/shade", params={"layer": 2, "of": "average"}).json()["values"]
    wanted = scope.average(2)[0].mean(0)
    assert [v is None for v in got] == wanted.isnan().tolist()
    numbers = torch.tensor([v for v in got if v is not None])
    torch.testing.assert_close(numbers, wanted[~wanted.isnan()], rtol=0, atol=1e-6)
    got = client.get(f"{at}/map", params={"of": "entropy"}).json()["rows"]
    torch.testing.assert_close(torch.tensor(got[1]), scope.entropy(1)[0], rtol=0, atol=1e-5)
    ids = tokenize(Prompt(TEXT), loaded[1]).ids
    shares = torch.from_numpy(DEFAULT.weights(ids, loaded[1])).float()[None]
    mass = scope.mass(1, shares, len(DEFAULT.names))[0, :, DEFAULT.index("hash")]
    got = client.get(f"{at}/map", params={"of": "mass hash"}).json()["rows"][1]
    torch.testing.assert_close(torch.tensor(got), mass, rtol=0, atol=1e-6)


def test_a_gaze_is_a_row_and_a_column(client: TestClient, view: dict[str, Any], scope: Any) -> None:
    body = {"token": 4, "layer": 1, "head": 2}
    told = result(client, f"/api/views/{view['id']}/gaze", body)["result"]
    row = torch.tensor(told["looks_at"])
    torch.testing.assert_close(row, scope.row(1, 4)[2], rtol=0, atol=1e-6)
    assert abs(float(row.sum()) - 1) < 1e-5
    column = told["looked_at_by"]
    assert column[:4] == [None] * 4
    wanted = torch.stack([scope.row(1, n)[2, 4] for n in range(4, len(column))])
    torch.testing.assert_close(torch.tensor(column[4:]), wanted, rtol=0, atol=1e-6)


def test_an_answer_and_its_steps(client: TestClient) -> None:
    asked = {"model": MODEL, "text": TEXT, "chat": True, "answer": 5}
    made = result(client, "/api/views", asked)
    facts = client.get(f"/api/views/{made['result']['view']}").json()
    assert facts["queries"] == ["all", "last", "predicts"]
    assert len(facts["tokens"]) > facts["prompt"]
    told = result(
        client, f"/api/views/{facts['id']}/gaze", {"token": facts["prompt"] - 1, "layer": 0}
    )
    assert abs(sum(told["result"]["looks_at"]) - 1) < 1e-5


def test_a_filler_keeps_the_twins(client: TestClient, view: dict[str, Any]) -> None:
    filler = {"kind": "repeat", "count": 9, "unit": "/", "position": "end"}
    made = result(client, "/api/views", {"model": MODEL, "text": TEXT, "filler": filler})
    facts = client.get(f"/api/views/{made['result']['view']}").json()
    twins = [t for t in facts["twins"] if t >= 0]
    assert twins == list(range(len(twins)))
    assert facts["filler"]
    for n, base in enumerate(facts["twins"]):
        if base >= 0:
            assert facts["tokens"][n] == view["tokens"][base]


def test_knockout_moves_the_next_token(client: TestClient, view: dict[str, Any]) -> None:
    told = result(client, f"/api/views/{view['id']}/knockout", {"first": 2, "last": 4})["result"]
    assert told["kl"] > 0
    assert told["before"] != told["after"]
    last = view["prompt"] - 1
    wrong = result(client, f"/api/views/{view['id']}/knockout", {"first": last, "last": last})
    assert wrong["state"] == "failed"
    assert "no token comes after" in wrong["said"]


def test_what_can_be_kept(client: TestClient, view: dict[str, Any], tmp_path: Path) -> None:
    at = f"/api/views/{view['id']}"
    table = client.get(f"{at}/numbers.csv", params={"layer": 1}).text.splitlines()
    assert len(table) == 1 + view["read"]
    (tmp_path / "experiment.yaml").write_text(client.get(f"{at}/experiment.yaml").text)
    from attnscope.question.yaml import read_experiment

    assert list(read_experiment(tmp_path / "experiment.yaml").models) == [MODEL]
    page = client.get(f"{at}/page.html").text
    assert len(page) < 300_000
    assert "not the published one" in page
    assert "http" not in page.replace("http-equiv", "")


def test_runs(client: TestClient) -> None:
    assert [run["name"] for run in client.get("/api/runs").json()["runs"]] == ["one"]
    report = client.get("/api/report", params={"run": "one"})
    assert "What was found" in report.text
    assert "sandbox" in report.headers["content-security-policy"]
    asked = {"run": "one", "sql": "SELECT count(*) AS n FROM cells"}
    assert int(client.post("/api/query", json=asked).json()["rows"][0][0]) > 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"model": MODEL, "text": "  "}, "empty"),
        ({"model": MODEL, "text": "word " * 300}, "the limit is 200"),
        ({"model": "../../etc", "text": "a"}, "unknown model"),
        ({"model": "/etc/passwd", "text": "a"}, "unknown model"),
    ],
)
def test_a_prompt_that_cannot_be_measured(
    client: TestClient, body: dict[str, Any], words: str
) -> None:
    said = result(client, "/api/views", body)
    assert said["state"] == "failed"
    assert words in said["said"]


@pytest.mark.parametrize(
    "path",
    [
        "/static/..%2f..%2fserver.py",
        "/static/%2e%2e/server.py",
        "/api/views/..%2f..%2fx",
        "/api/report?run=../..",
        "/api/report?run=%2fetc",
        "/api/views/nope/shade",
    ],
)
def test_no_path_leaves_its_place(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code in (400, 404, 422)
    assert "import" not in answer.text


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-length": "104857600"}, 413),
    ],
)
def test_strangers_are_refused(client: TestClient, headers: dict[str, str], code: int) -> None:
    given = {"content-type": "application/json"} | headers
    answer = client.post("/api/query", content=b"{}", headers=given)
    assert answer.status_code == code
    assert answer.json()["error"]


def test_a_body_without_a_length_is_cut_off(client: TestClient) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'{"run": "'
        for _ in range(5):
            yield b"x" * (guard.LARGEST // 4)

    headers = {"content-type": "application/json"}
    answer = client.post("/api/query", content=pieces(), headers=headers)
    assert answer.status_code in (400, 413, 422)


def test_broken_bodies_are_said_so(client: TestClient) -> None:
    headers = {"content-type": "application/json"}
    for body in (b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": 5}', b'"\\ud800"', b"NaN"):
        answer = client.post("/api/views", content=body, headers=headers)
        assert answer.status_code in (400, 422)
        assert answer.json()["error"]
    half = json.dumps({"model": MODEL, "text": "\ud800"}).encode()
    assert client.post("/api/views", content=half, headers=headers).status_code == 422


def test_every_answer_has_the_policy(client: TestClient) -> None:
    for path in ("/", "/static/main.js", "/api/choices", "/api/jobs/nope"):
        headers = client.get(path).headers
        assert "script-src 'self'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


def test_the_queue_tells_places_and_can_be_left() -> None:
    import threading

    go, queue = threading.Event(), Queue(room=2)
    first = queue.submit(lambda job: go.wait(10))
    while first.state != "running":
        time.sleep(0.001)
    second, third = queue.submit(lambda job: "second"), queue.submit(lambda job: "third")
    with pytest.raises(BusyError, match="2 others"):
        queue.submit(lambda job: None)
    assert [queue.find(job.id)[1] for job in (first, second, third)] == [0, 1, 2]
    queue.cancel(second.id)
    assert queue.find(third.id)[1] == 1
    go.set()
    while third.state != "done":
        time.sleep(0.001)
    assert second.state == "cancelled"
    assert second.result is None
    queue.close()


def test_work_that_runs_is_called_off_between_layers(loaded: Any) -> None:
    from attnscope.web import views
    from attnscope.web.jobs import StoppedError
    from attnscope.web.shelf import Loaded

    asked = 0

    def stop() -> None:
        nonlocal asked
        asked += 1
        if asked == 3:
            raise StoppedError("called off")

    model, tokenizer = loaded
    ready = Loaded(name=MODEL, model=model, tokenizer=tokenizer, bundled=True)
    with pytest.raises(StoppedError):
        views.measure(ready, views.Asked(text=TEXT), stop)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert views.measure(ready, views.Asked(text=TEXT)).tokens
