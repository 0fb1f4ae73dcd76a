"""Whether a text fits: positions, ids, the first token, the chat template."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from typer.testing import CliRunner

import attnscope
from attnscope.cli import app
from attnscope.errors import AttnscopeWarning, InputError, ModelError
from attnscope.experiment.plan import make_plan
from attnscope.loading import load_tokenizer
from attnscope.loading.compatibility import add_bos, check_fit, expected_bos, positions
from attnscope.loading.device import chosen_device
from attnscope.look import look
from attnscope.spec.experiment import make_experiment
from made_models import save_model
from support_errors import raises


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (hf.GPT2Config(n_positions=32), (32, True)),
        (hf.BertConfig(max_position_embeddings=512), (512, True)),
        (hf.RobertaConfig(max_position_embeddings=514, pad_token_id=1), (512, True)),
        (hf.Qwen2Config(max_position_embeddings=2048), (2048, False)),
        (hf.BloomConfig(), (None, False)),
        (hf.T5Config(), (None, False)),
        (
            hf.Qwen2Config(
                max_position_embeddings=2048,
                rope_parameters={
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 2048,
                    "rope_theta": 1e4,
                },
            ),
            (8192, False),
        ),
        (
            hf.LlamaConfig(
                max_position_embeddings=8192,
                rope_parameters={
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 1024,
                    "rope_theta": 1e4,
                },
            ),
            (8192, False),
        ),
    ],
)
def test_positions(config: Any, expected: tuple[int | None, bool]) -> None:
    assert positions(config) == expected


def test_what_does_not_fit() -> None:
    learned, rotary = hf.GPT2Config(n_positions=32), hf.Qwen2Config(max_position_embeddings=32)
    for config in (learned, rotary):
        check_fit(config, [7] * 32)
        with raises(InputError, "too-many-tokens", tokens=33, positions=32):
            check_fit(config, [7] * 33)
    check_fit(rotary, [7] * 33, beyond=True)
    with raises(InputError, "too-many-tokens", tokens=33, positions=32):
        check_fit(learned, [7] * 33, beyond=True)
    with raises(InputError, "wrong-tokenizer", id=32000, embeddings=32000):
        check_fit(hf.LlamaConfig(vocab_size=32000), [1, 32000])


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model made for 40 positions."""
    folder = Path(save_model(tmp_path_factory.mktemp("fit") / "short"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 40}))
    return str(folder)


def experiment(**keys: Any) -> Any:
    asked = {"name": "x", "prompts": {"source": "math", "count": 2, "level": 1}}
    return make_experiment(**{**asked, **keys})


def test_a_plan_refuses_what_does_not_fit(short: str) -> None:
    models = {"short": short}
    with raises(InputError, "too-many-tokens", positions=40):
        make_plan(experiment(models=models))
    assert make_plan(experiment(models=models, beyond_positions=True)).size == 2


def test_check_and_look_refuse_too_many_tokens(short: str, tmp_path: Path) -> None:
    file = tmp_path / "e.yaml"
    file.write_text(f"name: x\nmodels: [{short}]\nprompts: {{source: math, count: 2}}\n")
    checked = CliRunner().invoke(app, ["run", str(file), "--check"])
    assert checked.exception.positions == 40
    text = "word " * 60
    seen = CliRunner().invoke(app, ["look", short, text])
    assert seen.exception.code == "too-many-tokens"
    assert CliRunner().invoke(app, ["look", short, text, "--beyond-positions"]).exit_code == 0


def test_chat_is_settled_by_the_models(tmp_path: Path) -> None:
    chat, plain = save_model(tmp_path / "chat"), save_model(tmp_path / "plain", chat=False)
    assert make_plan(experiment(models={"a": chat})).settled.chat is True
    plan = make_plan(experiment(models={"a": plain}))
    assert plan.settled.chat is False
    with raises(InputError, "chat-templates-differ"):
        make_plan(experiment(models={"a": chat, "b": plain}))
    both = make_plan(experiment(models={"a": chat, "b": plain}, chat=False))
    assert len({tuple(c.tokens.ids) for m in both.models for c in m.cells() if c.prompt == 0}) == 1
    with raises(InputError, "no-chat-template"):
        make_plan(experiment(models={"b": plain}, chat=True))


def test_reproduce_on_a_model_without_a_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = save_model(tmp_path / "plain", chat=False, layers=3)
    chat = save_model(tmp_path / "chat", layers=3)
    planned = []

    def plan_only(asked: Any) -> Any:
        planned.append(make_plan(asked).settled.chat)
        raise InputError("planned")

    monkeypatch.setattr("attnscope.experiment.plan.make_plan", plan_only)
    asked = ["reproduce", "filler-profile", "--heads", "0", "--prompts", "1", "--models"]
    for more in ([plain], [chat, "--no-chat"], [chat, "--chat"], [plain, "--no-chat"]):
        assert "planned" in str(CliRunner().invoke(app, [*asked, *more]).exception)
    assert planned == [False, False, True, False]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama whose tokenizer leaves out the <s> that its configuration names."""
    return save_model(tmp_path_factory.mktemp("bos") / "llama", "llama", chat=False)


def test_a_tokenizer_that_drops_the_first_token_is_warned_of(without: str) -> None:
    with pytest.warns(AttnscopeWarning, match="<s>"):
        _, tokenizer = attnscope.load(without)
    assert tokenizer("a").input_ids[0] != 1
    _, tokenizer = attnscope.load(without, bos=True)
    assert tokenizer("a 12").input_ids[0] == 1
    with pytest.warns(AttnscopeWarning, match=without):
        make_plan(experiment(models={"m": without}))
    planned = make_plan(experiment(models={"m": without}, bos=True)).models[0].cells()[0].tokens
    assert planned.ids[0] == 1
    assert planned.offsets[0].tolist() == [0, 0]


def test_look_warns_and_adds(without: str) -> None:
    model, tokenizer = attnscope.load(without, bos=True)
    assert look(model, tokenizer, "hello 12").tokens[0] == "<s>"
    with pytest.warns(AttnscopeWarning):
        model, tokenizer = attnscope.load(without)
    with pytest.warns(AttnscopeWarning, match="<s>"):
        look(model, tokenizer, "hello 12")


def test_models_without_the_warning(tmp_path: Path) -> None:
    """Another name of the token, another family, or a tokenizer that disables the token."""
    tokenizer = load_tokenizer(save_model(tmp_path / "qwen"))
    assert expected_bos(hf.LlamaConfig(bos_token_id=1), tokenizer) == "<s>"
    assert expected_bos(hf.LlamaConfig(bos_token_id=2), tokenizer) is None
    assert expected_bos(hf.Qwen2Config(bos_token_id=1), tokenizer) is None
    tokenizer.init_kwargs["add_bos_token"] = False
    assert expected_bos(hf.LlamaConfig(bos_token_id=1), tokenizer) is None
    del tokenizer.init_kwargs["add_bos_token"]
    tokenizer.bos_token = "<|im_start|>"
    config = hf.LlamaConfig(bos_token_id=tokenizer.bos_token_id)
    assert expected_bos(config, tokenizer) is None


def test_bos_goes_in_front_of_a_chat_once(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_model(tmp_path / "m"))
    for _ in range(2):
        add_bos(tokenizer, "m")
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False).startswith("<s><|im_start|>")
    assert tokenizer("a").input_ids[:2].count(1) == 1
    tokenizer.save_pretrained(tmp_path / "m")
    assert load_tokenizer(tmp_path / "m")("a").input_ids[0] == 1
    tokenizer.bos_token = None
    with raises(ModelError, "no-bos-token"):
        add_bos(tokenizer, "m")


def test_chosen_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert chosen_device(None) == "cpu"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert chosen_device(None) == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert chosen_device(None) == "cuda"
    assert chosen_device("cuda:1") == "cuda:1"
    for bad in ("cuda:2", "cpu:x", "tpu", "auto:1", ""):
        with raises(InputError, "unknown-device"):
            chosen_device(bad)


def test_mps_is_the_default_device_of_a_mac(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert make_plan(experiment(models={"a": save_model(tmp_path / "m")})).device == "mps"
