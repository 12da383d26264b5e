"""uvimg under a real gunicorn: two workers, a reload and an end under load, and what is left behind."""

import hashlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import make_photo
from tests.test_wire import get, last, receive_all, statuses, wait_until

ROOT = Path(__file__).parent.parent


class Gunicorn:
    """`gunicorn -c conf/gunicorn.py` with these settings. Usable when made."""

    def __init__(self, folder: Path, *arguments: str, **settings: object) -> None:
        self._log = folder / "log"
        settings = {"port": 0, "store": f"local:{folder / 'data'}", "workers": 3, **settings}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("UVIMG_")}
        environment["TMPDIR"] = str(folder)
        environment |= {f"UVIMG_{name.upper()}": str(value) for name, value in settings.items()}
        command = [sys.executable, "-m", "gunicorn", "-c", str(ROOT / "conf/gunicorn.py"), "-w", "2", *arguments]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log, env=environment, cwd=folder)

    def wait_until_ready(self, workers: int = 2) -> None:
        wait_until(lambda: self.log.count("INFO ready") == workers or self.process.poll() is not None, 30)
        found = re.search(r"Listening at: http://127\.0\.0\.1:(\d+)", self.log)
        assert found is not None, self.log
        self.port = int(found[1])

    @property
    def log(self) -> str:
        return self._log.read_text()

    def connect(self) -> socket.socket:
        connection = socket.socket()
        # So that a large answer does not fit into what stands between us.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", self.port))
        return connection

    def workers(self) -> set[int]:
        return children(self.process.pid)

    def image_workers(self) -> list[int]:
        """How many each of gunicorn's workers has."""
        return sorted(len(children(pid)) for pid in self.workers())

    def everybody(self) -> set[int]:
        return {self.process.pid, *self.workers()}.union(*(children(pid) for pid in self.workers()))

    def kill(self) -> None:
        for pid in self.everybody() if self.process.poll() is None else ():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


def children(pid: int) -> set[int]:
    try:
        return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    except FileNotFoundError:
        return set()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Gunicorn]]:
    started: list[Gunicorn] = []

    def begin(*arguments: str, **settings: object) -> Gunicorn:
        started.append(Gunicorn(tmp_path, *arguments, **settings))
        return started[-1]

    yield begin
    for running in started:
        running.kill()


class Client(threading.Thread):
    """Uploads and looks at renditions, on connections that it keeps, until nobody lets it in any more."""

    def __init__(self, port: int, number: int, stopping: threading.Event) -> None:
        super().__init__(daemon=True)
        self._port, self._number, self._stopping = port, number, stopping
        self.answers = 0
        self.failures: list[str] = []

    def run(self) -> None:
        connection = None
        while not self.failures:
            fresh = connection is None
            try:
                if connection is None:
                    connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
                    connection.connect()
                last = self._ask(connection)
            except OSError as exc:
                if not (fresh and self._stopping.is_set()):
                    self.failures.append(f"{'fresh' if fresh else 'kept'} connection: {exc!r}")
                return
            if last:
                connection.close()
                connection = None
            # Two cores serve all of this, and other tests beside it.
            time.sleep(0.01)

    def _ask(self, connection: http.client.HTTPConnection) -> bool:
        """One request; whether its answer was the connection's last."""
        step, seed = self.answers % 5, 100 * self._number + self.answers // 5
        photo = make_photo(seed)
        if step == 0:
            connection.request("POST", "/images", photo)
        else:
            connection.request("GET", f"/{hashlib.md5(photo).hexdigest()}?w={10 * step}&h=10")
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != (200 if step else 201) or (step and body[:2] != b"\xff\xd8"):
            self.failures.append(f"step {step}: {answer.status} {body[:200]!r}")
        self.answers += 1
        return answer.will_close


def test_a_reload_and_an_end_under_load_fail_no_request_and_leave_nobody_behind(
    start: Callable[..., Gunicorn], tmp_path: Path
) -> None:
    gunicorn = start()
    gunicorn.wait_until_ready()
    # Three image workers for two.
    assert gunicorn.image_workers() == [1, 2]

    def tell_metrics() -> str:
        with gunicorn.connect() as connection:
            connection.sendall(last("/metrics").replace(b"Host: x", b"Host: localhost"))
            return receive_all(connection).decode()

    # Whichever of them answers.
    wait_until(lambda: all('uvimg_processes{state="serving"} 2.0' in tell_metrics() for _ in range(4)))
    stopping = threading.Event()
    clients = [Client(gunicorn.port, number, stopping) for number in range(6)]
    for client in clients:
        client.start()
    wait_until(lambda: all(client.answers > 5 for client in clients))
    old = gunicorn.workers()
    seen = gunicorn.everybody()
    gunicorn.process.send_signal(signal.SIGHUP)
    wait_until(lambda: len(gunicorn.workers()) == 2 and not gunicorn.workers() & old, 20)
    wait_until(lambda: gunicorn.image_workers() == [1, 2])
    answered = [client.answers for client in clients]
    wait_until(lambda: all(client.answers > before for client, before in zip(clients, answered, strict=True)))
    seen |= gunicorn.everybody()
    stopping.set()
    gunicorn.process.terminate()
    assert gunicorn.process.wait(30) == 0
    for client in clients:
        client.join(20)
    assert [client.failures for client in clients] == [[]] * 6
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in seen))
    assert not list(tmp_path.glob("uvimg-metrics-*"))
    # What gunicorn says at the end of a socket that is closed already is no failure.
    odd = [line for line in gunicorn.log.splitlines() if " INFO " not in line and "[INFO]" not in line]
    assert [line for line in odd if not re.search(r" (GET|POST) /\S* 20[01] ", line)] == []


def test_a_worker_that_dies_leaves_its_share_to_its_successor(start: Callable[..., Gunicorn]) -> None:
    gunicorn = start()
    gunicorn.wait_until_ready()
    for share in (2, 2, 1):
        victim = next(pid for pid in gunicorn.workers() if len(children(pid)) == share)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda gone=victim: gone not in gunicorn.workers() and gunicorn.image_workers() == [1, 2], 20)


def test_what_has_begun_comes_to_its_end_and_who_is_idle_hears_a_last_call(start: Callable[..., Gunicorn]) -> None:
    gunicorn = start("-w", "1", workers=1)
    gunicorn.wait_until_ready(1)
    photo, large = make_photo(1), make_photo(2, 1600, 1600)
    post = get("/images", f"Content-Length: {len(photo)}\r\n").replace(b"GET", b"POST", 1) + photo
    with gunicorn.connect() as connection:
        fields = f"Content-Length: {len(large)}\r\nConnection: close\r\n"
        connection.sendall(get("/images", fields).replace(b"GET", b"POST", 1) + large)
        assert statuses(receive_all(connection)) == [201]
    uploading, reading, idle, silent = (gunicorn.connect() for _ in range(4))
    uploading.sendall(post[:-1000])
    reading.sendall(get(f"/{hashlib.md5(large).hexdigest()}?p=0"))
    received = reading.recv(1000)
    idle.sendall(get("/echo"))
    assert statuses(idle.recv(1000)) == [200]
    gunicorn.process.terminate()
    wait_until(lambda: "INFO stopping" in gunicorn.log)
    idle.sendall(get("/echo"))
    answer = receive_all(idle)
    assert statuses(answer) == [200]
    assert b"connection: close" in answer.lower()
    # A second later nothing new is begun.
    assert receive_all(silent) == b""
    uploading.sendall(post[-1000:])
    assert statuses(receive_all(uploading)) == [201]
    received += receive_all(reading)
    assert received.endswith(large[-1000:])
    assert len(received) > len(large)
    assert gunicorn.process.wait(20) == 0
    for connection in (uploading, reading, idle, silent):
        connection.close()


def test_the_command_without_a_configuration_serves_and_a_mistake_ends_it_with_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gunicorn", "uvimg.gunicorn:application"]
    command += ["-k", "aiohttp.GunicornUVLoopWebWorker", "-w", "1", "-b", "127.0.0.1:0", "--no-control-socket"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UVIMG_")}
    environment |= {"UVIMG_STORE": f"local:{tmp_path / 'data'}", "UVIMG_QUALITY": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 3
    assert "quality" in done.stderr
    assert "Traceback" not in done.stderr
