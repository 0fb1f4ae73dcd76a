"""The server without a browser: its values equal the library's, and it refuses bad requests."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

import attnscope
from attnscope.errors import InputError
from attnscope.figures.theme import PUBLISHED
from attnscope.tokens import DEFAULT, pad, tokenize
from attnscope.tokens.regions import Prompt
from attnscope.web import compare_texts, security
from attnscope.web.jobs import BusyError, GoneError, Queue
from attnscope.web.server import create
from made_runs import made_run, write_run
from support_errors import raises

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


def until(condition: Callable[[], Any]) -> Any:
    """Call the condition until it is true, at most 200 s: below the time limit of a test."""
    last = time.monotonic() + 200
    while not (answer := condition()):
        assert time.monotonic() < last, "the condition was not true within 200 s"
        time.sleep(0.005)
    return answer


def result(client: TestClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    ticket = client.post(path, json=body)
    assert ticket.status_code == 202, ticket.text

    def ended() -> dict[str, Any] | None:
        now = client.get(f"/api/jobs/{ticket.json()['job']}").json()
        return None if now["state"] in ("waiting", "running") else now

    return until(ended)


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


def test_values_equal_the_librarys(
    client: TestClient, view: dict[str, Any], scope: Any, loaded: Any
) -> None:
    at = f"/api/views/{view['id']}"
    count = float(scope.count(2)[0])
    got = client.get(f"{at}/token-values", params={"layer": 2, "head": 3}).json()["values"]
    wanted = scope.received(2)[0, 3] / count
    torch.testing.assert_close(torch.tensor(got), wanted, rtol=0, atol=1e-6)
    got = client.get(f"{at}/token-values", params={"layer": 2, "of": "average"}).json()["values"]
    wanted = scope.average(2)[0].mean(0)
    assert [v is None for v in got] == wanted.isnan().tolist()
    numbers = torch.tensor([v for v in got if v is not None])
    torch.testing.assert_close(numbers, wanted[~wanted.isnan()], rtol=0, atol=1e-6)
    got = client.get(f"{at}/head-values", params={"of": "entropy"}).json()["rows"]
    torch.testing.assert_close(torch.tensor(got[1]), scope.entropy(1)[0], rtol=0, atol=1e-5)
    ids = tokenize(Prompt(TEXT), loaded[1]).ids
    shares = torch.from_numpy(DEFAULT.weights(ids, loaded[1])).float()[None]
    mass = scope.mass(1, shares, len(DEFAULT.names))[0, :, DEFAULT.index("hash")]
    got = client.get(f"{at}/head-values", params={"of": "mass hash"}).json()["rows"][1]
    torch.testing.assert_close(torch.tensor(got), mass, rtol=0, atol=1e-6)


def test_the_attention_row_and_column_of_a_token(
    client: TestClient, view: dict[str, Any], scope: Any
) -> None:
    body = {"token": 4, "layer": 1, "head": 2}
    got = result(client, f"/api/views/{view['id']}/attention-row", body)["result"]
    row = torch.tensor(got["values"])
    torch.testing.assert_close(row, scope.row(1, 4)[2], rtol=0, atol=1e-6)
    assert abs(float(row.sum()) - 1) < 1e-5
    column = result(client, f"/api/views/{view['id']}/attention-row", body | {"direction": "by"})[
        "result"
    ]["values"]
    assert column[:4] == [None] * 4
    wanted = torch.stack([scope.row(1, n)[2, 4] for n in range(4, len(column))])
    torch.testing.assert_close(torch.tensor(column[4:]), wanted, rtol=0, atol=1e-6)


def test_a_system_prompt_goes_through_the_template(client: TestClient, loaded: Any) -> None:
    request = {"model": MODEL, "text": TEXT, "system": "Count with care."}
    made = result(client, "/api/views", request)
    text = "".join(client.get(f"/api/views/{made['result']['view']}").json()["tokens"])
    assert text.index("Count with care.") < text.index("Tom has")
    assert len(text) > len(TEXT) + len("Count with care.")


def test_a_completion_and_its_steps(client: TestClient) -> None:
    request = {"model": MODEL, "text": TEXT, "chat": True, "completion": 5}
    made = result(client, "/api/views", request)
    data = client.get(f"/api/views/{made['result']['view']}").json()
    assert data["queries"] == ["all", "last", "predicts"]
    assert len(data["tokens"]) > data["prompt"]
    got = result(
        client, f"/api/views/{data['id']}/attention-row", {"token": data["prompt"] - 1, "layer": 0}
    )
    assert abs(sum(got["result"]["values"]) - 1) < 1e-5


def test_a_shorter_range_has_finer_bins(client: TestClient, view: dict[str, Any]) -> None:
    at, where = f"/api/views/{view['id']}", {"layer": 1, "head": 3}
    every = client.get(f"{at}/token-values", params=where).json()["values"]
    rough = client.get(f"{at}/token-curve", params={**where, "bins": 5}).json()
    size = rough["size"]
    assert size == -(-len(every) // 5)
    for n, start in enumerate(rough["start"]):
        some = every[start : start + size]
        assert rough["mean"][n] == pytest.approx(sum(some) / len(some), rel=1e-5)
        assert [rough["low"][n], rough["high"][n]] == pytest.approx([min(some), max(some)])
    fine = client.get(
        f"{at}/token-curve", params={**where, "first": 3, "last": 8, "bins": 5}
    ).json()
    assert (fine["size"], fine["mean"]) == (1, every[3:8])
    beyond = client.get(f"{at}/token-curve", params={"first": 5, "last": 5000})
    assert beyond.json()["code"] == "unknown-token"


def test_the_mean_over_some_heads(client: TestClient, view: dict[str, Any], scope: Any) -> None:
    got = client.get(f"/api/views/{view['id']}/token-values", params={"among": "1.2,3.0"}).json()[
        "values"
    ]
    wanted = (scope.received(1)[0, 2] + scope.received(3)[0, 0]) / 2 / float(scope.count(1)[0])
    torch.testing.assert_close(torch.tensor(got), wanted, rtol=0, atol=1e-6)


def test_head_types_equal_the_librarys(client: TestClient, tmp_path: Path) -> None:
    from attnscope.experiment.execute import run
    from attnscope.figures.head_types import classify_heads
    from attnscope.recipes.heads import head_experiments, head_scores

    got = result(client, "/api/head-types", {"model": MODEL})["result"]
    runs = {}
    for name, experiment in head_experiments(MODEL, prompts=got["prompts"], needles=False).items():
        run(experiment, tmp_path / name)
        runs[name] = attnscope.open_run(tmp_path / name)
    table = classify_heads(head_scores(runs))
    assert [(h["layer"], h["head"], h["type"]) for h in got["heads"]] == table.select(
        "layer", "head", "kind"
    ).rows()
    assert {each["name"] for each in got["types"]} >= {"sink", "previous-token", "induction"}
    assert sum(each["heads"] for each in got["types"]) > 0


def test_a_filler_keeps_the_aligned_positions(client: TestClient, view: dict[str, Any]) -> None:
    filler = {"kind": "repeat", "count": 9, "unit": "/", "position": "end"}
    made = result(client, "/api/views", {"model": MODEL, "text": TEXT, "filler": filler})
    data = client.get(f"/api/views/{made['result']['view']}").json()
    aligned = [t for t in data["aligned_positions"] if t >= 0]
    assert aligned == list(range(len(aligned)))
    assert data["filler"]
    for n, base in enumerate(data["aligned_positions"]):
        if base >= 0:
            assert data["tokens"][n] == view["tokens"][base]


def test_a_pair_has_the_librarys_lambda(client: TestClient, view: dict[str, Any]) -> None:
    import numpy as np

    from attnscope.measures.slope import slope

    filler = {"kind": "repeat", "count": 9, "unit": "/", "position": "end", "by": "ids"}
    made = result(client, "/api/views", {"model": MODEL, "text": TEXT, "filler": filler})
    other = client.get(f"/api/views/{made['result']['view']}").json()
    assert len(other["filler"]) == 9
    request = {"a": view["id"], "b": other["id"], "layer": 1, "head": 2}
    got = client.get("/api/comparison", params=request).json()
    sides = [
        client.get(
            f"/api/views/{one['id']}/token-values", params={"of": "average", "layer": 1, "head": 2}
        ).json()["values"]
        for one in (view, other)
    ]
    aligned = {base: n for n, base in enumerate(other["aligned_positions"]) if base >= 0}
    x, y = (
        np.array([np.nan if v is None else v for v in row])
        for row in ([sides[0][n] for n in aligned], [sides[1][n] for n in aligned.values()])
    )
    wanted, _, fit, size = slope(x, y, np.ones(len(x), bool))
    assert got["aligned"] == len(aligned)
    assert got["numbers"]["lambda"] == pytest.approx(float(wanted), rel=1e-4)
    assert got["numbers"]["lambda_r2"] == pytest.approx(float(fit), rel=1e-3)
    assert got["numbers"]["tokens"] == size
    assert 0 < got["numbers"]["uniform_slope"] < 1
    assert got["numbers"]["uniformity_b"] > 0


def test_two_prompts_share_their_common_tokens(client: TestClient, view: dict[str, Any]) -> None:
    other = TEXT.replace("12 apples", "7 green pears")
    made = result(client, "/api/views", {"model": MODEL, "text": other})
    data = client.get(f"/api/views/{made['result']['view']}").json()
    got = client.get("/api/comparison", params={"a": view["id"], "b": data["id"]}).json()
    assert got["aligned"] + got["unaligned"][0] == view["prompt"]
    assert got["aligned"] + got["unaligned"][1] == data["prompt"]
    assert 0 < got["aligned"] < view["prompt"]
    assert "".join(got["tokens"]).endswith("How many?")


def test_an_attention_row_is_binned_by_the_server(client: TestClient, view: dict[str, Any]) -> None:
    at, row = f"/api/views/{view['id']}", {"token": 6, "layer": 1, "head": 2, "direction": "to"}
    refused = client.get(f"{at}/attention-row-curve", params=row)
    assert (refused.status_code, refused.json()["code"]) == (400, "unknown-row")
    values = result(client, f"{at}/attention-row", row)["result"]["values"]
    asked = {**row, "first": 1, "last": 6, "bins": 2}
    curve = client.get(f"{at}/attention-row-curve", params=asked).json()
    assert (curve["size"], curve["start"]) == (3, [1, 4])
    assert curve["mean"][0] == pytest.approx(sum(values[1:4]) / 3, rel=1e-5)
    assert curve["high"] == pytest.approx([max(values[1:4]), max(values[4:6])], rel=1e-5)


def test_the_page_has_the_colours_of_figures(client: TestClient) -> None:
    theme = client.get("/api/choices").json()["theme"]
    assert theme["sides"] == [PUBLISHED.without, PUBLISHED.filled]
    assert theme["dark"]["axis"] == PUBLISHED.on(dark=True).config()["axis"]
    style = client.get("/static/theme.css")
    assert style.headers["content-type"].startswith("text/css")
    assert f"--ink: {PUBLISHED.inks[0]}" in style.text


def test_a_zoom_does_not_align_again(
    client: TestClient, view: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = result(client, "/api/views", {"model": MODEL, "text": TEXT.replace("12", "7")})
    align, aligned = compare_texts.align, []

    def counted(a: Any, b: Any) -> Any:
        aligned.append((a.id, b.id))
        return align(a, b)

    monkeypatch.setattr(compare_texts, "align", counted)
    request = {"a": view["id"], "b": made["result"]["view"]}
    whole = client.get("/api/comparison", params=request).json()
    near = client.get("/api/comparison", params={**request, "first": 2, "last": 6}).json()
    assert whole["aligned"] == near["aligned"] > 0
    other = {"a": request["b"], "b": request["a"]}
    assert (
        client.get("/api/comparison", params=other).json()["unaligned"] == whole["unaligned"][::-1]
    )
    assert aligned == [(request["a"], request["b"]), (other["a"], other["b"])]


def test_two_models_share_a_text(client: TestClient, view: dict[str, Any]) -> None:
    made = result(client, "/api/views", {"model": "zoo:chat-llama", "text": TEXT})
    data = client.get(f"/api/views/{made['result']['view']}").json()
    got = client.get("/api/comparison", params={"a": view["id"], "b": data["id"]}).json()
    assert got["aligned"] > 0
    assert got["aligned"] + got["unaligned"][1] == data["prompt"]


def test_knockout_moves_the_next_token(client: TestClient, view: dict[str, Any]) -> None:
    got = result(client, f"/api/views/{view['id']}/knockout-effect", {"first": 2, "last": 4})[
        "result"
    ]
    assert got["kl"] > 0
    assert got["before"] != got["after"]
    last = view["prompt"] - 1
    wrong = result(
        client, f"/api/views/{view['id']}/knockout-effect", {"first": last, "last": last}
    )
    assert wrong["state"] == "failed"
    assert wrong["code"] == "no-later-token"


def test_knockout_equals_the_librarys(
    client: TestClient, view: dict[str, Any], loaded: Any, scope: Any
) -> None:
    body = {"first": 2, "last": 4, "layer": 1, "head": 3}
    got = result(client, f"/api/views/{view['id']}/knockout-effect", body)["result"]
    ids = scope.tokens
    keys = torch.zeros_like(ids, dtype=torch.bool)
    keys[0, 2:5] = True
    behind = torch.arange(ids.shape[1])[None] > 4
    with torch.no_grad():
        before = loaded[0](ids).logits[0, -1].double().log_softmax(-1)
        with attnscope.knockout(loaded[0], keys=keys, queries=behind, layers=[1], heads=[3]):
            after = loaded[0](ids).logits[0, -1].double().log_softmax(-1)
    assert got["kl"] == pytest.approx(float((before.exp() * (before - after)).sum()), rel=1e-3)
    assert [p for _, p in got["after"]] == pytest.approx(
        after.exp().topk(8).values.tolist(), rel=1e-4
    )


def test_downloads(client: TestClient, view: dict[str, Any], tmp_path: Path) -> None:
    at = f"/api/views/{view['id']}"
    table = client.get(f"{at}/numbers.csv", params={"layer": 1}).text.splitlines()
    assert len(table) == 1 + view["read"]
    (tmp_path / "experiment.yaml").write_text(client.get(f"{at}/experiment.yaml").text)
    from attnscope.spec.experiment_yaml import read_experiment

    assert list(read_experiment(tmp_path / "experiment.yaml").models) == [MODEL]
    page = client.get(f"{at}/page.html").text
    assert len(page) < 300_000
    assert "http" not in page.replace("http-equiv", "")


def test_the_html_download_is_made_in_the_thread_of_the_queue(
    client: TestClient, view: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnscope.scope.scope import Scope

    row, threads = Scope.row, set()

    def recorded(*arguments: Any) -> Any:
        threads.add(threading.current_thread().name)
        return row(*arguments)

    monkeypatch.setattr(Scope, "row", recorded)
    made = result(client, "/api/views", {"model": MODEL, "text": TEXT})["result"]["view"]
    at = f"/api/views/{made}/page.html"
    assert client.get(at).status_code == 200
    assert threads == {"attnscope-work"}
    assert client.get(at, params={"queries": "none"}).status_code == 400


def test_the_queue_waits_for_a_result() -> None:
    queue = Queue(capacity=1)
    started, end = threading.Event(), threading.Event()

    def long(_: Any) -> None:
        started.set()
        end.wait(100)

    def fails(_: Any) -> None:
        raise InputError("why", code="unknown-layer")

    assert queue.result(lambda _: 7) == 7
    with raises(InputError, "unknown-layer"):
        queue.result(fails)
    queue.submit(long)
    assert started.wait(100)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(queue.result, lambda _: 8)
        until(lambda: queue._waiting)
        with pytest.raises(BusyError):
            queue.result(lambda _: 9)
        queue.close()
        with pytest.raises(GoneError):
            waits.result(100)
        with pytest.raises(GoneError):
            queue.result(lambda _: 10)
        end.set()


@pytest.mark.slow
def test_runs(client: TestClient) -> None:
    assert [run["name"] for run in client.get("/api/runs").json()["runs"]] == ["one"]
    report = client.get("/api/report", params={"run": "one"})
    assert "<html" in report.text
    assert "sandbox" in report.headers["content-security-policy"]
    request = {"run": "one", "sql": "SELECT count(*) AS n FROM cells"}
    assert int(client.post("/api/query", json=request).json()["rows"][0][0]) > 0
    request["sql"] = "SELECT avg(value) AS mean, 9007199254740993 AS whole FROM values"
    mean, whole = client.post("/api/query", json=request).json()["rows"][0]
    assert isinstance(mean, float)
    assert whole == "9007199254740993"


def test_a_report_is_built_once_for_each_state_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(made_run(), tmp_path / "one")
    built: list[str] = []

    def build(run: Any, **existing: Any) -> str:
        built.append(run.experiment.name)
        time.sleep(0.1)  # the other threads send their requests meanwhile
        return f"report {len(built)}"

    monkeypatch.setattr(import_module("attnscope.report.cache"), "build", build)
    monkeypatch.setenv("ATTNSCOPE_HOME", str(tmp_path / "home"))
    with TestClient(create(tmp_path), base_url="http://127.0.0.1:8765") as opened:

        def request(_: int) -> str:
            return opened.get("/api/report", params={"run": "one"}).text

        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(request, range(8))) == {"report 1"}
        assert request(0) == "report 1"
        file = tmp_path / "one" / "experiment.yaml"
        file.write_text(file.read_text().replace("combine: mean", "combine: max"))
        assert request(0) == "report 2"
        (tmp_path / "one" / "manifest.json").unlink()
        assert request(0) == request(1) == "report 3"
    assert len(built) == 3


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"model": MODEL, "text": "  "}, "empty-prompt"),
        ({"model": MODEL, "text": "word " * 300}, "prompt-too-long"),
        ({"model": "../../etc", "text": "a"}, "unknown-model"),
        ({"model": "/etc/passwd", "text": "a"}, "unknown-model"),
    ],
)
def test_a_prompt_that_cannot_be_measured(
    client: TestClient, body: dict[str, Any], code: str
) -> None:
    ended = result(client, "/api/views", body)
    assert (ended["state"], ended["code"]) == ("failed", code)


@pytest.mark.parametrize(
    "path",
    [
        "/static/..%2f..%2fserver.py",
        "/static/%2e%2e/server.py",
        "/api/views/..%2f..%2fx",
        "/api/report?run=../..",
        "/api/report?run=%2fetc",
        "/api/views/nope/token-values",
    ],
)
def test_no_request_reads_another_file(client: TestClient, path: str) -> None:
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
def test_foreign_requests_are_refused(
    client: TestClient, headers: dict[str, str], code: int
) -> None:
    given = {"content-type": "application/json"} | headers
    answer = client.post("/api/query", content=b"{}", headers=given)
    assert answer.status_code == code
    assert answer.json()["error"]


def test_a_body_without_a_length_is_cut_off(client: TestClient) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'{"run": "'
        for _ in range(5):
            yield b"x" * (security.LARGEST // 4)

    headers = {"content-type": "application/json"}
    answer = client.post("/api/query", content=pieces(), headers=headers)
    assert answer.status_code in (400, 413, 422)


def test_broken_bodies_are_refused(client: TestClient) -> None:
    headers = {"content-type": "application/json"}
    for body in (b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": 5}', b'"\\ud800"', b"NaN"):
        answer = client.post("/api/views", content=body, headers=headers)
        assert answer.status_code in (400, 422)
        assert answer.json()["error"]
    half = json.dumps({"model": MODEL, "text": "\ud800"}).encode()
    assert client.post("/api/views", content=half, headers=headers).status_code == 422


def test_every_response_has_the_policy(client: TestClient) -> None:
    for path in ("/", "/static/main.js", "/api/choices", "/api/jobs/nope"):
        headers = client.get(path).headers
        assert "script-src 'self'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


def test_positions_in_the_queue_and_cancelling() -> None:
    import threading

    go, queue = threading.Event(), Queue(capacity=2)
    started = threading.Event()

    def busy(job: Any) -> None:
        started.set()
        go.wait()

    first = queue.submit(busy)
    assert started.wait(200)
    second, third = queue.submit(lambda job: "second"), queue.submit(lambda job: "third")
    with raises(BusyError, "queue-full", waiting=2):
        queue.submit(lambda job: None)
    assert [queue.find(job.id)[1] for job in (first, second, third)] == [0, 1, 2]
    queue.cancel(second.id)
    assert queue.find(third.id)[1] == 1
    go.set()
    until(lambda: third.state == "done")
    assert second.state == "cancelled"
    assert second.result is None
    queue.close()


def ready(loaded: Any) -> Any:
    from attnscope.web.model_cache import Loaded

    return Loaded(name=MODEL, source=MODEL, model=loaded[0], tokenizer=loaded[1], bundled=True)


def test_a_running_job_is_cancelled_between_layers(loaded: Any) -> None:
    from attnscope.web.api_schemas import ViewRequest
    from attnscope.web.jobs import StoppedError
    from attnscope.web.measuring import Watcher, measure

    class Impatient(Watcher):
        request = 0

        def check(self) -> None:
            self.request += 1
            if self.request == 3:
                raise StoppedError("cancelled")

    with pytest.raises(StoppedError):
        measure(ready(loaded), ViewRequest(model=MODEL, text=TEXT), Impatient())
    assert not any(module._forward_pre_hooks for module in loaded[0].modules())
    assert measure(ready(loaded), ViewRequest(model=MODEL, text=TEXT)).tokens


def test_the_layers_of_a_long_text_arrive_one_by_one(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnscope.web import measuring
    from attnscope.web.api_schemas import ViewRequest

    monkeypatch.setattr(measuring, "SHORT", 500)
    partial: list[tuple[int, list[float]]] = []

    class Early(measuring.Watcher):
        def measured(self, view: Any) -> None:
            partial.append((len(view.layers), view.shade("received", "all", 0, 1).tolist()))

    made = measuring.measure(ready(loaded), ViewRequest(model=MODEL, text=TEXT * 80), Early())
    assert made.read > 1400
    assert [count for count, _ in partial] == list(range(1, made.layer_count))
    assert len(made.layers) == made.layer_count
    final = made.shade("received", "all", 0, 1).tolist()
    assert all(early == final for _, early in partial)
    assert {len(rows) for maps in made.values.values() for rows in maps.values()} == {
        made.layer_count
    }


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from attnscope import memory

    with TestClient(create(), base_url="http://127.0.0.1:8765") as opened:
        with monkeypatch.context() as little:
            little.setattr(memory, "free", lambda device="cpu": 100 << 20)
            ended = result(opened, "/api/views", {"model": MODEL, "text": "One text."})
            assert (ended["state"], ended["code"]) == ("failed", "not-enough-memory")
        assert result(opened, "/api/views", {"model": MODEL, "text": "One."})["state"] == "done"


@pytest.mark.slow
def test_a_model_deleted_while_in_use(tmp_path: Path) -> None:
    import shutil

    from attnscope import zoo

    folder = tmp_path / "mine"
    shutil.copytree(zoo.folder(MODEL), folder)
    with TestClient(
        create(models={"mine": str(folder)}), base_url="http://127.0.0.1:8765"
    ) as opened:
        made = result(opened, "/api/views", {"model": "mine", "text": TEXT})
        (folder / "model.safetensors").write_bytes(b"")  # the memory-mapped pages are gone too
        shutil.rmtree(folder)
        at = f"/api/views/{made['result']['view']}"
        assert result(opened, f"{at}/attention-row", {"token": 3, "layer": 0})["state"] == "done"
        again = result(opened, "/api/views", {"model": "mine", "text": TEXT})
        assert again["state"] == "done"
        at = f"/api/views/{again['result']['view']}"
        for other in ("zoo:chat-llama", "zoo:spatial-base"):
            assert result(opened, "/api/views", {"model": other, "text": "A."})["state"] == "done"
        gone = result(opened, "/api/views", {"model": "mine", "text": TEXT})
        assert (gone["state"], gone["code"]) == ("failed", "model-deleted")
        # The view keeps its queries and keys, so a row needs no model; a knockout needs it.
        assert result(opened, f"{at}/attention-row", {"token": 3, "layer": 0})["state"] == "done"
        cut = result(opened, f"{at}/knockout-effect", {"first": 1, "last": 2})
        assert cut["code"] == "model-deleted"
        assert opened.get("/api/choices").status_code == 200
