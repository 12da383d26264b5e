"""The README's commands are run as they stand there."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from bench import corpus
from tests.conftest import Server

ROOT = Path(__file__).parent.parent


def test_every_command_of_the_quick_start_and_the_api_works(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    assert blocks[0] == "scripts/serve --port 4869 &\n"
    server = start_server()
    (tmp_path / "photo.jpg").write_bytes(corpus.zimg_photo())
    script = "\n".join(["set -eux", *blocks[1:]]).replace("127.0.0.1:4869", f"127.0.0.1:{server.port}")
    script = re.sub(r"\bcurl ", "curl --no-progress-meter --fail-with-body --noproxy '*' ", script)
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count('"ret":true') == 3
    assert (tmp_path / "thumbnail.jpg").read_bytes()[:3] == b"\xff\xd8\xff"
    assert (tmp_path / "small.webp").read_bytes()[8:12] == b"WEBP"
    assert (tmp_path / "beginning").stat().st_size == 100


def test_every_file_of_the_source_tour_exists() -> None:
    text = (ROOT / "README.md").read_text()
    for path in re.findall(r"`((?:src|bench|tests|conf|scripts)/[\w./]*)`", text):
        assert (ROOT / path).exists(), path


def test_a_wheel_holds_all_that_the_service_needs(tmp_path: Path) -> None:
    subprocess.run([ROOT / "scripts/build-wheel", tmp_path], check=True, env={**os.environ, "PYTHON": sys.executable})
    (wheel,) = tmp_path.glob("*.whl")
    listed = subprocess.run(
        [sys.executable, "-m", "zipfile", "-l", str(wheel)], capture_output=True, text=True, check=True
    )
    shipped = {line.split()[0] for line in listed.stdout.splitlines()}
    wanted = {
        str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".html")
    }
    assert wanted <= shipped
