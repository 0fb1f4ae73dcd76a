"""What stands before every request: who may ask, how much may be sent, what the page may load.

The server is for the person at this machine. A page of somebody else's in the same browser could
send requests here, or point a name of its own at this address; both are refused by their headers.
"""

from typing import Any
from urllib.parse import urlsplit

from starlette.responses import JSONResponse

LARGEST = 2 << 20
"""Bytes that a request may send."""

# Scripts and styles are files of ours; Vega interprets its expressions and never evaluates them.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; font-src 'self'; frame-src 'self'; form-action 'none'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
# A report is a file with all its scripts inside: it runs in a sandbox, without our origin.
REPORT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; sandbox allow-scripts allow-downloads; "
    "frame-ancestors 'self'"
)
_HOSTS = {"127.0.0.1", "localhost", "::1"}


def _local(address: str) -> bool:
    """Whether `//host:port` is this machine by one of its own names."""
    try:
        return urlsplit(address).hostname in _HOSTS
    except ValueError:
        return False


class SecurityMiddleware:
    """An ASGI application in front of another."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Refuse, or pass on with a bound on what is read and headers on what is sent."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        refusal = self._refusal(scope["method"], headers)
        if refusal is not None:
            status, why = refusal
            answer = JSONResponse(
                {"error": why}, status_code=status, headers={"connection": "close"}
            )
            await answer(scope, receive, send)
            return
        await self.app(scope, _bounded(receive), _with_headers(send))

    def _refusal(self, method: str, headers: dict[str, str]) -> tuple[int, str] | None:
        if not _local(f"//{headers.get('host', '')}"):
            return 403, "this page answers only to 127.0.0.1 and localhost"
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers["host"]:
            return 403, "another page may not ask this one"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            return 403, "another page may not ask this one"
        try:
            size = int(headers.get("content-length", "0"))
        except ValueError:
            return 400, "content-length is not a number"
        if size > LARGEST:
            return 413, f"{size} bytes were sent; at most {LARGEST} are read"
        if method == "POST" and not headers.get("content-type", "").startswith("application/json"):
            return 415, "send JSON (content-type application/json)"
        return None


def _bounded(receive: Any) -> Any:
    read = 0

    async def bounded() -> Any:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > LARGEST:  # sent in pieces, with no length said: what comes is cut off
            return {"type": "http.request", "body": b"", "more_body": False}
        return message

    return bounded


def _with_headers(send: Any) -> Any:
    always = {
        b"x-content-type-options": b"nosniff",
        b"referrer-policy": b"no-referrer",
        b"cross-origin-opener-policy": b"same-origin",
        b"cross-origin-resource-policy": b"same-origin",
        b"cache-control": b"no-store",
    }

    async def sent(message: Any) -> None:
        if message["type"] == "http.response.start":
            there = {name.lower() for name, _ in message["headers"]}
            extra = always | (
                {}
                if b"content-security-policy" in there
                else {b"content-security-policy": POLICY.encode()}
            )
            message["headers"] = [*message["headers"], *extra.items()]
        await send(message)

    return sent
