"""What comes at once: slices of what was measured, pairs of views, and files of them to keep.

This module must not know how anything is measured, or what is worked on in the queue.
"""

from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query
from fastapi import Path as InPath
from fastapi.responses import Response

from attnscope.web import compare_texts, downloads
from attnscope.web.view_cache import ViewCache
from attnscope.web.views import SomeHeads, curve

Id = Annotated[str, InPath(max_length=40, pattern=r"^[A-Za-z0-9_-]+$")]
Layer = Annotated[int | None, Query(ge=0, le=10_000)]
Head = Annotated[int | None, Query(ge=0, le=10_000)]
Word = Annotated[str, Query(max_length=60)]
Among = Annotated[
    str, Query(max_length=40_000, pattern=r"^(\d{1,4}\.\d{1,4}(,\d{1,4}\.\d{1,4})*)?$")
]
"""Some heads, as `layer.head,layer.head`."""
First = Annotated[int, Query(ge=0, le=10_000_000)]
Last = Annotated[int | None, Query(ge=1, le=10_000_000)]
Bins = Annotated[int, Query(ge=1, le=4_000)]


def sent_as(kind: str) -> dict[int | str, dict[str, Any]]:
    """What a file is sent as."""
    return {200: {"description": "the file", "content": {kind: {}}}}


def attached(name: str) -> dict[str, str]:
    """The header of a file that is kept under this name."""
    return {"content-disposition": f'attachment; filename="{name}"'}


def _heads(among: str) -> SomeHeads:
    pairs = [each.split(".") for each in among.split(",") if each]
    return [(int(layer), int(head)) for layer, head in pairs]


def slices(app: FastAPI, memory: ViewCache) -> None:
    """What there is of one view."""

    @app.get("/api/views/{id}")
    def facts(id: Id) -> dict[str, Any]:
        """The tokens, and what there is of them."""
        return downloads.facts(memory.get(id))

    def shaded(
        id: Id,
        of: Word = "received",
        queries: Word = "all",
        layer: Layer = None,
        head: Head = None,
        among: Among = "",
    ) -> Any:
        return memory.get(id).shade(of, queries, layer, head, _heads(among))

    by_shade: Any = Depends(shaded)

    @app.get("/api/views/{id}/shade")
    def shade(values: Any = by_shade) -> dict[str, Any]:
        """A number for every token; the mean over some heads, where `among` says which."""
        return {"values": downloads.plain(values)}

    @app.get("/api/views/{id}/curve")
    def along(
        values: Any = by_shade, first: First = 0, last: Last = None, bins: Bins = 600
    ) -> dict[str, Any]:
        """The same along a stretch of the text, in bins: finer for a shorter stretch."""
        return downloads.binned(curve(values, first, last or len(values), bins))

    @app.get("/api/views/{id}/map")
    def head_map(id: Id, of: Word = "entropy", queries: Word = "all") -> dict[str, Any]:
        """A number for every layer and head."""
        rows = memory.get(id).head_map(of, queries)
        return {"rows": [downloads.plain(row) for row in rows]}

    @app.get("/api/views/{id}/classes")
    def classes(id: Id, queries: Word = "all", head: Head = None) -> dict[str, Any]:
        """The mass of every class in every layer."""
        return {"rows": memory.get(id).class_bars(queries, head)}


def compared(app: FastAPI, memory: ViewCache) -> None:
    """Two views side by side."""
    alignments = compare_texts.Alignments()

    @app.get("/api/pair")
    def pair(
        a: Annotated[str, Query(max_length=40)],
        b: Annotated[str, Query(max_length=40)],
        layer: Annotated[int, Query(ge=0, le=10_000)] = 0,
        head: Head = None,
        first: First = 0,
        last: Last = None,
        bins: Bins = 600,
    ) -> dict[str, Any]:
        """Averages of the tokens that two views share, one beside the other, and λ."""
        sides = memory.get(a), memory.get(b)
        aligned = alignments.of(*sides)
        told = compare_texts.numbers(*sides, aligned, layer, head)
        values = [view.shade("average", "all", layer, head) for view in sides]
        length = len(aligned.a)
        stretch = (first, last or length, bins)
        return {
            "aligned": length,
            "alone": [aligned.alone_a, aligned.alone_b],
            "numbers": {name: downloads.number(value) for name, value in told.items()},
            "tokens": [sides[0].tokens[n] for n in aligned.a] if length <= bins else [],
            "curves": [
                downloads.binned(curve(of[at], *stretch)) if length else None
                for of, at in zip(values, (aligned.a, aligned.b), strict=True)
            ],
        }


def kept(app: FastAPI, memory: ViewCache) -> None:
    """Files to keep."""

    @app.get("/api/views/{id}/numbers.csv", response_class=Response, responses=sent_as("text/csv"))
    def numbers(
        id: Id,
        of: Word = "received",
        queries: Word = "all",
        layer: Layer = None,
        head: Head = None,
    ) -> Response:
        """What the text is shaded by."""
        text = downloads.csv(memory.get(id), of, queries, layer, head)
        return Response(text, media_type="text/csv", headers=attached("attnscope.csv"))

    @app.get(
        "/api/views/{id}/experiment.yaml",
        response_class=Response,
        responses=sent_as("application/yaml"),
    )
    def experiment(id: Id, layer: Layer = None, head: Head = None) -> Response:
        """An experiment that repeats this over many prompts."""
        text = downloads.experiment(memory.get(id), layer, head)
        return Response(text, media_type="application/yaml", headers=attached("experiment.yaml"))
