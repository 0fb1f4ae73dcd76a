"""A test may connect to this machine and to nothing else."""

import ipaddress
import socket
from typing import Any


class NetworkError(RuntimeError):
    """A test tried to reach another machine. No OSError: the package must not handle it."""


def check(address: Any) -> None:
    """Refuse an address that is not on this machine; paths of Unix sockets are."""
    if not isinstance(address, tuple):
        return
    host = address[0].decode() if isinstance(address[0], bytes) else str(address[0])
    try:
        local = host in ("", "localhost") or ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        local = False
    if not local:
        raise NetworkError(f"a test tried to reach {host!r}; tests reach this machine alone")


def install() -> None:
    """For the whole process, and once."""
    if getattr(socket.socket.connect, "local_only", False):
        return
    for name in ("connect", "connect_ex", "sendto"):
        setattr(socket.socket, name, _checked(getattr(socket.socket, name)))
    resolve = socket.getaddrinfo

    def getaddrinfo(host: Any, *more: Any, **named: Any) -> Any:
        if host is not None:
            check((host,))
        return resolve(host, *more, **named)

    socket.getaddrinfo = getaddrinfo  # type: ignore[assignment]


def _checked(plain: Any) -> Any:
    def call(self: Any, *given: Any) -> Any:
        check(given[-1])
        return plain(self, *given)

    call.local_only = True  # type: ignore[attr-defined]
    return call
