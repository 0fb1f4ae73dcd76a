"""The page's own address: what can be asked, and what is answered.

Long work goes through the queue and is asked about by its id; everything else is a slice of what
was measured and comes at once. This module must not know how anything is measured.
"""

from collections.abc import Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response

from attnscope.errors import AttnscopeError, unknown
from attnscope.web import api_schemas as body
from attnscope.web import attention_rows, downloads
from attnscope.web.jobs import BusyError, GoneError, Job, Queue
from attnscope.web.measuring import Watcher, measure, prepare
from attnscope.web.model_cache import ModelCache
from attnscope.web.runs import Runs
from attnscope.web.security import REPORT_POLICY, SecurityMiddleware
from attnscope.web.view_cache import ViewCache
from attnscope.web.view_routes import Id, Word, attached, compared, kept, sent_as, slices
from attnscope.web.views import SHADES, View

STATIC = Path(__file__).parent / "static"
LONGEST = 32_768
"""Tokens of a prompt, unless said otherwise."""

Name = Annotated[str, Query(max_length=300)]
_WHY = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
REFUSED: dict[int | str, dict[str, Any]] = {
    code: {"description": why, "content": {"application/json": {"schema": _WHY}}}
    for code, why in {
        400: "what was asked for cannot be done",
        403: "not from this machine's own page",
        404: "not there",
        413: "too much was sent",
        415: "not JSON",
        422: "not understood",
        429: "busy",
    }.items()
}


def create(
    folder: str | Path | None = None,
    *,
    models: Mapping[str, str] | None = None,
    device: str | None = None,
    longest: int = LONGEST,
    room: int = 8,
) -> Any:
    """The application: browse runs in `folder`, offer `models` beside the zoo."""
    queue, shelf, memory, runs = Queue(room), ModelCache(models, device), ViewCache(), Runs(folder)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> Any:
        yield
        queue.close()

    app = FastAPI(
        title="attnscope", docs_url=None, redoc_url=None, lifespan=lifespan, responses=REFUSED
    )
    _errors(app)
    _pages(app)
    _choices(app, shelf, runs, longest)
    _measuring(app, queue, shelf, memory, longest)
    _asking(app, queue, shelf, memory)
    _jobs(app, queue)
    slices(app, memory)
    compared(app, memory)
    kept(app, memory)
    _runs(app, runs)
    return SecurityMiddleware(app)


def _errors(app: FastAPI) -> None:
    codes = {BusyError: 429, GoneError: 404}

    @app.exception_handler(AttnscopeError)
    def said(_: Request, error: AttnscopeError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, status_code=codes.get(type(error), 400))

    @app.exception_handler(RequestValidationError)
    def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return JSONResponse({"error": f"{where}: {first['msg']}"}, status_code=422)


def _pages(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    def index() -> FileResponse:
        return FileResponse(STATIC / "index.html")

    @app.get("/static/vega.js", include_in_schema=False)
    def vega() -> Response:
        return Response(downloads.vega(), media_type="text/javascript")

    # Every file by its name: nothing that is sent ever becomes a path.
    files = {path.name: path for path in STATIC.iterdir() if path.suffix in (".js", ".css", ".svg")}

    @app.get("/static/{name}", include_in_schema=False)
    def static(name: str) -> FileResponse:
        if name not in files:
            raise GoneError("there is no such file")
        return FileResponse(files[name])


def _choices(app: FastAPI, shelf: ModelCache, runs: Runs, longest: int) -> None:
    @app.get("/api/choices")
    def choices() -> dict[str, Any]:
        """What there is to choose from."""
        return {
            "models": [
                {"name": o.name, "about": o.about, "here": o.here, "kind": o.kind}
                for o in shelf.offers()
            ],
            "shades": SHADES,
            "fillers": list(body.FILLERS),
            "positions": list(body.POSITIONS),
            "longest": longest,
            "answer": body.ANSWER,
            "runs": list(runs.names()),
        }


class _Told(Watcher):
    """A view that is looked at while it is measured."""

    def __init__(self, job: Job, memory: ViewCache, tokens: int):
        self._job, self._memory, self._tokens = job, memory, tokens
        self.check = job.check  # type: ignore[method-assign]

    def measured(self, view: View) -> None:
        """The page may show what there is."""
        if len(view.layers) == 1:
            self._memory.put(view)
        self._job.done, self._job.of = len(view.layers), view.deep
        self._job.result = {"view": view.id, "layers": len(view.layers)}
        self._job.say(
            f"measuring {self._tokens:,} tokens: layer {len(view.layers)} of {view.deep} is done"
        )


def _measuring(
    app: FastAPI, queue: Queue, shelf: ModelCache, memory: ViewCache, longest: int
) -> None:
    @app.post("/api/views", status_code=202)
    def view(wanted: body.ViewRequest) -> body.Ticket:
        """Measure a prompt."""
        if wanted.filler is not None:
            _ = wanted.filler.filler  # what is wrong with it is said at once

        def work(job: Job) -> dict[str, Any]:
            job.say(f"loading {wanted.model}")
            loaded = shelf.get(wanted.model)
            job.say("reading the prompt")
            tokens = len(prepare(loaded, wanted).tokens)
            if tokens > longest:
                raise TooLongError(tokens, longest)
            job.say(f"measuring {tokens:,} tokens")
            made = measure(loaded, wanted, _Told(job, memory, tokens))
            memory.put(made)
            return {"view": made.id, "layers": len(made.layers)}

        return body.Ticket(job=queue.submit(work).id)

    @app.post("/api/kinds", status_code=202)
    def kinds(wanted: body.HeadTypesRequest) -> body.Ticket:
        """What kind of head every head of a model is."""

        def work(job: Job) -> dict[str, Any]:
            from attnscope.web.head_types import kinds_of

            job.say(f"loading {wanted.model}")
            return kinds_of(shelf.get(wanted.model), job, needles=wanted.needles)

        return body.Ticket(job=queue.submit(work).id)


def _asking(app: FastAPI, queue: Queue, shelf: ModelCache, memory: ViewCache) -> None:
    @app.post("/api/views/{id}/gaze", status_code=202)
    def follow(id: Id, wanted: body.Followed) -> body.Ticket:
        """What a token looks at, or who looks at it, in one layer."""
        seen = memory.get(id)

        def work(job: Job) -> dict[str, Any]:
            job.say("following the gaze")
            look = attention_rows.looks_at if wanted.way == "to" else attention_rows.looked_at_by
            values = look(
                seen, wanted.token, wanted.layer, lambda: shelf.get(seen.model), job.check
            )
            if wanted.head is not None and wanted.head >= len(values):
                raise unknown("head", wanted.head, range(len(values)))
            pick = values if wanted.head is None else values[wanted.head : wanted.head + 1]
            return {"values": downloads.plain(pick.mean(0))}

        return body.Ticket(job=queue.submit(work).id)

    @app.post("/api/views/{id}/knockout", status_code=202)
    def knockout(id: Id, wanted: body.Hidden) -> body.Ticket:
        """What would come next if nobody could look at some tokens."""
        seen = memory.get(id)

        def work(job: Job) -> dict[str, Any]:
            from attnscope.web.knockout import without_sight

            job.say("running the model without these tokens in sight")
            layers = None if wanted.layer is None else [wanted.layer]
            heads = None if wanted.head is None else [wanted.head]
            span = wanted.first, wanted.last
            return without_sight(seen, shelf.get(seen.model), span, layers, heads, job.check)

        return body.Ticket(job=queue.submit(work).id)

    @app.get("/api/views/{id}/page.html", response_class=Response, responses=sent_as("text/html"))
    def page(id: Id, queries: Word = "all") -> Response:
        """One file that works without the server."""
        seen = memory.get(id)
        text = queue.result(lambda _: downloads.page(seen, queries))
        headers = attached("attnscope.html") | {"content-security-policy": REPORT_POLICY}
        return Response(text, media_type="text/html", headers=headers)


def _jobs(app: FastAPI, queue: Queue) -> None:
    @app.get("/api/jobs/{id}")
    def job(id: Id) -> body.Progress:
        """How a piece of work is doing, and its result."""
        found, place = queue.find(id)
        return _progress(found, place)

    @app.delete("/api/jobs/{id}")
    def cancel(id: Id) -> body.Progress:
        """Call it off."""
        queue.cancel(id)
        return _progress(*queue.find(id))


def _progress(job: Job, place: int) -> body.Progress:
    told = {name: getattr(job, name) for name in ("state", "said", "done", "of", "result")}
    return body.Progress(place=place, **told)


class TooLongError(AttnscopeError):
    """A prompt over the limit."""

    def __init__(self, tokens: int, longest: int):
        super().__init__(
            f"the prompt has {tokens:,} tokens and the limit is {longest:,}; "
            "start the page with --longest for more"
        )


def _runs(app: FastAPI, runs: Runs) -> None:
    @app.get("/api/runs")
    def listed() -> dict[str, Any]:
        """The runs there are; one that cannot be opened with the reason."""
        found = []
        for name in runs.names():
            try:
                found.append(runs.about(name))
            except AttnscopeError as error:
                found.append({"name": name, "error": str(error)})
        return {"runs": found}

    @app.get("/api/report", response_class=Response, responses=sent_as("text/html"))
    def report(run: Name) -> Response:
        """The report of a run: findings first."""
        headers = {"content-security-policy": REPORT_POLICY}
        return Response(runs.report(run), media_type="text/html", headers=headers)

    @app.post("/api/query")
    def query(wanted: body.Sql) -> dict[str, Any]:
        """The rows of a query."""
        return runs.query(wanted.run, wanted.sql)
