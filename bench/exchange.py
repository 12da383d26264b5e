"""One request and the answer to it, looked at whole: what has to be right before a load means anything."""

import re
import socket
from dataclasses import dataclass

from bench.serving import Address, BenchError
from bench.work import Task, check_picture

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A GET and the answer that must come to it."""

    path: str
    status: int
    # None: whatever comes.
    body: bytes | None
    fields: tuple[tuple[str, str], ...] = ()
    # Names of fields, and how their values begin.
    expected: tuple[tuple[str, str], ...] = ()
    # The rendition that the body must be.
    task: Task | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    fields: dict[str, str]
    body: bytes
    # Of the whole answer as it came.
    size: int


def exchange(address: Address, ask: Ask) -> Reply:
    """Ask once, on a connection of its own."""
    with connect(address) as connection:
        return exchange_on(connection, address, ask)


def connect(address: Address) -> socket.socket:
    """BenchError when nobody is there."""
    try:
        return socket.create_connection(address, _TIMEOUT_S)
    except OSError as exc:
        raise BenchError(f"no connection to {address[0]}:{address[1]}: {exc}") from None


def exchange_on(connection: socket.socket, address: Address, ask: Ask) -> Reply:
    """Ask once; the answer must have a Content-Length or no body. BenchError when none comes."""
    fields = "".join(f"{name}: {value}\r\n" for name, value in ask.fields)
    connection.sendall(f"GET {ask.path} HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\n{fields}\r\n".encode())
    data = b""
    try:
        while b"\r\n\r\n" not in data:
            data += _receive(connection)
        head, _, _ = data.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        found = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        status = int(lines[0].split(" ")[1])
        length = 0 if status in (204, 304) else int(found.get("content-length", "0"))
        while len(data) < len(head) + 4 + length:
            data += _receive(connection)
    except (OSError, ValueError, IndexError) as exc:
        raise BenchError(f"no HTTP answer to GET {ask.path}: {exc}") from None
    return Reply(status, found, data[len(head) + 4 :], len(data))


def _receive(connection: socket.socket) -> bytes:
    data = connection.recv(262_144)
    if not data:
        raise ValueError("the connection was closed")
    return data


def check(address: Address, ask: Ask) -> Reply:
    """The whole answer, which must be the expected one: BenchError says what is wrong with it."""
    reply = exchange(address, ask)
    if reply.status != ask.status:
        raise BenchError(f"GET {ask.path} was answered {reply.status} instead of {ask.status}")
    if ask.body is not None and reply.body != ask.body:
        raise BenchError(
            f"GET {ask.path} was answered with another body: {len(reply.body)} bytes, {len(ask.body)} expected"
        )
    for name, start in ask.expected:
        if not reply.fields.get(name.lower(), "").startswith(start):
            raise BenchError(f"GET {ask.path} was answered with {name}: {reply.fields.get(name.lower())!r}")
    if ask.task is not None:
        check_picture(reply.body, ask.task)
    return reply


def read_metrics(address: Address, name: str) -> dict[str, float]:
    """The values of one of uvimg's metrics by their labels. Others have none."""
    try:
        reply = exchange(address, Ask("/metrics", 200, None))
    except BenchError:
        return {}
    found = re.findall(rf"^{name}({{.*}})? (\S+)$", reply.body.decode(errors="replace"), re.MULTILINE)
    return {labels: float(value) for labels, value in found}
