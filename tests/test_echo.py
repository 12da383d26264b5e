"""`uvimg echo` in each of its shapes: what comes goes back, and nobody can make it hold much."""

import contextlib
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from uvimg.web.echo import STYLES

SHAPES = [(style, loop) for style in STYLES for loop in ("uvloop", "asyncio")]


class Echo:
    """A running echo server."""

    def __init__(self, style: str, loop: str, *flags: str) -> None:
        command = [sys.executable, "-m", "uvimg", "echo", f"--style={style}", f"--loop={loop}", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()

    def connect(self) -> socket.socket:
        place = self.line.split()[4]
        if place.startswith("unix:"):
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(10)
            connection.connect(place.removeprefix("unix:"))
            return connection
        host, _, port = place.removeprefix("tcp://").rstrip("/").rpartition(":")
        return socket.create_connection((host, int(port)), timeout=10)

    @property
    def memory_kib(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


@contextlib.contextmanager
def running(style: str, loop: str, *flags: str) -> Iterator[Echo]:
    """Its end is part of every test: SIGTERM, status 0, and nothing to complain of."""
    server = Echo(style, loop, *(flags or ("--port=0",)))
    try:
        yield server
        server.process.send_signal(signal.SIGTERM)
        _, errors = server.process.communicate(timeout=10)
        assert (server.process.returncode, errors) == (0, "")
    finally:
        server.process.kill()
        server.process.wait()


@pytest.fixture(params=SHAPES, ids="-".join)
def echo(request: pytest.FixtureRequest) -> Iterator[Echo]:
    with running(*request.param) as server:
        yield server


def read_to_end(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_what_comes_goes_back_to_its_sender_and_ends_with_it(echo: Echo) -> None:
    data = [random.Random(number).randbytes(3_000_000) for number in range(4)]
    answers: dict[int, bytes] = {}

    def talk(number: int) -> None:
        with echo.connect() as connection:

            def send() -> None:
                connection.sendall(data[number])
                connection.shutdown(socket.SHUT_WR)

            sender = threading.Thread(target=send)
            sender.start()
            answers[number] = read_to_end(connection)
            sender.join()

    talkers = [threading.Thread(target=talk, args=(number,)) for number in range(4)]
    for talker in talkers:
        talker.start()
    for talker in talkers:
        talker.join()
    assert [answers.get(number) == data[number] for number in range(4)] == [True] * 4


def test_a_client_that_never_reads_is_held_back_and_costs_no_memory(echo: Echo) -> None:
    with echo.connect() as first:
        first.sendall(b"x")
        assert first.recv(1) == b"x"
        before = echo.memory_kib
        stuck, sent = [echo.connect() for _ in range(5)], 0
        for connection in stuck:
            connection.settimeout(0.2)
            # What the kernel holds of both directions, a few megabytes each, and then no more.
            with pytest.raises(TimeoutError):
                while sent < 1 << 28:
                    sent += connection.send(bytes(1 << 16))
        # The others go on meanwhile, each with its own bytes.
        for number in range(50):
            message = random.Random(number).randbytes(5000)
            first.sendall(message)
            assert first.recv(5000, socket.MSG_WAITALL) == message
        assert echo.memory_kib - before < 5 * 1024
        for connection in stuck:
            connection.close()


def test_a_reset_connection_hurts_nobody_else(echo: Echo) -> None:
    with echo.connect() as stays:
        for _ in range(20):
            goes = echo.connect()
            goes.sendall(bytes(200_000))
            goes.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            goes.close()
        stays.sendall(b"still here")
        assert stays.recv(10, socket.MSG_WAITALL) == b"still here"


def test_sigterm_sends_back_what_has_come_and_closes(echo: Echo) -> None:
    with echo.connect() as idle, echo.connect() as busy:
        message = bytes(range(256)) * 400
        busy.sendall(message)
        assert busy.recv(1, socket.MSG_PEEK)
        echo.process.send_signal(signal.SIGTERM)
        assert read_to_end(busy) == message
        assert read_to_end(idle) == b""
        assert echo.process.wait(10) == 0


@pytest.mark.parametrize("style", STYLES)
def test_a_unix_socket_echoes_and_is_gone_afterwards(style: str, tmp_path: Path) -> None:
    path = tmp_path / "echo.sock"
    with running(style, "uvloop", f"--listen=unix:{path}", "--listen=127.0.0.1:0") as server, server.connect() as one:
        one.sendall(b"by path")
        assert one.recv(7, socket.MSG_WAITALL) == b"by path"
    assert not os.path.lexists(path)


def test_a_port_that_is_taken_is_told_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = Echo("sockets", "asyncio", f"--port={port}")
        _, errors = server.process.communicate(timeout=10)
    assert server.process.returncode == 1
    assert errors == f"uvimg: cannot listen on 127.0.0.1:{port}: Address already in use\n"
