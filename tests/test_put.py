"""`uvimg put`: files and folders become documents, and what cannot be put is told in one line."""

import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.conftest import Server


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "uvimg", "put", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    (folder / "site" / "sub").mkdir(parents=True)
    (folder / "site" / "index.html").write_text("<h1>ü</h1>")
    (folder / "site" / "sub" / "a b.css").write_text("x" * 300_000)
    (folder / "site" / ".hidden").write_text("secret")
    return folder


@pytest.mark.parametrize("way", ["by its URL", "into its store"])
def test_a_folder_is_put_with_all_that_is_in_it(start_server: Callable[..., Server], site: Path, way: str) -> None:
    server = start_server()
    if way == "by its URL":
        done = run("site", f"{server.url}/docs/manual/", folder=site)
    else:
        done = run(f"--store=local:{server.store}", "site", "/manual/", folder=site)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("put 2 documents, 300,011 bytes")
    assert ".hidden: left out" in done.stderr
    index = server.get("/docs/manual/")
    assert (index.text, index.headers["Content-Type"]) == ("<h1>ü</h1>", "text/html; charset=utf-8")
    css = server.get("/docs/manual/sub/a%20b.css")
    assert (len(css.content), css.headers["Content-Type"]) == (300_000, "text/css; charset=utf-8")
    assert server.get("/docs/manual/.hidden").status_code == 404


def test_a_file_takes_the_name_that_it_is_put_under(start_server: Callable[..., Server], site: Path) -> None:
    server = start_server()
    assert run("site/index.html", f"{server.url}/docs/other.txt", folder=site).returncode == 0
    assert run("site/index.html", f"{server.url}/docs/into/", folder=site).returncode == 0
    assert server.get("/docs/other.txt").headers["Content-Type"] == "text/plain; charset=utf-8"
    assert server.get("/docs/into/index.html").status_code == 200
    # A URL is quoted already.
    assert run("site/index.html", f"{server.url}/docs/a%20b%25.txt", folder=site).returncode == 0
    assert [entry["name"] for entry in server.get("/docs/?list&limit=1").json()["entries"]] == ["a b%.txt"]


def test_a_link_to_a_folder_is_left_out_and_told(site: Path) -> None:
    (site / "site" / "round").symlink_to(site / "site")
    done = run("--store=local:data", "site", "/manual/", folder=site)
    assert done.stdout.startswith("put 2 documents")
    assert "round: left out, it is a link to a folder" in done.stderr


class Elsewhere(BaseHTTPRequestHandler):
    """A server that sends whoever puts something to a page which all may get, and says odd things."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b'{"detail": "\x1b[2J\xff"}'
        if self.path.startswith("/moved/"):
            self.send_response(303)
            self.send_header("Location", "/page")
        else:
            self.send_response(500)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_what_was_not_put_is_never_said_to_have_been(site: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_address[1]}"
        moved, odd = (run("site/index.html", f"{url}/{name}/", folder=site) for name in ("moved", "odd"))
        # It says that it is empty, and is not.
        longer = run("/proc/self/status", f"{url}/odd/", folder=site)
        other.shutdown()
    for done, complaint in (
        (moved, "the server says 303, and points at /page"),
        (odd, "the server says 500: ?[2J\ufffd"),
        (longer, "/proc/self/status: it was changed while it was read"),
    ):
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
        assert complaint in done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere", "/a"], "nowhere: there is no such file"),
        (["site", "site", "/a"], "end it with a slash"),
        (["site", "/a"], "end it with a slash"),
        (["site", "/../a/"], "empty segment, . or .."),
        (["site", "ftp://x/a"], "neither a URL"),
        (["site", "http://127.0.0.1:1/docs/"], "Cannot connect"),
        (["site", "http://127.0.0.1:99999/docs/"], "127.0.0.1:99999"),
        (["site", "http://[::1/docs/"], "[::1"),
        (["empty", "/a/"], "there is no file in it"),
        (["--certificate=nowhere", "site", "https://127.0.0.1:1/docs/"], "nowhere: No such file"),
    ],
)
def test_what_cannot_be_put_is_told_in_one_line(site: Path, arguments: list[str], complaint: str) -> None:
    (site / "empty").mkdir()
    done = run(*arguments, folder=site)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "left out" not in line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("uvimg: ")
    assert complaint in lines[0]


def test_what_the_server_refuses_is_told_in_its_words(start_server: Callable[..., Server], site: Path) -> None:
    server = start_server(document_write_rule="deny all")
    done = run("site", f"{server.url}/docs/", folder=site)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the server says 403: The access rules do not allow this address to do that." in done.stderr
