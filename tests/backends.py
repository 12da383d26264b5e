"""Servers of others that a store may stand on, started by the tests on free ports and stopped by their own ids."""

import itertools
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote

import pytest
import redis


def find_program(name: str) -> str:
    """Where it is. Without it the test is skipped, but never where everything has to be there."""
    # Programs in Go are where `go install` puts them.
    folders = [os.environ.get("PATH", ""), "/usr/sbin", "/sbin", str(Path.home() / "go" / "bin")]
    path = shutil.which(name, path=":".join(folders))
    if path is None:
        if os.environ.get("CI"):
            pytest.fail(f"{name} is not installed")
        pytest.skip(f"{name} is not installed")
    return path


def find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Program:
    """One server: running when made, again and at the same port after `start`. `log` is what it has written."""

    def __init__(self, command: Sequence[str], port: int, folder: Path, environment: dict[str, str] | None = None):
        self.command, self.port = list(command), port
        self._folder, self._environment = folder, os.environ | (environment or {})
        self._log = folder / f"{Path(command[0]).name}-{port}.log"
        self.start()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, cwd=self._folder, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"{self.command[0]} did not start: {self.log}") from None
                time.sleep(0.01)
            else:
                return

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class S3:
    """versitygw over a folder, with one bucket; each test has a prefix of its own in it."""

    bucket = "pictures"
    # The usual variables, for whoever asks it.
    environment: ClassVar = {
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": "not a secret",
        "AWS_REGION": "us-east-1",
    }
    _numbers = itertools.count()

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "buckets"
        (self.folder / self.bucket).mkdir(parents=True)
        port = find_port()
        command = [find_program("versitygw"), "--port", f"127.0.0.1:{port}", "--keep-alive", "posix", str(self.folder)]
        keys = {
            "ROOT_ACCESS_KEY": self.environment["AWS_ACCESS_KEY_ID"],
            "ROOT_SECRET_KEY": self.environment["AWS_SECRET_ACCESS_KEY"],
        }
        self.program = Program(command, port, folder, keys)

    def url(self, port: int = 0) -> str:
        """The URL of an empty store, by way of another port where there is one."""
        prefix = f"{os.getpid()}-{next(self._numbers)}"
        return f"s3://{self.bucket}/{prefix}?endpoint=http://127.0.0.1:{port or self.program.port}"

    def path(self, url: str) -> Path:
        """Where the server keeps the objects of a store."""
        return self.folder / url.removeprefix("s3://").partition("?")[0]


def start_redis(folder: Path, *options: str, certificate: Path | None = None) -> Program:
    """A redis-server that keeps nothing on the disk, unless it is told otherwise; with a certificate one for TLS."""
    port = find_port()
    places: tuple[str, ...] = ("--bind", "127.0.0.1", "--port", str(port))
    if certificate is not None:
        places = ("--bind", "127.0.0.1", "--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no")
        places += ("--tls-cert-file", str(certificate), "--tls-key-file", str(certificate))
        places += ("--tls-ca-cert-file", str(certificate))
    settings = (*places, "--save", "", "--appendonly", "no", *options)
    return Program([find_program("redis-server"), *settings], port, folder)


def start_redis_cluster(folder: Path) -> list[Program]:
    """Three servers that are a Redis Cluster when this returns."""
    servers: list[Program] = []
    for number in range(3):
        settings = ("--cluster-enabled", "yes", "--cluster-config-file", f"nodes-{number}.conf")
        servers.append(
            start_redis(folder, *settings, "--cluster-node-timeout", "2000", "--cluster-port", str(find_port()))
        )
    clients = [redis.Redis(port=server.port, socket_timeout=20) for server in servers]
    # What redis-cli does for this takes three seconds.
    for number, client in enumerate(clients):
        client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        client.execute_command("CLUSTER ADDSLOTSRANGE", number * 16384 // 3, (number + 1) * 16384 // 3 - 1)
        bus = servers[0].command[-1]
        client.execute_command("CLUSTER MEET", "127.0.0.1", servers[0].port, bus)
    deadline = time.monotonic() + 20
    while not all(_is_in_order(client) for client in clients):
        assert time.monotonic() < deadline, servers[0].log
        time.sleep(0.01)
    for client in clients:
        client.close()
    return servers


def _is_in_order(client: redis.Redis) -> bool:
    facts = str(client.execute_command("CLUSTER INFO"))
    return "'cluster_state': 'ok'" in facts and "'cluster_known_nodes': '3'" in facts


def start_memcached(folder: Path, *options: str) -> Program:
    port = find_port()
    # As root it wants to be told whom to become.
    user = ("-u", "nobody") if os.getuid() == 0 else ()
    command = [find_program("memcached"), "-l", "127.0.0.1", "-p", str(port), "-U", "0", *user, *options]
    return Program(command, port, folder)


def list_memcached(port: int) -> list[str]:
    """The keys of all that it holds."""
    with socket.create_connection(("127.0.0.1", port), 5) as asked, asked.makefile("rb") as answer:
        asked.sendall(b"lru_crawler metadump all\r\n")
        keys: list[str] = []
        while (line := answer.readline()) != b"END\r\n":
            assert line.startswith(b"key="), line
            keys.append(unquote(line.split()[0].removeprefix(b"key=").decode()))
        return keys


def change(path: Path, changes: Mapping[str, str]) -> str:
    """The text of a file of ours as a test can use it: each of these is there once, and becomes something else."""
    text = path.read_text()
    for before, after in changes.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


def start_nginx(folder: Path, text: str, port: int) -> Program:
    """nginx with this among its http settings, which have it listen on this port."""
    (folder / "uvimg.conf").write_text(text)
    temporary = "\n".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi"))
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}}\n"
        # The folder is the test's alone, and root's workers would be somebody else.
        + ("user root;\n" if os.getuid() == 0 else "")
        + f"http {{ access_log off; {temporary} uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;\n"
        f"include {folder}/uvimg.conf; }}\n"
    )
    return Program([find_program("nginx"), "-p", str(folder), "-c", str(folder / "nginx.conf")], port, folder)
