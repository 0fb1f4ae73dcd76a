"""PEFT adapters: merged into their base, and refused on another."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import attnscope
from attnscope import zoo
from attnscope.cli import main
from attnscope.errors import InputError, ModelError
from attnscope.experiment.execute import run
from attnscope.loading import find
from attnscope.loading.revision import digest_of_folder
from attnscope.run.store import open_run
from attnscope.spec.experiment import make_experiment
from attnscope.spec.experiment_yaml import read_experiment
from made_models import save_model
from support_errors import raises

IDS = torch.arange(5, 40)[None]


def save_adapter(base: str, folder: Path, **keys: Any) -> str:
    """A LoRA that changes something, as PEFT saves it."""
    model = AutoModelForCausalLM.from_pretrained(base)
    asked = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "down_proj"]}
    config = peft.LoraConfig(task_type="CAUSAL_LM", **{**asked, **keys})
    tuned = peft.get_peft_model(model, config)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    tuned.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("peft") / "base")


@pytest.fixture(scope="module")
def adapter(base: str) -> str:
    return save_adapter(base, Path(base).parent / "adapter")


def test_the_same_as_peft_itself(base: str, adapter: str) -> None:
    plain = AutoModelForCausalLM.from_pretrained(base)
    tuned = peft.PeftModel.from_pretrained(plain, adapter).eval()
    model, tokenizer = attnscope.load(base, adapter=adapter)
    alone, _ = attnscope.load(base)
    assert type(model) is type(alone)
    with torch.no_grad():
        ids = IDS.to(model.device)
        expected = tuned.to(model.device)(ids).logits
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(alone(ids).logits, expected, atol=0.1)
        with attnscope.watch(model) as scope:
            model(ids)
    assert scope.layers == [0, 1]
    assert tokenizer.chat_template


def test_base_plus_adapter_is_the_same(base: str, adapter: str) -> None:
    one, _ = attnscope.load(base, adapter=adapter)
    other, _ = attnscope.load(f"{base}+{adapter}")
    with torch.no_grad():
        assert torch.equal(one(IDS).logits, other(IDS).logits)
    assert other.name_or_path == f"{base}+{adapter}"


def test_on_the_command_line(
    base: str, adapter: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def look(name: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["attnscope", "look", name, "Tom has 12 apples"])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capfd.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    code, tuned, _ = look(f"{base}+{adapter}")
    assert code == 0
    assert "whitespace" in tuned
    assert tuned != look(base)[1]
    shallow = save_model(Path(base).parent / "shallow", layers=1)
    code, _, err = look(f"{shallow}+{adapter}")
    assert code == 2
    assert [line[:7] for line in err.splitlines()] == ["error: "]


def test_both_revisions_are_recorded(base: str, adapter: str, tmp_path: Path) -> None:
    both = f"{digest_of_folder(Path(base))}+{digest_of_folder(Path(adapter))}"
    assert find(base, adapter=adapter).revision == both
    file = tmp_path / "e.yaml"
    file.write_text(
        f"name: pair\nmodels: {{before: {base}, after: {base}+{adapter}}}\n"
        "prompts: {source: math, count: 2, level: 1}\n"
    )
    run(read_experiment(file), tmp_path / "run")
    opened = open_run(tmp_path / "run")
    recorded = opened.environment["models"]
    assert recorded["after"]["revision"] == both
    assert recorded["before"]["revision"] == both.partition("+")[0]


def test_an_edit_of_the_adapter_shows(base: str, tmp_path: Path) -> None:
    name = f"{base}+{save_adapter(base, tmp_path / 'a')}"
    before = find(name).revision
    save_adapter(base, tmp_path / "a", lora_alpha=16)
    assert find(name).revision != before


def test_an_adapter_alone_names_its_base(base: str, adapter: str) -> None:
    with raises(ModelError, "adapter-without-base"):
        attnscope.load(adapter)


def test_an_adapter_of_another_shape(adapter: str, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", heads=8)
    with raises(ModelError, "adapter-mismatch"):
        attnscope.load(other, adapter=adapter)


def test_an_adapter_of_a_deeper_base(adapter: str, tmp_path: Path) -> None:
    shallow = save_model(tmp_path / "shallow", layers=1)
    with raises(ModelError, "adapter-mismatch"):
        attnscope.load(shallow, adapter=adapter)
    deep = save_model(tmp_path / "deep", layers=3)
    with raises(ModelError, "adapter-mismatch"):
        attnscope.load(deep, adapter=adapter)


def test_an_adapter_of_another_family(tmp_path: Path, base: str) -> None:
    wrong = save_adapter(base, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    config["target_modules"] = ["query_key_value"]
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config))
    with raises(ModelError, "adapter-mismatch"):
        attnscope.load(base, adapter=wrong)


def test_an_adapter_that_lacks_a_weight(base: str, tmp_path: Path) -> None:
    name = save_adapter(base, tmp_path / "a")
    weights = load_file(tmp_path / "a" / "adapter_model.safetensors")
    weights.pop(next(key for key in weights if "layers.1.self_attn.q_proj.lora_B" in key))
    save_file(weights, tmp_path / "a" / "adapter_model.safetensors")
    with raises(ModelError, "adapter-mismatch"):
        attnscope.load(base, adapter=name)


@pytest.mark.parametrize("damage", ["pickled", "no config", "config", "cut", "missing"])
def test_a_broken_adapter(base: str, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "a"
    if damage != "missing":
        save_adapter(base, folder)
    weights = folder / "adapter_model.safetensors"
    if damage == "pickled":
        weights.rename(folder / "adapter_model.bin")
    elif damage == "no config":
        (folder / "adapter_config.json").unlink()
    elif damage == "config":
        (folder / "adapter_config.json").write_text("{")
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-9])
    codes = {"pickled": "pickled-weights", "config": "unreadable-file", "cut": "adapter-mismatch"}
    with raises(ModelError, codes.get(damage, "no-adapter")):
        attnscope.load(base, adapter=folder)


def test_a_kind_that_cannot_be_merged(base: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "prompt")
    with raises(ModelError, "unsupported-adapter", type="PROMPT_TUNING"):
        attnscope.load(base, adapter=tmp_path / "prompt")


def test_without_the_extra(base: str, adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *m: None if name == "peft" else found(name, *m)
    )
    with raises(InputError, "missing-package", package="peft"):
        attnscope.load(base, adapter=adapter)


def test_names_with_a_plus(base: str, adapter: str, tmp_path: Path) -> None:
    named = save_model(tmp_path / "c++")
    assert find(named).location == named
    with raises(ModelError, "bad-model-name"):
        attnscope.load(f"{base}+")
    with raises(ModelError, "two-adapters"):
        attnscope.load(f"{base}+{adapter}", adapter=adapter)


def test_an_adapter_of_the_zoo(
    base: str, adapter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundled adapter finds its base by name."""
    card = zoo.card("smollm2-phys")
    assert zoo.base_of("zoo:smollm2-phys") == "zoo:smollm2"
    assert zoo.is_adapter("zoo:smollm2-phys")
    assert (card.layers, card.heads) == (
        zoo.FETCHED["smollm2"].layers,
        zoo.FETCHED["smollm2"].heads,
    )
    folders = {"tuned": Path(adapter), "tiny": Path(base)}
    monkeypatch.setattr(zoo, "is_adapter", lambda name: name == "zoo:tuned")
    monkeypatch.setattr(zoo, "base_of", lambda name: "zoo:tiny")
    monkeypatch.setattr(zoo, "folder", lambda name: folders[name.removeprefix("zoo:")])
    model, _ = attnscope.load("zoo:tuned")
    other, _ = attnscope.load(base, adapter=adapter)
    with torch.no_grad():
        ids = IDS.to(model.device)
        assert torch.equal(model(ids).logits, other(ids).logits)
    with raises(ModelError, "two-adapters"):
        attnscope.load("zoo:tuned", adapter=adapter)


def test_an_adapter_on_an_adapter_is_no_model(base: str, adapter: str) -> None:
    experiment = make_experiment(
        name="x", models={"a": f"{base}+{base}"}, prompts={"source": "math", "count": 1}
    )
    with raises(ModelError, "no-adapter"):
        run(experiment, "unused")


def test_what_was_merged_can_be_saved(base: str, adapter: str, tmp_path: Path) -> None:
    model, tokenizer = attnscope.load(base, adapter=adapter)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = attnscope.load(tmp_path)
    with torch.no_grad():
        ids = IDS.to(model.device)
        assert torch.equal(model(ids).logits, again(ids).logits)
