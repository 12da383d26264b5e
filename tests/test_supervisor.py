"""Several processes under a supervisor: who dies is replaced, who is renewed or stopped fails no request."""

import contextlib
import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests

from tests.conftest import Server, make_photo
from tests.test_wire import get, last, receive_all, wait_until


def serving(server: Server) -> set[int]:
    """The pids of the processes that serve, ready or not."""
    found = set()
    for pid in Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if b"\0serve\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(int(pid))
    return found


def descendants(pid: int) -> set[int]:
    children = {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    return children.union(*map(descendants, children))


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def count_connections(pid: int) -> int:
    links = (os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir())
    return sum("socket:" in link for link in links)


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


class Load:
    """Clients that ask again and again, on connections that stay and on new ones, until the end of the `with`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._over = threading.Event()
        self.answered = 0
        self.failures: list[str] = []
        self.refused = 0
        # Then a connection that was never let in is no failure.
        self.is_stopping = False
        self._threads = [threading.Thread(target=self._ask, args=(stays,)) for stays in (True, True, True, False)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, stays: bool) -> None:
        while not self._over.is_set():
            try:
                connection = connect(self._server)
            except ConnectionError:
                self.refused += 1
                return
            with connection:
                asked = 0
                try:
                    while not self._over.is_set():
                        connection.sendall(get("/echo") if stays else last("/echo"))
                        answer = connection.recv(4096)
                        if b"zimg works" not in answer:
                            raise ConnectionError(answer)
                        asked += 1
                        self.answered += 1
                        if b"connection: close" in answer.lower():
                            break
                        # Light: the servers need the cores.
                        self._over.wait(0.005)
                except ConnectionError as exc:
                    if asked or not self.is_stopping:
                        self.failures.append(f"after {asked} answers: {exc!r}")
                    return


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def begin(**settings: object) -> Server:
        started.append(Server(tmp_path, **{"processes": 2, "access_log": False, **settings}))
        return started[-1]

    yield begin
    for running in started:
        left = descendants(running.process.pid) if running.process.poll() is None else set()
        running.kill()
        wait_until(lambda left=left: not any(map(lives, left)))


def test_what_waits_at_a_dying_process_is_served_by_its_successor(start: Callable[..., Server]) -> None:
    server = start(front_end="transport")
    first = serving(server)
    assert len(first) == 2
    assert "processes 2, workers 2" in server.ready_line
    idle = {pid: count_connections(pid) for pid in first}
    open_ones = [connect(server) for _ in range(30)]
    for connection in open_ones:
        connection.sendall(get("/echo"))
        assert b"zimg works" in connection.recv(4096)
    # The kernel shares them out.
    assert all(count_connections(pid) > idle[pid] for pid in first)
    victim = min(first)
    os.kill(victim, signal.SIGSTOP)
    waiting = [connect(server) for _ in range(30)]
    for connection in waiting:
        connection.sendall(last("/echo"))
    os.kill(victim, signal.SIGKILL)
    for connection in waiting:
        assert b"zimg works" in receive_all(connection)
        connection.close()
    survived = 0
    for connection in open_ones:
        with contextlib.suppress(ConnectionError), connection:
            connection.sendall(last("/echo"))
            survived += b"zimg works" in receive_all(connection)
    # Those of the dead one are lost, and no others.
    assert 0 < survived < 30
    wait_until(lambda: len(serving(server)) == 2 and victim not in serving(server))
    assert f"process {victim} ended with status -9 and is replaced" in server.log
    # The supervisor serves nothing, and has loaded nothing that could fail.
    loaded = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert not re.findall(r"lmdb|vips|aiohttp|uvloop", loaded)


def test_stopping_under_load_cuts_no_answer(start: Callable[..., Server]) -> None:
    server = start(front_end="transport", processes=1, workers=1)
    with Load(server) as load:
        wait_until(lambda: load.answered > 200)
        load.is_stopping = True
        assert server.stop() == 0
    assert load.failures == []


@pytest.mark.parametrize(("front_end", "processes"), [("transport", 1), ("aiohttp", 2)])
def test_renewing_under_load_fails_no_request(start: Callable[..., Server], front_end: str, processes: int) -> None:
    server = start(front_end=front_end, processes=processes, workers=processes)
    first = serving(server)
    with Load(server) as load:
        wait_until(lambda: load.answered > 200)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: len(serving(server)) == processes and not serving(server) & first, 60)
        before = load.answered
        wait_until(lambda: load.answered > before + 200)
    assert load.failures == []
    assert load.refused == 0
    assert "is replaced" not in server.log
    if front_end == "aiohttp":
        # However the supervisor goes, nobody stays.
        left = descendants(server.process.pid)
        assert len(left) >= 4
        server.kill()
        wait_until(lambda: not any(map(lives, left)), 20)


def test_a_reload_reads_the_configuration_again_and_a_broken_one_changes_nothing(
    start: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "uvimg.toml"
    sound = f'store = "local:{tmp_path}/data"\nimage_headers = ["X-Generation: %d"]\n'
    file.write_text(sound % 1)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        server = start(config=file, store=None, processes=1, workers=1)
        assert manager.recv(100) == b"READY=1"
        md5 = server.upload(make_photo(900))

        def reload() -> None:
            server.process.send_signal(signal.SIGHUP)
            assert manager.recv(100).startswith(b"RELOADING=1\n")
            assert manager.recv(100) == b"READY=1"

        def generation() -> str:
            with connect(server) as connection:
                connection.sendall(last(f"/{md5}?p=0"))
                found = re.search(rb"X-Generation: (\d)", receive_all(connection))
                return found[1].decode() if found else ""

        first = serving(server)
        file.write_text("nonsense")
        reload()
        assert "nothing was reloaded, the others go on as before" in server.log
        file.write_text('store = "local:/proc/nothing"\n')
        reload()
        assert "ended with status 1 before it was ready" in server.log
        assert (serving(server), generation()) == (first, "1")
        file.write_text(sound % 2)
        reload()
        wait_until(lambda: not serving(server) & first)
        assert generation() == "2"
        assert server.stop() == 0
        assert manager.recv(100) == b"STOPPING=1"
        # Its processes say nothing of their own.
        assert not select.select([manager], [], [], 0)[0]


def test_alone_a_hangup_is_only_told_and_a_drain_delay_goes_on_as_before(start: Callable[..., Server]) -> None:
    server = start(processes=0, drain_delay_s=1, store="memory:", workers=1)
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "reloading needs processes" in server.log)
    began = time.monotonic()
    server.process.terminate()
    answered = 0.0
    with contextlib.suppress(ConnectionError):
        while time.monotonic() - began < 10:
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(get("/echo"))
                answer = connection.recv(1000)
                if b"\r\nConnection: close" in answer or not answer:
                    break
                answered = time.monotonic() - began
            time.sleep(0.01)
    assert 0.8 < answered < 9
    assert server.process.wait(10) == 0


def test_any_process_tells_the_numbers_of_all(start_server: Callable[..., Server]) -> None:
    server = start_server(processes=2, workers=2, front_end="transport", operations_listen="127.0.0.1:0")
    ports = set(re.findall(r"health and metrics at http://127.0.0.1:(\d+)/", server.log))
    assert len(ports) == 1
    url = f"http://127.0.0.1:{ports.pop()}"
    for _ in range(20):
        requests.get(f"{server.url}/echo", timeout=20)
    assert requests.get(f"{server.url}/health", timeout=20).status_code == 404
    assert requests.get(f"{url}/health", timeout=20).json() == {"status": "ok"}

    def told() -> tuple[str, ...]:
        """The same of whomever the kernel chooses."""
        texts = [requests.get(f"{url}/metrics", timeout=20).text for _ in range(6)]
        names = ("uvimg_requests_total{[^}]*echo[^}]*}", "uvimg_processes{[^}]*serving[^}]*}", "uvimg_workers_wanted")
        (values,) = {tuple(re.findall(rf"^{name} (.*)", text, re.MULTILINE)[0] for name in names) for text in texts}
        return values

    # Another process is seen as it was a second ago.
    deadline = time.monotonic() + 10
    while True:
        with contextlib.suppress(ValueError):
            if told() == ("20.0", "2.0", "2.0"):
                break
        assert time.monotonic() < deadline, told()
    (folder,) = {
        variable.partition("=")[2]
        for pid in serving(server)
        for variable in Path(f"/proc/{pid}/environ").read_text().split("\0")
        if variable.startswith("UVIMG_METRICS_DIR=")
    }
    assert server.stop() == 0
    assert not Path(folder).exists()


def test_who_replaces_a_process_has_its_settings_and_not_those_of_a_file_that_is_being_written(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    file = tmp_path / "uvimg.toml"
    file.write_text("quality = 50\n")
    server = start_server(processes=1, workers=1, front_end="transport", config=str(file))
    (old,) = serving(server)
    file.write_text("quality = ")
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: serving(server) not in (set(), {old}), 20)
    assert requests.get(f"{server.url}/health", timeout=20).status_code == 200
    (new,) = serving(server)
    assert b"\0UVIMG_QUALITY=50\0" in Path(f"/proc/{new}/environ").read_bytes()
