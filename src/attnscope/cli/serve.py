"""`attnscope serve`: the live page, on this machine alone."""

import logging
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from attnscope.errors import InputError


def serve(
    folder: Annotated[
        Path | None, typer.Argument(metavar="RUN_DIR", help="A run, or a folder of runs.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]MODEL", help="Offer this model too: folder, .gguf, hub id."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 takes a free one.")] = 8765,
    longest: Annotated[int, typer.Option(min=1, help="Most tokens of a prompt.")] = 32_768,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, mps; the first GPU if any.")
    ] = None,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser.")] = True,
) -> None:
    """The live page: type a prompt, see where the model looks. Only this machine can reach it."""
    import webbrowser

    try:
        import fastapi  # noqa: F401
        import uvicorn
    except ModuleNotFoundError as error:
        raise InputError(
            f"the live page needs {error.name}: pip install 'attnscope[web]'"
        ) from error
    from attnscope.web.server import create

    app = create(folder, models=_given(model or []), device=device, longest=longest)
    listening = _listening(port)
    address = f"http://127.0.0.1:{listening.getsockname()[1]}/"
    print(f"attnscope is at {address} (Ctrl-C ends it)", flush=True)
    if open_browser:
        webbrowser.open(address)
    config = uvicorn.Config(
        app,
        log_level="warning",
        limit_concurrency=200,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=1,
    )
    _serve_until_told(uvicorn.Server(config), listening)


def _listening(port: int) -> socket.socket:
    """This machine's own address, where whoever comes early waits."""
    # By its full name: only then are small answers sent at once, not 40 ms later.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", port))
        listening.listen(128)
    except OSError as error:
        raise InputError(
            f"port {port} cannot be had ({error.strerror}); --port 0 takes a free one"
        ) from error
    return listening


def _serve_until_told(server: Any, listening: socket.socket) -> None:
    """Ends the process: a model in the middle of a layer cannot be interrupted, and Python would
    wait for whoever answers a request. Neither writes anything."""
    asked_to_end = server.handle_exit

    def end(*asked: Any) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # cut off is no error now
        asked_to_end(*asked)

    server.handle_exit = end
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listening])
    sys.stdout.flush()
    os._exit(0)


def _given(models: list[str]) -> dict[str, str]:
    """Label to model; a folder is called by its own name."""
    given: dict[str, str] = {}
    for said in models:
        label, equals, name = said.partition("=")
        if not equals:
            label, name = Path(said).name or said, said
        if not label or not name or label in given:
            raise InputError(f"--model {said!r}: give NAME=MODEL, each name once")
        given[label] = str(Path(name).resolve()) if Path(name).exists() else name
    return given
