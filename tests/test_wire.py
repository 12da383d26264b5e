"""Raw bytes against real servers: hostile requests, their order, their deadlines, what they cost.

What a front-end says to one request is in the files of tests/requests. Deadlines are core/http1.py's, shortened.
"""

import asyncio
import concurrent.futures
import hashlib
import itertools
import re
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import Server
from tests.mutations import MUTANTS, Attack, ImagesTarget, WireTarget
from tests.wire_server import Wire, get, last, receive_all

EVERY_FRONT_END = True
# Of core/http1.py, so short that a test can wait for them.
HURRY = {"HEAD_S": 0.6, "BODY_START_S": 0.6, "WRITE_STALL_S": 0.8, "LINGER_S": 0.5}


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def statuses(received: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1\.[01] (\d{3}) ", received)]


@pytest.fixture(scope="session")
def pair(front_end: dict[str, str]) -> tuple[str, str]:
    return front_end["front_end"], front_end["loop"]


@pytest.fixture(scope="session")
def wire(tmp_path_factory: pytest.TempPathFactory, pair: tuple[str, str]) -> Iterator[Wire]:
    """With the deadlines that are shipped. Whatever a test does to it, no traceback is left."""
    running = Wire(tmp_path_factory.mktemp("wire"), pair, {})
    yield running
    running.kill()
    assert running.failures == []


@pytest.fixture(scope="session")
def hurried(tmp_path_factory: pytest.TempPathFactory, pair: tuple[str, str]) -> Iterator[Wire]:
    running = Wire(tmp_path_factory.mktemp("wire"), pair, HURRY, keepalive_s=1)
    yield running
    running.kill()
    assert running.failures == []


@pytest.fixture
def start(tmp_path: Path, pair: tuple[str, str]) -> Iterator[Callable[..., Wire]]:
    started: list[Wire] = []

    def begin(**chosen: Any) -> Wire:
        started.append(Wire(tmp_path, pair, HURRY, **chosen))
        return started[-1]

    yield begin
    for running in started:
        running.kill()


# Order and cuts


def pipeline() -> tuple[bytes, list[str]]:
    """Requests of every kind behind each other, and the first line of what each answers."""
    body = bytes(range(256)) * 40
    digest = hashlib.sha256(body).hexdigest()
    head = "POST /body/{} HTTP/1.1\r\nHost: x\r\n"
    requests: list[tuple[bytes, str]] = [
        (get("/now/1"), "/now/1"),
        (get("/slow/2?20"), "/slow/2?20"),
        (get("/file?2000"), "/file?2000"),
        ((head.format(3) + f"Content-Length: {len(body)}\r\n\r\n").encode() + body, f"/body/3 {digest}"),
        (get("/now/4"), "/now/4"),
        (
            (head.format(5) + "Transfer-Encoding: chunked\r\n\r\n").encode()
            + b"".join(
                b"%x\r\n%b\r\n" % (len(body[at : at + 999]), body[at : at + 999]) for at in range(0, 10_240, 999)
            )
            + b"0\r\nA: b\r\n\r\n",
            f"/body/5 {digest}",
        ),
        (get("/file?700000"), "/file?700000"),
        (get("/slow/6?0"), "/slow/6?0"),
        (last("/now/7"), "/now/7"),
    ]
    return b"".join(data for data, _ in requests), [expected for _, expected in requests]


def read_answers(received: bytes) -> list[str]:
    """Which request each answer names, and the digest of a body that was taken."""
    found = []
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        size = re.search(rb"(?i)content-length: (\d+)", head)
        target = re.search(rb"X-For: (.*?)(?:\r\n|$)", head)
        assert size
        assert target, head
        body, received = received[: int(size[1])], received[int(size[1]) :]
        name = target[1].decode()
        found.append(f"{name} {body.split()[1].decode()}" if name.startswith("/body") else name)
    return found


def test_bytes_one_at_a_time_are_answered_like_all_at_once(wire: Wire) -> None:
    data, expected = pipeline()
    assert read_answers(wire.talk(data)) == expected
    with wire.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(600):
            connection.sendall(data[at : at + 1])
        connection.sendall(data[600:])
        assert read_answers(receive_all(connection)) == expected


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(1, len(pipeline()[0])), max_size=8))
def test_where_requests_are_cut_changes_nothing(wire: Wire, cuts: list[int]) -> None:
    data, expected = pipeline()
    places = [0, *sorted(cuts), len(data)]
    with wire.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for begin, stop in itertools.pairwise(places):
            connection.sendall(data[begin:stop])
            # Only so that the pieces do not come as one; the answer must not depend on it.
            select.select([connection], [], [], 0.002)
        assert read_answers(receive_all(connection)) == expected


def test_a_body_refused_early_is_read_away_so_that_the_answer_arrives(wire: Wire) -> None:
    for fields in ("Content-Length: 3000000\r\n", "Transfer-Encoding: chunked\r\n"):
        head = f"POST /early HTTP/1.1\r\nHost: x\r\n{fields}\r\n".encode()
        body = bytes(3_000_000) if "Length" in fields else b"100000\r\n" + bytes(1 << 20) + b"\r\n"
        received = wire.talk(head, body, end=True)
        assert statuses(received) == [413]
        assert b"connection: close" in received.lower()


def test_what_comes_behind_the_last_request_does_not_take_its_answer_back(wire: Wire) -> None:
    for _ in range(20):
        assert statuses(wire.talk(last("/large?300000"), bytes(100_000), end=True)) == [200]


def test_100_continue_comes_once_and_only_where_a_body_is_wanted(wire: Wire) -> None:
    expect = "Content-Length: 3\r\nExpect: 100-continue\r\n"
    with wire.connect() as connection:
        for _ in range(2):
            connection.sendall(f"POST /body HTTP/1.1\r\nHost: x\r\n{expect}\r\n".encode())
            assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.sendall(b"abc")
            assert statuses(connection.recv(1000)) == [200]
        connection.sendall(f"POST /early HTTP/1.1\r\nHost: x\r\n{expect}\r\n".encode())
        assert statuses(connection.recv(1000)) == [413]
    received = wire.talk(f"POST /body HTTP/1.0\r\nHost: x\r\n{expect}\r\nabc".encode())
    assert statuses(received) == [200]
    # Who has sent it need not be told to.
    data = f"POST /body HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{expect}\r\nabc".encode()
    assert statuses(wire.talk(data)) == [200]


# Memory and descriptors


def test_requests_whose_answers_nobody_reads_cost_no_memory(wire: Wire) -> None:
    wire.talk(last("/large?100000"))
    before = wire.memory("VmHWM")
    for path in ("/large?100000", "/file?100000", "/slow/a?0", "/now/" + "a" * 200):
        with wire.connect(SO_RCVBUF=65_536) as connection:
            connection.setblocking(False)
            data = memoryview(get(path) * 2000 + last(path))
            sent, quiet = 0, time.monotonic() + 0.3
            while sent < len(data) and time.monotonic() < quiet:
                try:
                    sent += connection.send(data[sent:])
                    quiet = time.monotonic() + 0.3
                except BlockingIOError:
                    select.select([], [connection], [], 0.05)
            assert wire.memory("VmHWM") - before < 6_000_000, path
    with wire.connect() as connection:
        connection.sendall(get("/large?20000") * 2000 + last("/now/end"))
        received = receive_all(connection)
    assert statuses(received) == [200] * 2001
    assert wire.memory("VmHWM") - before < 6_000_000


def test_a_client_that_sends_on_behind_an_unread_answer_costs_no_memory(wire: Wire) -> None:
    before = wire.memory("VmHWM")
    for path in ("/large?5000000", "/hang"):
        with wire.connect(SO_RCVBUF=65_536) as connection:
            connection.sendall(get(path))
            connection.settimeout(0.5)
            with pytest.raises(TimeoutError):
                for _ in range(1000):
                    connection.sendall(bytes(65_536))
    # The answer itself stands in it three times: as the app's, behind its head, and in the transport.
    assert wire.memory("VmHWM") - before < 25_000_000


def test_clients_that_go_away_leave_nothing_open_and_nothing_working(wire: Wire) -> None:
    already = int(wire.talk(last("/cancelled")).rpartition(b"\r\n\r\n")[2])
    for number in range(60):
        connection = wire.connect(SO_RCVBUF=4096)
        path = ("/file?4000000", "/file?200000", "/hang")[number % 3]
        connection.sendall(get("/now/1") + get(path) + get("/file?4000000"))
        if number % 2:
            connection.recv(100)
        if number % 4 > 1:
            # Reset, not closed.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    with wire.connect() as connection:
        connection.sendall(b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: wire.open_blobs() == 0)
    wait_until(lambda: int(wire.talk(last("/cancelled")).rpartition(b"\r\n\r\n")[2]) >= already)
    assert statuses(wire.talk(last("/now"))) == [200]
    assert wire.failures == []


# Deadlines


def closes_within(connection: socket.socket, least: float, most: float) -> bytes:
    """What comes until the server closes, which it does in this time."""
    started = time.monotonic()
    try:
        received = receive_all(connection)
    except ConnectionResetError:
        received = b"reset"
    taken = time.monotonic() - started
    assert least <= taken <= most, taken
    return received


def test_deadlines_of_heads_and_bodies_are_absolute(hurried: Wire, pair: tuple[str, str]) -> None:

    def drip(start: bytes, drops: bytes) -> tuple[float, bytes]:
        with hurried.connect() as connection:
            connection.sendall(start)
            began = time.monotonic()
            received = b""
            while time.monotonic() - began < 8:
                if select.select([connection], [], [], 0.05)[0]:
                    received += connection.recv(10_000)
                    break
                connection.sendall(drops)
            return time.monotonic() - began, received

    post = b"POST /body HTTP/1.1\r\nHost: x\r\n"
    rows = [
        (b"GET / HTTP/1.1\r\nA: ", b"b", 408),
        (b"\r\n", b"G", 408),
        (get("/now")[:-3], b"", 408),
        (get("/slow/a?0") + b"GET ", b"", 200),
        (post + b"Content-Length: 999999\r\n\r\n", b"b", 408),
        (post + b"Content-Length: 9\r\n\r\n", b"", 408),
        (post + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nb\r\n", 408),
        (post + b"Transfer-Encoding: chunked\r\n\r\n1", b"1", 408),
        (b"", b"", 0),
    ]
    with concurrent.futures.ThreadPoolExecutor(len(rows)) as threads:
        for row, (taken, received) in zip(rows, threads.map(lambda row: drip(*row[:2]), rows), strict=True):
            assert statuses(received)[:1] == [row[2]][: row[2]], row
            assert taken < 2.5, row


def test_a_head_begun_behind_another_has_its_own_time(hurried: Wire, pair: tuple[str, str]) -> None:
    # Each piece ends one head and begins the next, for longer than one head may take.
    request = get("/now/1")
    with hurried.connect() as connection:
        connection.sendall(request[:9])
        received = b""
        for _ in range(8):
            if select.select([connection], [], [], 0.2)[0]:
                received += connection.recv(9999)
            connection.sendall(request[9:] + request[:9])
        connection.sendall(request[9:] + last("/now/end"))
        received += receive_all(connection)
    assert statuses(received) == [200] * 10


def test_idle_connections_are_closed_and_workers_are_not(hurried: Wire, pair: tuple[str, str]) -> None:
    with hurried.connect() as idle, hurried.connect() as working:
        working.sendall(get("/slow/a?1800"))
        idle.sendall(get("/now"))
        assert statuses(closes_within(idle, 0.7, 2.5)) == [200]
        assert statuses(working.recv(1000)) == [200]


@pytest.mark.parametrize("path", ["/large?30000000", "/file?4000000", "/large?20000000"])
def test_who_never_reads_a_large_answer_is_dropped(hurried: Wire, pair: tuple[str, str], path: str) -> None:
    with hurried.connect(SO_RCVBUF=4096) as connection:
        connection.sendall((get(path) if "file" not in path else get(path) * 5) + last("/now/behind"))
        wait_until(lambda: hurried.open_files("socket:") > hurried.own_sockets)
        # The client cannot see it: the end stands behind what it does not read.
        wait_until(lambda: hurried.open_files("socket:") == hurried.own_sockets, 5)
    wait_until(lambda: hurried.open_blobs() == 0)


def test_who_reads_slowly_gets_all_of_a_large_answer(hurried: Wire, pair: tuple[str, str]) -> None:
    for path, size in (("/large?6000000", 6_000_000), ("/file?4000000", 4_000_000)):
        with hurried.connect(SO_RCVBUF=65_536) as connection:
            connection.sendall(last(path))
            received = 0
            # Slow against the stall, for longer than it and than idling may take.
            for _ in range(12):
                received += len(connection.recv(65_536))
                time.sleep(0.15)
            received += len(receive_all(connection))
        assert size < received < size + 1000


def test_a_refused_connection_is_closed_though_its_client_stays(hurried: Wire, pair: tuple[str, str]) -> None:
    for data in (b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n", b"nonsense\r\n\r\n"):
        with hurried.connect() as connection:
            connection.sendall(data)
            assert statuses(receive_all(connection))[0] in (400, 413)
            deadline = time.monotonic() + 4
            with pytest.raises(ConnectionError):
                while time.monotonic() < deadline:
                    connection.sendall(b"x")
                    time.sleep(0.05)


def test_half_a_head_behind_a_body_that_nobody_read_keeps_no_connection(hurried: Wire, pair: tuple[str, str]) -> None:
    connections = [hurried.connect() for _ in range(5)]
    for connection in connections:
        connection.sendall(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabcGET /x HT")
    try:
        wait_until(lambda: hurried.open_files("socket:") <= hurried.own_sockets, 8)
    finally:
        for connection in connections:
            connection.close()


# Ends and limits


def test_connections_beyond_the_cap_are_closed_at_once(start: Callable[..., Wire], pair: tuple[str, str]) -> None:
    wire = start(max_connections=3)
    held = [wire.connect() for _ in range(3)]
    for connection in held:
        connection.sendall(get("/now"))
        assert statuses(connection.recv(1000)) == [200]
    with wire.connect() as one_more:
        assert closes_within(one_more, 0, 1) in (b"", b"reset")
    held[0].close()
    wait_until(lambda: _is_let_in(wire))
    for connection in held:
        connection.close()


def _is_let_in(wire: Wire) -> bool:
    try:
        return statuses(wire.talk(last("/now"))) == [200]
    except ConnectionError:
        return False


def test_stopping_finishes_what_is_in_flight_whatever_state_it_is_in(start: Callable[..., Wire]) -> None:
    wire = start(grace_s=2)
    rows: list[tuple[bytes, list[int] | None]] = [
        (b"", []),
        (get("/now"), [200]),
        (b"GET /now HT", None),
        (get("/slow/a?800"), [200]),
        (get("/slow/a?800") + get("/now"), None),
        (get("/large?30000000"), [200]),
        (get("/file?3000000"), [200]),
        (b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n", [413]),
        (b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc", None),
        (get("/hang"), None),
    ]
    connections = [wire.connect() for _ in rows]
    for connection, (data, _) in zip(connections, rows, strict=True):
        connection.sendall(data)
    wait_until(lambda: bool(select.select([connections[1]], [], [], 1)[0]))
    time.sleep(0.2)
    wire.process.terminate()
    with concurrent.futures.ThreadPoolExecutor(len(rows)) as threads:
        received = list(threads.map(_receive_until_reset, connections))
    assert wire.process.wait(8) == 0
    for (data, expected), got in zip(rows, received, strict=True):
        if expected is not None:
            assert statuses(got) == expected, data
    assert len(received[5]) > 30_000_000
    assert wire.failures == []


def _receive_until_reset(connection: socket.socket) -> bytes:
    received = bytearray()
    try:
        while piece := connection.recv(1 << 20):
            received += piece
    except ConnectionError:
        pass
    connection.close()
    return bytes(received)


# Mutations


def test_mutated_requests_harm_nobody(wire: Wire, server: Server, pair: tuple[str, str]) -> None:
    targets = [WireTarget(wire), ImagesTarget(server)]
    asyncio.run(Attack(targets, 4869, waits=pair[0] == "aiohttp").run(0, 2000 // MUTANTS, lambda _: None))
    wait_until(lambda: wire.open_blobs() == 0)
    assert [line for target in targets for line in target.failures()] == []
