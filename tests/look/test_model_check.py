"""`attnscope doctor`: it prints versions, and finds a model that is measured wrongly."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel, T5Config, T5ForConditionalGeneration
from typer.testing import CliRunner

import attnscope
from attnscope.cli import app
from attnscope.look.model_check import check_model
from attnscope.scope.scope import Scope

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def outcomes(model: Any, tokenizer: Any) -> dict[str, bool | None]:
    return {check.name: check.passed for check in check_model(model.eval(), tokenizer)}


def loaded(**options: Any) -> tuple[Any, Any]:
    return attnscope.load("zoo:math-qwen2", device="cpu", **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_causal_model_passes(dtype: str) -> None:
    model, tokenizer = loaded(dtype=dtype)
    assert outcomes(model, tokenizer) == dict.fromkeys(
        ("sums", "eager attention", "knockout", "backend"), True
    )
    assert model.config._attn_implementation == "sdpa"


def test_an_encoder_and_a_model_of_two_stacks_pass() -> None:
    _, tokenizer = loaded()
    torch.manual_seed(0)
    encoder = BertModel(BertConfig(vocab_size=len(tokenizer), intermediate_size=32, **SMALL))
    assert outcomes(encoder, tokenizer)["eager attention"] is True
    sizes = {"d_model": 32, "d_kv": 16, "num_layers": 2, "num_heads": 2, "d_ff": 32}
    both = T5ForConditionalGeneration(
        T5Config(vocab_size=len(tokenizer), decoder_start_token_id=0, **sizes)
    )
    found = outcomes(both, tokenizer)
    assert found["eager attention"] is True
    assert found["knockout"] is None


def test_wrong_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Scope.row
    monkeypatch.setattr(Scope, "row", lambda *args, **named: right(*args, **named).roll(1, -1))
    assert outcomes(*loaded())["eager attention"] is False


def test_a_knockout_without_effect_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    monkeypatch.setattr(attnscope, "knockout", lambda *args, **named: nullcontext(), raising=False)
    assert outcomes(*loaded())["knockout"] is False


def test_the_command_prints_checks_and_fails_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["doctor", "zoo:math-qwen2", "--json", "--device", "cpu"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    values = json.loads(result.stdout)
    assert values["torch"] == torch.__version__
    assert [check["passed"] for check in values["checks"]] == [True] * 4
    right = Scope.row
    monkeypatch.setattr(Scope, "row", lambda *args, **named: right(*args, **named).roll(1, -1))
    assert CliRunner().invoke(app, command).exit_code == 1


def test_the_version() -> None:
    for option in ("--version", "-h"):
        assert CliRunner().invoke(app, [option]).exit_code == 0
    out = subprocess.run(
        [sys.executable, "-m", "attnscope", "--version"], capture_output=True, text=True, check=True
    )
    assert out.stdout == f"attnscope {attnscope.__version__}\n"
