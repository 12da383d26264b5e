"""The text that codings are measured with, and the suite that does it."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.prose import write_book


def test_the_book_is_the_same_every_time_and_as_long_as_it_was_ordered() -> None:
    book = write_book(100_000)
    assert len(book) == 100_000
    assert book.startswith(b"<!DOCTYPE html>")
    assert book.endswith(b"</html>\n")
    # Another Python, another machine: the published table would be another one.
    assert hashlib.sha256(book).hexdigest().startswith("dbc2d3317011dcca")


def test_the_suite_tells_bytes_beside_those_that_were_published(tmp_path: Path) -> None:
    if shutil.which("taskset") is None:
        pytest.skip("taskset is not installed: apt-get install util-linux")
    (tmp_path / "text.html").write_bytes(b"<p>It was said, and said again.</p>\n" * 2000)
    command = [sys.executable, "-m", "bench", "zstd", f"--text={tmp_path / 'text.html'}", "--seconds=0.1", "--rounds=1"]
    done = subprocess.run([*command, "--case=zstd 1"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split("  ")[1]: line.split() for line in done.stdout.splitlines() if line.startswith("  zstd 1")}
    assert {"zstd 1", "zstd 10", "zstd 19"} <= rows.keys()
    assert "1,392,549" in rows["zstd 1"]
    assert "1.0000" in rows["zstd 1"]
