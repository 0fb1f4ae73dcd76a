"""Revisions: what is recorded is what is loaded, and any edit shows."""

import os
from pathlib import Path

import pytest

from attnscope.cli import main
from attnscope.errors import ModelError
from attnscope.loading import find, load, load_tokenizer
from attnscope.loading.cache import home
from attnscope.loading.revision import digest_of_file
from made_models import save_model
from support_errors import raises


def test_a_folder_saved_again_has_another_revision(tmp_path: Path) -> None:
    name = save_model(tmp_path / "model", seed=1)
    before = find(name).revision
    assert find(name).revision == before
    save_model(tmp_path / "model", seed=2)
    assert find(name).revision != before


@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"]
)
def test_every_file_that_is_read_counts(tmp_path: Path, file: str) -> None:
    name = save_model(tmp_path / "model")
    before = find(name).revision
    with (tmp_path / "model" / file).open("a") as opened:
        opened.write(" ")
    assert find(name).revision != before


def test_what_is_not_read_does_not_count(tmp_path: Path) -> None:
    name = save_model(tmp_path / "model")
    before = find(name).revision
    (tmp_path / "model" / "README.md").write_text("a card")
    assert find(name).revision == before


def aged(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    os.utime(path, (1e9, 1e9))


def test_one_byte_of_a_large_file_shows_although_size_and_time_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNSCOPE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("attnscope.loading.revision._SETTLED", -(10**12))  # all is past
    file = tmp_path / "weights"
    content = bytearray(3 * 2**20)
    aged(file, content)
    first = digest_of_file(file)
    (kept,) = (tmp_path / "home" / "digests").iterdir()
    kept.write_text(kept.read_text().replace(first, "kept"))
    assert digest_of_file(file) == "kept"  # so it is looked up
    content[2_000_000] ^= 1
    aged(file, content)
    assert digest_of_file(file) not in ("kept", first)


def test_a_file_written_just_now_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within one tick of the clock it could change and look the same."""
    monkeypatch.setenv("ATTNSCOPE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("attnscope.loading.revision._SETTLED", 10**18)  # all is just now
    file = tmp_path / "weights"
    file.write_bytes(bytes(3 * 2**20))
    digest_of_file(file)
    assert not (tmp_path / "home" / "digests").exists()


def test_without_a_place_to_keep_digests_they_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnscope.loading.revision._SETTLED", -(10**12))
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ATTNSCOPE_HOME", str(tmp_path / "file"))
    aged(tmp_path / "weights", bytes(2**21))
    assert len(digest_of_file(tmp_path / "weights")) == 64


def test_where_things_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNSCOPE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert home() == Path("/somewhere/attnscope")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert home() == Path.home() / ".cache" / "attnscope"


FIRST, SECOND = "1" * 40, "2" * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A cache of the hub with two commits of one model: `main` is the second."""
    repo = tmp_path / "hub" / "models--someone--tiny"
    for seed, commit in enumerate((FIRST, SECOND)):
        save_model(repo / "snapshots" / commit, seed=seed)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(SECOND)
    (repo / "refs" / "v1").write_text(FIRST)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return "someone/tiny"


def first_weight(model: object) -> float:
    return float(model.model.layers[0].self_attn.q_proj.weight[0, 0].item())  # type: ignore[attr-defined]


def test_what_is_recorded_is_what_is_loaded(hub: str) -> None:
    main, _ = load(hub)
    first, _ = load(hub, revision="v1")
    pinned, _ = load(f"{hub}@{FIRST}")
    assert first_weight(first) == first_weight(pinned) != first_weight(main)
    assert find(hub).revision == SECOND
    assert find(hub).pinned == f"{hub}@{SECOND}"
    assert find(hub, revision="v1").revision == FIRST
    assert find(f"{hub}@v1").pinned == f"{hub}@{FIRST}"
    assert load_tokenizer(f"{hub}@{FIRST}").chat_template


def test_main_moves_between_planning_and_loading(hub: str, tmp_path: Path) -> None:
    pinned = find(f"{hub}@v1").pinned
    (tmp_path / "hub" / "models--someone--tiny" / "refs" / "v1").write_text(SECOND)
    assert first_weight(load(pinned)[0]) == first_weight(load(hub, revision=FIRST)[0])


def test_a_revision_that_does_not_exist(hub: str) -> None:
    with raises(ModelError, "cannot-load", revision="no-such"):
        load(hub, revision="no-such")


def test_a_revision_that_does_not_exist_on_the_command_line(
    hub: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["attnscope", "look", f"{hub}@no-such", "hello"])
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("error: could not load revision 'no-such' of 'someone/tiny'")
    assert len(lines) == 2  # and what to do without a connection


def test_a_folder_has_no_revisions(tmp_path: Path) -> None:
    with raises(ModelError, "no-revision"):
        load(save_model(tmp_path / "model"), revision="main")
    with raises(ModelError, "no-revision"):
        load("zoo:math-qwen2", revision="main")
