"""The web application of the live page: its routes, errors and static files.

Long jobs go through the queue; the client polls them by id. All other routes respond at once.
"""

from collections.abc import Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response

from attnscope.errors import AttnscopeError, InputError, unknown
from attnscope.figures.page import chart_colours, theme_css, vega
from attnscope.web import api_schemas as body
from attnscope.web import attention_rows, downloads
from attnscope.web.jobs import BusyError, GoneError, Job, Queue
from attnscope.web.measuring import Watcher, measure, prepare
from attnscope.web.model_cache import ModelCache
from attnscope.web.picture_page import PicturePages, picture_page
from attnscope.web.runs import Runs
from attnscope.web.security import REPORT_POLICY, SecurityMiddleware
from attnscope.web.view_cache import ViewCache
from attnscope.web.view_routes import (
    Id,
    Word,
    attached,
    download_routes,
    pair_routes,
    sent_as,
    view_routes,
)
from attnscope.web.views import SHADES, View

STATIC = Path(__file__).parent / "static"
LONGEST = 32_768
"""The default limit of tokens of a prompt."""

Name = Annotated[str, Query(max_length=300)]
_ERROR = {
    "type": "object",
    "properties": {"error": {"type": "string"}, "code": {"type": "string"}},
    "required": ["error", "code"],
}
REFUSED: dict[int | str, dict[str, Any]] = {
    status: {"description": why, "content": {"application/json": {"schema": _ERROR}}}
    for status, why in {
        400: "the request has a wrong value",
        403: "the request comes from another host or page",
        404: "not found",
        413: "the request is too large",
        415: "the request is not JSON",
        422: "the request does not match the schema",
        429: "the queue is full",
    }.items()
}


def create(
    folder: str | Path | None = None,
    *,
    models: Mapping[str, str] | None = None,
    device: str | None = None,
    dtype: str = "auto",
    longest: int = LONGEST,
) -> Any:
    """Make the application: it shows the runs in `folder` and offers the zoo and `models`."""
    queue, cache = Queue(), ModelCache(models, device, dtype)
    views, runs = ViewCache(), Runs(folder)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> Any:
        yield
        queue.close()

    app = FastAPI(
        title="attnscope", docs_url=None, redoc_url=None, lifespan=lifespan, responses=REFUSED
    )
    _error_handlers(app)
    _static_routes(app)
    _choice_routes(app, cache, runs, longest)
    _measuring_routes(app, queue, cache, views, longest)
    _model_routes(app, queue, cache, views)
    _picture_routes(app, queue, cache)
    _job_routes(app, queue)
    view_routes(app, views)
    pair_routes(app, views)
    download_routes(app, views)
    _run_routes(app, runs)
    return SecurityMiddleware(app)


def _error_handlers(app: FastAPI) -> None:
    statuses = {BusyError: 429, GoneError: 404}

    @app.exception_handler(AttnscopeError)
    def refused(_: Request, error: AttnscopeError) -> JSONResponse:
        content = {"error": str(error), "code": error.code}
        return JSONResponse(content, status_code=statuses.get(type(error), 400))

    @app.exception_handler(RequestValidationError)
    def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        content = {"error": f"{where}: {first['msg']}", "code": "bad-request"}
        return JSONResponse(content, status_code=422)


def _static_routes(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    def index() -> FileResponse:
        return FileResponse(STATIC / "index.html")

    @app.get("/static/vega.js", include_in_schema=False)
    def vega_script() -> Response:
        return Response(vega(), media_type="text/javascript")

    @app.get("/static/theme.css", include_in_schema=False)
    def theme() -> Response:
        return Response(theme_css(), media_type="text/css")

    # A fixed table of names: a name from a request never becomes a path.
    files = {path.name: path for path in STATIC.iterdir() if path.suffix in (".js", ".css", ".svg")}

    @app.get("/static/{name}", include_in_schema=False)
    def static(name: str) -> FileResponse:
        if name not in files:
            raise GoneError(f"there is no file {name!r}", code="unknown-file", name=name)
        return FileResponse(files[name])


def _choice_routes(app: FastAPI, cache: ModelCache, runs: Runs, longest: int) -> None:
    @app.get("/api/choices")
    def choices() -> dict[str, Any]:
        """The models, shades, fillers, positions, limits and runs that the page offers."""
        return {
            "models": [
                {"name": o.name, "about": o.about, "here": o.here, "kind": o.kind}
                for o in cache.offers()
            ],
            "shades": SHADES,
            "fillers": list(body.FILLERS),
            "positions": list(body.POSITIONS),
            "longest": longest,
            "completion": body.MAX_COMPLETION,
            "runs": list(runs.names()),
            "theme": chart_colours(),
        }


class _JobWatcher(Watcher):
    """Publishes every new layer of a view in its job."""

    def __init__(self, job: Job, views: ViewCache, tokens: int):
        self._job, self._views, self._tokens = job, views, tokens
        self.check = job.check  # type: ignore[method-assign]

    def measured(self, view: View) -> None:
        """Store the view and report its number of layers."""
        if len(view.layers) == 1:
            self._views.put(view)
        self._job.done, self._job.total = len(view.layers), view.layer_count
        self._job.result = {"view": view.id, "layers": len(view.layers)}
        self._job.report(
            f"measuring {self._tokens:,} tokens: layer {len(view.layers)} of {view.layer_count}"
        )


def _measuring_routes(
    app: FastAPI, queue: Queue, cache: ModelCache, views: ViewCache, longest: int
) -> None:
    @app.post("/api/views", status_code=202)
    def view(request: body.ViewRequest) -> body.Ticket:
        """Measure a prompt."""
        if request.filler is not None:
            _ = request.filler.filler  # a wrong filler is refused at once

        def work(job: Job) -> dict[str, Any]:
            job.report(f"loading {request.model}")
            loaded = cache.get(request.model)
            job.report("tokenizing the prompt")
            tokens = len(prepare(loaded, request).tokens)
            if tokens > longest:
                raise InputError(
                    f"the prompt has {tokens:,} tokens; the limit is {longest:,}. Start the page "
                    "with a larger --longest",
                    code="prompt-too-long",
                    tokens=tokens,
                    limit=longest,
                )
            job.report(f"measuring {tokens:,} tokens")
            measured = measure(loaded, request, _JobWatcher(job, views, tokens))
            views.put(measured)
            return {"view": measured.id, "layers": len(measured.layers)}

        return body.Ticket(job=queue.submit(work).id)

    @app.post("/api/head-types", status_code=202)
    def head_types(request: body.HeadTypesRequest) -> body.Ticket:
        """Classify every head of a model."""

        def work(job: Job) -> dict[str, Any]:
            from attnscope.web.head_types import classify_heads

            job.report(f"loading {request.model}")
            return classify_heads(cache.get(request.model), job, needles=request.needles)

        return body.Ticket(job=queue.submit(work).id)


def _model_routes(app: FastAPI, queue: Queue, cache: ModelCache, views: ViewCache) -> None:
    @app.post("/api/views/{id}/attention-row", status_code=202)
    def row(id: Id, request: body.RowRequest) -> body.Ticket:
        """The attention row or column of one token in one layer."""
        view = views.get(id)

        def work(job: Job) -> dict[str, Any]:
            job.report("reading the attention row")
            to = request.direction == "to"
            read = attention_rows.attention_row if to else attention_rows.attention_column
            values = read(
                view, request.token, request.layer, lambda: cache.get(view.model), job.check
            )
            if request.head is not None and request.head >= len(values):
                raise unknown("head", request.head, range(len(values)))
            mean = values.mean(0) if request.head is None else values[request.head]
            key = request.token, request.layer, request.head, request.direction
            view.keep_row(key, mean)
            return {"values": downloads.plain(mean)}

        return body.Ticket(job=queue.submit(work).id)

    @app.post("/api/views/{id}/knockout-effect", status_code=202)
    def knockout(id: Id, request: body.KnockoutRequest) -> body.Ticket:
        """The next-token prediction when no later token can attend to a span."""
        view = views.get(id)

        def work(job: Job) -> dict[str, Any]:
            from attnscope.web.knockout import knockout_effect

            job.report("running the model with the knockout")
            layers = None if request.layer is None else [request.layer]
            heads = None if request.head is None else [request.head]
            span = request.first, request.last
            return knockout_effect(view, cache.get(view.model), span, layers, heads, job.check)

        return body.Ticket(job=queue.submit(work).id)

    @app.get("/api/views/{id}/page.html", response_class=Response, responses=sent_as("text/html"))
    def page(id: Id, queries: Word = "all") -> Response:
        """One HTML file that works without the server."""
        view = views.get(id)
        text = queue.result(lambda _: downloads.page(view, queries))
        headers = attached("attnscope.html") | {"content-security-policy": REPORT_POLICY}
        return Response(text, media_type="text/html", headers=headers)


def _picture_routes(app: FastAPI, queue: Queue, cache: ModelCache) -> None:
    pages = PicturePages()

    @app.post("/api/pictures", status_code=202)
    def pictures(request: body.PictureRequest) -> body.Ticket:
        """Measure questions about a picture; the result has the ids of their pages."""

        def work(job: Job) -> dict[str, Any]:
            job.report(f"loading {request.model}")
            loaded, ids = cache.get(request.model), []
            for number, question in enumerate(request.questions, start=1):
                job.report(f"measuring question {number}")
                ids.append(pages.put(picture_page(loaded, request, question, job.check)))
            return {"pages": ids}

        return body.Ticket(job=queue.submit(work).id)

    @app.get("/api/pictures/{id}.html", response_class=Response, responses=sent_as("text/html"))
    def picture(id: Id) -> Response:
        """The page of a question about a picture."""
        headers = {"content-security-policy": REPORT_POLICY}
        return Response(pages.get(id), media_type="text/html", headers=headers)


def _job_routes(app: FastAPI, queue: Queue) -> None:
    @app.get("/api/jobs/{id}")
    def job(id: Id) -> body.Progress:
        """The state of a job, and its result."""
        return _progress(*queue.find(id))

    @app.delete("/api/jobs/{id}")
    def cancel(id: Id) -> body.Progress:
        """Cancel a job."""
        queue.cancel(id)
        return _progress(*queue.find(id))


def _progress(job: Job, position: int) -> body.Progress:
    names = ("state", "message", "code", "done", "total", "result")
    return body.Progress(position=position, **{name: getattr(job, name) for name in names})


def _run_routes(app: FastAPI, runs: Runs) -> None:
    @app.get("/api/runs")
    def listed() -> dict[str, Any]:
        """All runs; a run that cannot be opened has the reason as `error`."""
        entries = []
        for name in runs.names():
            try:
                entries.append(runs.about(name))
            except AttnscopeError as error:
                entries.append({"name": name, "error": str(error)})
        return {"runs": entries}

    @app.get("/api/report", response_class=Response, responses=sent_as("text/html"))
    def report(run: Name) -> Response:
        """The report of a run."""
        headers = {"content-security-policy": REPORT_POLICY}
        return Response(runs.report(run), media_type="text/html", headers=headers)

    @app.post("/api/query")
    def query(request: body.QueryRequest) -> dict[str, Any]:
        """The rows of an SQL query."""
        return runs.query(request.run, request.sql)
