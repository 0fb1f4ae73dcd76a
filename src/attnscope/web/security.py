"""Checks of every request: its host and origin, its size, and the content-security policy.

The server is for users of this machine only. Another web page in the same browser could send
requests to it, or point its own host name to this address. The request headers show both.
"""

from typing import Any
from urllib.parse import urlsplit

from starlette.responses import JSONResponse

LARGEST = 2 << 20
"""The most bytes of a request body."""

# Scripts and styles are files of the package. Vega interprets its expressions without `eval`.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; font-src 'self'; frame-src 'self'; form-action 'none'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
# A report is one file with its scripts inside: it runs in a sandbox, without the page's origin.
REPORT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; sandbox allow-scripts allow-downloads; "
    "frame-ancestors 'self'"
)
_HOSTS = {"127.0.0.1", "localhost", "::1"}


def _local(address: str) -> bool:
    """Whether `//host:port` is a name of this machine."""
    try:
        return urlsplit(address).hostname in _HOSTS
    except ValueError:
        return False


class SecurityMiddleware:
    """An ASGI middleware that refuses foreign requests and adds security headers."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Refuse the request, or pass it on with a size limit and with security headers."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        refusal = self._refusal(scope["method"], headers)
        if refusal is not None:
            status, code, why = refusal
            response = JSONResponse(
                {"error": why, "code": code}, status_code=status, headers={"connection": "close"}
            )
            await response(scope, receive, send)
            return
        await self.app(scope, _bounded(receive), _with_headers(send))

    def _refusal(self, method: str, headers: dict[str, str]) -> tuple[int, str, str] | None:
        if not _local(f"//{headers.get('host', '')}"):
            return 403, "foreign-host", "the host must be 127.0.0.1 or localhost"
        origin = headers.get("origin")
        foreign = "requests from other web pages are refused"
        if origin is not None and urlsplit(origin).netloc != headers["host"]:
            return 403, "foreign-origin", foreign
        if headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            return 403, "foreign-origin", foreign
        try:
            size = int(headers.get("content-length", "0"))
        except ValueError:
            return 400, "bad-length", "content-length is not a number"
        if size > LARGEST:
            why = f"the request has {size} bytes; the limit is {LARGEST}"
            return 413, "request-too-large", why
        if method == "POST" and not headers.get("content-type", "").startswith("application/json"):
            return 415, "not-json", "send JSON (content-type application/json)"
        return None


def _bounded(receive: Any) -> Any:
    read = 0

    async def bounded() -> Any:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > LARGEST:  # chunked without a length: the rest is dropped
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
            present = {name.lower() for name, _ in message["headers"]}
            extra = always | (
                {}
                if b"content-security-policy" in present
                else {b"content-security-policy": POLICY.encode()}
            )
            message["headers"] = [*message["headers"], *extra.items()]
        await send(message)

    return sent
