"""The observer and the change of docs/extending.md run as printed."""

import re
from pathlib import Path
from typing import Any

import torch

import attnscope

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


@torch.no_grad()
def test_the_observer_and_the_change_run() -> None:
    text = PAGE.read_text(encoding="utf-8")
    _, last = text.split("## An observer, a change")
    (block,) = re.findall(r"^```python\n(.*?)^```$", last, flags=re.M | re.S)
    made: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), made)
    layers = made["scope"].layers
    assert sorted(made["mine"].found) == layers
    assert min(made["mine"].found.values()) > 0
    with attnscope.watch(made["model"]) as plain:
        made["model"](**made["inputs"])
    same = [torch.equal(plain.received(n), made["scope"].received(n)) for n in layers]
    assert same[:4] == [True, True, True, False]
