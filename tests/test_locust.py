"""locust's users against a real server: nothing fails that should not, and what is wrong is seen by its content."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.conftest import Server

ROOT = Path(__file__).parent.parent


def swarm(scenario: str, host: str, folder: Path, users: int = 8) -> tuple[int, dict[str, list[int]]]:
    """Exit status, and requests and failures by name."""
    files = f"bench/locust/{scenario}.py,tests/enough_requests.py"
    command = [sys.executable, "-m", "locust", "-f", files, "--headless", f"--host={host}"]
    command += [f"-u{users}", f"-r{users}", "-t60s", "--only-summary"]
    counts = folder / "counts.json"
    environment = {**os.environ, "COUNTS_FILE": str(counts)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=90)
    return done.returncode, json.loads(counts.read_text())


@pytest.mark.parametrize("scenario", ["view", "upload", "keyvalue", "mixed"])
def test_a_scenario_runs_without_a_failure(scenario: str, start_server: Callable[..., Server], tmp_path: Path) -> None:
    status, rows = swarm(scenario, start_server().url, tmp_path)
    assert {name: failures for name, (_, failures) in rows.items() if failures} == {}
    assert status == 0
    assert rows["all"][0] > 50


class _Liar(BaseHTTPRequestHandler):
    """200 to everything, and never what was asked for."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"true")

    do_POST = do_PUT = do_DELETE = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("scenario", ["view", "upload", "keyvalue"])
def test_a_server_that_says_200_to_everything_fails(scenario: str, tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Liar) as liar:
        threading.Thread(target=liar.serve_forever).start()
        try:
            status, rows = swarm(scenario, f"http://127.0.0.1:{liar.server_port}", tmp_path, users=3)
        finally:
            liar.shutdown()
    requests, failures = rows["all"]
    assert status == 1
    assert failures > 0.9 * requests > 0
