"""What a run says about the claims that a figure is about, for the figure's description.

Verdicts come from `attnscope.stats`; here they are only chosen and worded. This module must not
know charts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from attnscope.errors import AttnscopeError
from attnscope.figures.figure import Run
from attnscope.figures.words import inline
from attnscope.stats.claims import built_in
from attnscope.stats.on_run import judge_run

if TYPE_CHECKING:
    from attnscope.run.store import Run as StoredRun

__all__ = ["CLAIMS", "claims_of"]

CLAIMS: Mapping[str, tuple[str, ...]] = {
    "token-types": ("maps", "map-characters"),
    "effect-heads": ("maps", "map-characters"),
    "filler-profile": ("fall", "one-factor", "one-factor-fit"),
    "lambda": ("fall", "one-factor"),
    "filler-vs-sentence": ("uniform-filler",),
}
"""The built-in claims that a figure shows the evidence for."""


def claims_of(run: Run, figure: str) -> str:
    """A section of Markdown with the verdicts on the figure's claims; nothing if none is judged."""
    claims = [claim for claim in built_in() if claim.name in CLAIMS.get(figure, ())]
    if not claims:
        return ""
    try:
        verdicts = judge_run(cast("StoredRun", run), claims)
    except AttnscopeError:
        return ""
    lines = [
        f"- {f'{inline(v.model)}: ' if v.model else ''}{inline(v.statement)} "
        f"**{v.verdict}**: {inline(v.reason)}"
        for v in verdicts
        if v.verdict != "not measured"
    ]
    if not lines:
        return ""
    return "### Claims\nJudged on the whole run.\n\n" + "\n".join(lines) + "\n\n"
