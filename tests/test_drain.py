"""The end of every front-end: requests on their way are answered, idle connections closed, and that is all."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.test_wire import statuses, wait_until
from tests.wire_server import Wire, get, receive_all

EVERY_FRONT_END = True


@pytest.fixture
def start(tmp_path: Path, front_end: dict[str, str]) -> Iterator[Callable[..., Wire]]:
    started: list[Wire] = []

    def begin(hurry: dict[str, float], **chosen: Any) -> Wire:
        started.append(Wire(tmp_path, (front_end["front_end"], front_end["loop"]), hurry, **chosen))
        return started[-1]

    yield begin
    for running in started:
        running.kill()
        assert running.failures == []


def refuses(wire: Wire) -> bool:
    try:
        wire.connect().close()
    except ConnectionError:
        return True
    return False


def ask(connection: socket.socket, target: str) -> bytes:
    connection.sendall(get(target))
    return connection.recv(1000)


def test_a_request_that_was_on_its_way_is_answered_and_told_to_be_the_last(start: Callable[..., Wire]) -> None:
    wire = start({"LAST_CALL_S": 20}, grace_s=30)
    targets = ["/now/a", "/slow/b?10", "/file?3000"]
    connections = [wire.connect() for _ in targets]
    for connection in connections:
        assert statuses(ask(connection, "/now/1")) == [200]
    # In the middle of an answer that has said already that the connection stays.
    reading = wire.connect(SO_RCVBUF=4096)
    reading.sendall(get("/file?4000000"))
    assert reading.recv(12) == b"HTTP/1.1 200"
    # Whoever waits to be let in is let in first.
    os.kill(wire.process.pid, signal.SIGSTOP)
    waiting = [wire.connect() for _ in range(120)]
    for connection in waiting:
        connection.sendall(get("/now/waited"))
    wire.process.terminate()
    os.kill(wire.process.pid, signal.SIGCONT)
    for connection in waiting:
        assert connection.recv(1000).endswith(b"x /now/waited")
        connection.close()
    wait_until(lambda: refuses(wire))
    for connection, target in zip(connections, targets, strict=True):
        connection.sendall(get(target))
        answer = receive_all(connection)
        assert statuses(answer) == [200]
        assert b"connection: close" in answer.lower()
        connection.close()
    reading.sendall(get("/now/behind"))
    assert receive_all(reading).endswith(b"x /now/behind")
    reading.close()
    # The last call is long, but there is nobody left to hear it.
    assert wire.process.wait(10) == 0


def test_idle_connections_are_closed_after_the_last_call_and_work_goes_on(start: Callable[..., Wire]) -> None:
    wire = start({"LAST_CALL_S": 0.3}, grace_s=30)
    with wire.connect() as idle, wire.connect() as fresh, wire.connect() as working, wire.connect() as reading:
        assert statuses(ask(idle, "/now/1")) == [200]
        working.sendall(get("/slow/a?1500"))
        reading.sendall(get("/large?9000000"))
        wait_until(lambda: bool(reading.recv(1, socket.MSG_PEEK)))
        wire.process.terminate()
        assert receive_all(idle) == b""
        assert receive_all(fresh) == b""
        assert statuses(receive_all(working)) == [200]
        assert len(receive_all(reading)) > 9_000_000
    assert wire.process.wait(10) == 0


def test_what_comes_just_when_the_last_call_ends_is_answered_and_what_comes_behind_it_meets_no_reset(
    start: Callable[..., Wire],
) -> None:
    wire = start({"LAST_CALL_S": 0.3, "LINGER_S": 1}, grace_s=30)
    connections = [wire.connect() for _ in range(8)]
    with wire.connect() as idle, wire.connect() as fresh:
        for connection in (*connections, idle):
            assert statuses(ask(connection, "/now/1")) == [200]
        wire.process.terminate()
        wait_until(lambda: refuses(wire))
        os.kill(wire.process.pid, signal.SIGSTOP)
        # It wakes up behind the last call, and finds requests that it has not read yet.
        over = time.monotonic() + 0.4
        for connection in connections:
            connection.sendall(get("/now/2"))
        wait_until(lambda: time.monotonic() > over)
        os.kill(wire.process.pid, signal.SIGCONT)
        for connection in connections:
            answer = receive_all(connection)
            assert answer.endswith(b"x /now/2")
            assert b"connection: close" in answer.lower()
            connection.close()
        for connection in (idle, fresh):
            assert connection.recv(1, socket.MSG_PEEK) == b""
            # As if they had crossed it on their way.
            for _ in range(3):
                connection.sendall(get("/now/2"))
        assert wire.process.wait(10) == 0
        assert receive_all(idle) == receive_all(fresh) == b""
