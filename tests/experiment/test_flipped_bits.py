"""One changed bit in a finished run: the same command mends it to the same bytes, or refuses."""

import shutil

import pytest

from attnscope.errors import AttnscopeError, InputError
from attnscope.experiment.execute import run
from attnscope.recipes import RECIPES
from attnscope.run.store import open_run
from attnscope.spec.experiment import make_experiment
from run_bytes import bytes_of

FLIPS = 9
"""Bits in each file."""


@pytest.fixture(scope="module")
def experiment(folder):
    source = {"source": "math", "count": 2, "level": 1}
    return make_experiment(name="small", models={"tiny": folder}, prompts=source, measures=["mass"])


@pytest.fixture(scope="module")
def claims():
    return [RECIPES["filler-profile"].claims[0]]


@pytest.fixture(scope="module")
def done(tmp_path_factory, experiment, claims):
    out = tmp_path_factory.mktemp("runs") / "run"
    run(experiment, out, claims=claims)
    return out


def flipped(content, n):
    """The content with the nth of its chosen bits changed."""
    changed = bytearray(content)
    changed[len(content) * (2 * n + 1) // (2 * FLIPS)] ^= 1 << (n * 5 + 1) % 8
    return bytes(changed)


def opens(path):
    try:
        opened = open_run(path)
        opened.verify()
        return len(opened.claims) > 0
    except AttnscopeError:
        return False


@pytest.mark.slow
def test_a_changed_bit_is_mended_or_refused(done, experiment, claims, tmp_path):
    whole, mended = bytes_of(done), 0
    for name, content in whole.items():
        for n in range(FLIPS):
            copy = tmp_path / f"{name.replace('/', '-')}-{n}"
            shutil.copytree(done, copy)
            (copy / name).write_bytes(flipped(content, n))
            assert not opens(copy), (name, n)
            try:
                run(experiment, copy, claims=claims)
            except AttnscopeError:
                assert not opens(copy), (name, n)
            else:
                assert bytes_of(copy) == whole, (name, n)
                mended += 1
    assert mended > len(whole) * FLIPS / 2


def index_of(folder):
    (index,) = (folder / "cells").glob("*.json")
    return index


def test_a_damaged_index_does_not_outlive_the_manifest(done, experiment, claims, tmp_path):
    """A rerun that is stopped has removed the manifest, which holds the digest of the index."""
    copy = tmp_path / "run"
    shutil.copytree(done, copy)
    index = index_of(copy)
    index.write_bytes(index.read_bytes().replace(b'"base", ', b'"base", 1'))

    def fails(*_, **__):
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        run(experiment, copy, claims=claims, executor=fails)
    run(experiment, copy, claims=claims)
    assert bytes_of(copy) == bytes_of(done)


@pytest.mark.parametrize("finished", [True, False])
def test_damaged_claims_are_not_taken_for_the_runs_own(done, experiment, tmp_path, finished):
    copy = tmp_path / "run"
    shutil.copytree(done, copy)
    if not finished:
        (copy / "manifest.json").unlink()
    file = copy / "claims.yaml"
    file.write_bytes(file.read_bytes().replace(b"0.95", b"0.85").replace(b"0.3", b"0.2"))
    with pytest.raises(InputError) as error:
        run(experiment, copy)
    assert error.value.code == "damaged-claims"


def test_a_changed_environment_is_refused(done, experiment, claims, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(done, copy)
    file = copy / "environment.json"
    file.write_bytes(file.read_bytes() + b"\n")
    with pytest.raises(InputError) as error:
        run(experiment, copy, claims=claims)
    assert error.value.code == "damaged-environment"
    file.unlink()
    run(experiment, copy, claims=claims)
    assert bytes_of(copy) == bytes_of(done)
