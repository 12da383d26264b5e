"""Servers of others that a store may stand on, started by the tests on free ports and stopped by their own ids."""

import itertools
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest


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
