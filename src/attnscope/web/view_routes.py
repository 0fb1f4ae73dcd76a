"""Routes that respond at once: values of a view, pairs of views, and downloads."""

from typing import Annotated, Any, Literal

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
"""Heads as `layer.head,layer.head`."""
First = Annotated[int, Query(ge=0, le=10_000_000)]
Last = Annotated[int | None, Query(ge=1, le=10_000_000)]
Direction = Literal["to", "by"]
Bins = Annotated[int, Query(ge=1, le=4_000)]


def sent_as(kind: str) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI response of a file of this media type."""
    return {200: {"description": "the file", "content": {kind: {}}}}


def attached(name: str) -> dict[str, str]:
    """The header of a download with this file name."""
    return {"content-disposition": f'attachment; filename="{name}"'}


def _heads(among: str) -> SomeHeads:
    pairs = [each.split(".") for each in among.split(",") if each]
    return [(int(layer), int(head)) for layer, head in pairs]


def view_routes(app: FastAPI, views: ViewCache) -> None:
    """Add the routes of one view."""

    @app.get("/api/views/{id}")
    def metadata(id: Id) -> dict[str, Any]:
        """The tokens of a view, its layers, heads and measures."""
        return downloads.metadata(views.get(id))

    def shaded(
        id: Id,
        of: Word = "received",
        queries: Word = "all",
        layer: Layer = None,
        head: Head = None,
        among: Among = "",
    ) -> Any:
        return views.get(id).shade(of, queries, layer, head, _heads(among))

    by_shade: Any = Depends(shaded)

    @app.get("/api/views/{id}/token-values")
    def shade(values: Any = by_shade) -> dict[str, Any]:
        """A value for every token. With `among`: the mean over these heads."""
        return {"values": downloads.plain(values)}

    @app.get("/api/views/{id}/token-curve")
    def binned_curve(
        values: Any = by_shade, first: First = 0, last: Last = None, bins: Bins = 600
    ) -> dict[str, Any]:
        """The same values for a range of tokens, in bins."""
        return downloads.binned(curve(values, first, last or len(values), bins))

    @app.get("/api/views/{id}/attention-row-curve")
    def row_curve(
        id: Id,
        token: First,
        layer: Annotated[int, Query(ge=0, le=10_000)],
        head: Head = None,
        direction: Direction = "to",
        first: First = 0,
        last: Last = None,
        bins: Bins = 600,
    ) -> dict[str, Any]:
        """An attention row that was requested before, for a range of tokens, in bins."""
        values = views.get(id).row((token, layer, head, direction))
        return downloads.binned(curve(values, first, last or len(values), bins))

    @app.get("/api/views/{id}/head-values")
    def head_map(id: Id, of: Word = "entropy", queries: Word = "all") -> dict[str, Any]:
        """A value for every layer and head."""
        rows = views.get(id).head_map(of, queries)
        return {"rows": [downloads.plain(row) for row in rows]}

    @app.get("/api/views/{id}/class-masses")
    def classes(id: Id, queries: Word = "all", head: Head = None) -> dict[str, Any]:
        """The mass of every class in every layer."""
        return {"rows": views.get(id).class_bars(queries, head)}


def pair_routes(app: FastAPI, views: ViewCache) -> None:
    """Add the routes that compare two views."""
    alignments = compare_texts.Alignments()

    @app.get("/api/comparison")
    def pair(
        a: Annotated[str, Query(max_length=40)],
        b: Annotated[str, Query(max_length=40)],
        layer: Annotated[int, Query(ge=0, le=10_000)] = 0,
        head: Head = None,
        first: First = 0,
        last: Last = None,
        bins: Bins = 600,
    ) -> dict[str, Any]:
        """Average attention weights of the tokens that two views share, and λ."""
        sides = views.get(a), views.get(b)
        aligned = alignments.of(*sides)
        numbers = compare_texts.numbers(*sides, aligned, layer, head)
        values = [view.shade("average", "all", layer, head) for view in sides]
        length = len(aligned.a)
        bounds = (first, last or length, bins)
        return {
            "aligned": length,
            "unaligned": [aligned.unaligned_a, aligned.unaligned_b],
            "numbers": {name: downloads.number(value) for name, value in numbers.items()},
            "tokens": [sides[0].tokens[n] for n in aligned.a] if length <= bins else [],
            "curves": [
                downloads.binned(curve(of[at], *bounds)) if length else None
                for of, at in zip(values, (aligned.a, aligned.b), strict=True)
            ],
        }


def download_routes(app: FastAPI, views: ViewCache) -> None:
    """Add the routes of files to download."""

    @app.get("/api/views/{id}/numbers.csv", response_class=Response, responses=sent_as("text/csv"))
    def numbers(
        id: Id,
        of: Word = "received",
        queries: Word = "all",
        layer: Layer = None,
        head: Head = None,
    ) -> Response:
        """The value of every token as CSV."""
        text = downloads.csv(views.get(id), of, queries, layer, head)
        return Response(text, media_type="text/csv", headers=attached("attnscope.csv"))

    @app.get(
        "/api/views/{id}/experiment.yaml",
        response_class=Response,
        responses=sent_as("application/yaml"),
    )
    def experiment(id: Id, layer: Layer = None, head: Head = None) -> Response:
        """An experiment in YAML that measures the same on many prompts."""
        text = downloads.experiment(views.get(id), layer, head)
        return Response(text, media_type="application/yaml", headers=attached("experiment.yaml"))
