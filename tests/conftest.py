"""A real server for the tests: a process of its own on a free port, spoken to through its socket."""

import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pyvips
import requests

from bench import corpus
from tests.backends import S3, Program, start_memcached, start_redis, start_redis_cluster


class Server:
    """`uvimg serve` of these apps with these settings. Usable when made; `log` is what it wrote to stderr so far.

    `run` is what it is started by, `pass_fds` what it inherits.
    """

    def __init__(
        self,
        folder: Path,
        *,
        apps: tuple[str, ...] = (),
        run: tuple[str, ...] = (),
        pass_fds: tuple[int, ...] = (),
        **settings: Any,
    ):
        self.store = folder / "data"
        self._log = folder / "log"
        settings = {"port": 0, "store": f"local:{self.store}", "workers": 2, **settings}
        flags = [flag for name, value in settings.items() for flag in _spell_flags(name.replace("_", "-"), value)]
        self.process = subprocess.Popen(
            [*run, sys.executable, "-m", "uvimg", "serve", *apps, *flags],
            stdout=subprocess.PIPE,
            stderr=self._log.open("ab"),
            text=True,
            # One that is killed leaves nothing elsewhere.
            env=os.environ | {"TMPDIR": str(folder)},
            pass_fds=pass_fds,
        )
        assert self.process.stdout is not None
        self.ready_line = self.process.stdout.readline()
        if "is ready" not in self.ready_line:
            self.process.wait(10)
            raise AssertionError(f"the server did not start: {self.log}")
        # Its first TCP address; none where it listens on unix sockets alone.
        found = re.search(r"(https?)://[^/]*:(\d+)/", self.ready_line)
        self.port = int(found[2]) if found else 0
        self.url = f"{found[1] if found else 'http'}://127.0.0.1:{self.port}"
        self.http = requests.Session()
        self.http.trust_env = False

    @property
    def log(self) -> str:
        return self._log.read_text()

    def upload(self, data: bytes) -> str:
        """Upload an image the way zimg's clients do; its md5."""
        answer = self.http.post(f"{self.url}/upload", data=data, headers={"Content-Type": "jpeg"}).json()
        assert answer["ret"], answer
        return str(answer["info"]["md5"])

    def get(self, path: str, **options: Any) -> requests.Response:
        return self.http.get(self.url + path, **options)

    def image(self, path: str) -> Any:
        """The decoded image behind a path, all frames of it."""
        answer = self.get(path)
        assert answer.status_code == 200, (answer.status_code, answer.text)
        return decode(answer.content)

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(40)

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        self.process.kill()
        self.process.wait()


def _spell_flags(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}={item}" for item in (value if isinstance(value, list) else [value])]


def make_photo(seed: int, width: int = 64, height: int = 48) -> bytes:
    """A small JPEG, another one for each seed."""
    return corpus.jpeg(corpus.photo(width, height, seed=seed))


def decode(data: bytes) -> Any:
    """An image from its bytes, animations as a tall strip."""
    try:
        return pyvips.Image.new_from_buffer(data, "", n=-1)
    except pyvips.Error:
        return pyvips.Image.new_from_buffer(data, "")


# A module that says EVERY_FRONT_END = True has each of its tests run against all of these.
FRONT_ENDS = [(chosen, loop) for chosen in ("transport", "streams", "aiohttp") for loop in ("uvloop", "asyncio")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "front_end" in metafunc.fixturenames and getattr(metafunc.module, "EVERY_FRONT_END", False):
        names = ["-".join(pair) for pair in FRONT_ENDS]
        metafunc.parametrize("front_end", FRONT_ENDS, indirect=True, ids=names, scope="session")


@pytest.fixture(scope="session")
def front_end(request: pytest.FixtureRequest) -> dict[str, str]:
    """The settings that choose what speaks HTTP."""
    chosen, loop = getattr(request, "param", FRONT_ENDS[0])
    return {"front_end": chosen, "loop": loop}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, front_end: dict[str, str]) -> Iterator[Server]:
    """One server with the default settings for all tests that leave it as they found it."""
    running = Server(tmp_path_factory.mktemp("server"), **front_end)
    yield running
    running.kill()


@pytest.fixture
def start_server(tmp_path: Path, front_end: dict[str, str]) -> Iterator[Callable[..., Server]]:
    """Starts servers of the test's own; several share one store unless told otherwise."""
    started: list[Server] = []

    def start(**settings: Any) -> Server:
        started.append(Server(tmp_path, **{**front_end, **settings}))
        return started[-1]

    yield start
    for running in started:
        running.kill()


@pytest.fixture(scope="session")
def zimg_photo() -> bytes:
    return corpus.zimg_photo()


def make_certificate(folder: Path, *options: str) -> Path:
    """A key and a certificate for localhost, in one file."""
    path = folder / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-keyout", str(folder / "key.pem"), "-out", str(path), *(options or ("-nodes",))),
        ],
        check=True,
        capture_output=True,
    )
    path.write_text(path.read_text() + (folder / "key.pem").read_text())
    return path


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """An S3 server, and the environment in which stores find its keys."""
    server = S3(tmp_path_factory.mktemp("s3"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server
    server.program.stop()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    running = start_redis(tmp_path_factory.mktemp("redis"))
    yield running
    running.kill()


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Program]]:
    running = start_redis_cluster(tmp_path_factory.mktemp("redis-cluster"))
    yield running
    for server in running:
        server.kill()


@pytest.fixture
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store of the test's own, of the scheme that it is given: empty."""
    scheme: str = request.param
    if scheme == "local":
        yield f"local:{tmp_path}/data"
    elif scheme in ("memory", "tier"):
        yield "memory:"
    elif scheme == "s3":
        yield request.getfixturevalue("s3").url()
    elif scheme == "memcached":
        # Two of the test's own: they have neither databases nor prefixes.
        servers = [start_memcached(tmp_path) for _ in range(2)]
        yield "memcached://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)
        for server in servers:
            server.kill()
    else:
        if scheme == "redis":
            servers = [request.getfixturevalue("redis_server")]
        else:
            servers = request.getfixturevalue("redis_cluster")
        places = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        yield f"{scheme}://{places}?prefix={secrets.token_hex(4)}:"
