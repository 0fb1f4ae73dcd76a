"""`attnscope serve`: the live page, for this machine only."""

import logging
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from attnscope.cli.options import Device, Dtype
from attnscope.errors import InputError, missing_package


def serve(
    folder: Annotated[
        Path | None, typer.Argument(metavar="RUN_DIR", help="A run directory, or a folder of runs.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]MODEL",
            help="Another model to offer: a folder, a .gguf file or a hub id. May be repeated.",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="The port; 0 chooses a free one.")
    ] = 8765,
    longest: Annotated[int, typer.Option(min=1, help="The most tokens of a prompt.")] = 32_768,
    device: Device = None,
    dtype: Dtype = "auto",
    open_browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in a browser.")
    ] = True,
) -> None:
    """Start the live page: type a prompt and see where attention goes. For this machine only."""
    import webbrowser

    try:
        import fastapi  # noqa: F401
        import uvicorn
    except ModuleNotFoundError as error:
        raise missing_package("the live page", str(error.name), "web") from error
    from attnscope.web.server import create

    app = create(folder, models=_labelled(model or []), device=device, dtype=dtype, longest=longest)
    listening = _listening(port)
    address = f"http://127.0.0.1:{listening.getsockname()[1]}/"
    print(f"attnscope is at {address} (press Ctrl-C to stop)", flush=True)
    if open_browser:
        webbrowser.open(address)
    config = uvicorn.Config(
        app,
        log_level="warning",
        limit_concurrency=200,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=1,
    )
    _serve_until_signal(uvicorn.Server(config), listening)


def _listening(port: int) -> socket.socket:
    """A socket of this machine that accepts connections before the server starts."""
    # With IPPROTO_TCP, asyncio sets TCP_NODELAY: small responses are sent 40 ms earlier.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", port))
        listening.listen(128)
    except OSError as error:
        raise InputError(
            f"cannot listen on port {port} ({error.strerror}); --port 0 chooses a free port",
            code="port-unavailable",
            port=port,
        ) from error
    return listening


def _serve_until_signal(server: Any, listening: socket.socket) -> None:
    """Serve until a signal, then end the process at once.

    A forward pass in the middle of a layer cannot be interrupted, and Python would wait for open
    requests. Neither writes files.
    """
    handle_exit = server.handle_exit

    def end(*arguments: Any) -> None:
        # Requests that are cut off now are no errors.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        handle_exit(*arguments)

    server.handle_exit = end
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listening])
    sys.stdout.flush()
    os._exit(0)


def _labelled(models: list[str]) -> dict[str, str]:
    """Label → model; the default label of a folder is its name."""
    labelled: dict[str, str] = {}
    for option in models:
        label, equals, name = option.partition("=")
        if not equals:
            label, name = Path(option).name or option, option
        if not label or not name or label in labelled:
            raise InputError(
                f"--model {option!r}: give NAME=MODEL, with every name once",
                code="bad-option",
                option="model",
                value=option,
            )
        labelled[label] = str(Path(name).resolve()) if Path(name).exists() else name
    return labelled
