"""`uvimg import-zimg`: what a zimg has stored is served under the ids that its clients know."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from tests.backends import Program, start_memcached
from tests.conftest import Server, make_photo


def store_as_zimg(folder: Path, data: bytes, id: str | None = None) -> str:
    """A file where zimg would have it; its MD5, unless another id is wanted."""
    id = id or hashlib.md5(data).hexdigest()
    place = make_place(folder, id)
    (place / "0*0").write_bytes(data)
    (place / "100*100").write_bytes(b"a rendition")
    return id


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "uvimg", "import-zimg", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_images_of_a_zimg_are_served_under_their_ids(start_server: Callable[..., Server], tmp_path: Path) -> None:
    photos = [make_photo(seed) for seed in range(12)]
    ids = [store_as_zimg(tmp_path / "img", photo) for photo in photos]
    server = start_server()
    done = run(f"--store=local:{server.store}", "--workers=1", str(tmp_path / "img"))
    assert (done.returncode, done.stdout) == (0, "12 originals imported, 0 were there\n"), done.stderr
    for id, photo in zip(ids, photos, strict=True):
        assert server.get(f"/{id}?p=0").content == photo
    assert server.image(f"/{ids[0]}?w=20").width == 20
    again = run(f"--store=local:{server.store}", "--workers=1", str(tmp_path / "img"))
    assert (again.returncode, again.stdout) == (0, "0 originals imported, 12 were there\n")


def test_what_is_not_what_zimg_says_it_is_is_told_and_left_out(tmp_path: Path) -> None:
    photo = make_photo(1)
    good = store_as_zimg(tmp_path / "img", photo)
    wrong = store_as_zimg(tmp_path / "img", make_photo(2), "0" * 32)
    garbage = store_as_zimg(tmp_path / "img", b"no image" * 100)
    cut = store_as_zimg(tmp_path / "img", make_photo(3)[:600])
    missing = store_as_zimg(tmp_path / "img", make_photo(4))
    place = tmp_path / "img" / str(int(missing[:3], 16) // 4) / str(int(missing[3:6], 16) // 4) / missing
    (place / "0*0").unlink()
    # What is in the wrong place is not zimg's.
    (tmp_path / "img" / "0" / "0" / ("f" * 32)).mkdir(parents=True, exist_ok=True)
    (tmp_path / "img" / "notes.txt").write_text("not zimg's")
    done = run(f"--store=local:{tmp_path}/data", "--workers=1", str(tmp_path / "img"))
    assert done.returncode == 1
    assert done.stdout.endswith("1 originals imported, 0 were there, 4 failed\n")
    told = dict(line.split(": ", 1) for line in done.stdout.splitlines()[:-1])
    assert told.keys() == {wrong, garbage, cut, missing}
    assert "another MD5" in told[wrong]
    assert "not an image" in told[garbage]
    assert "cannot be decoded" in told[cut]
    assert "cannot be read" in told[missing]
    assert good not in told


def make_place(folder: Path, id: str) -> Path:
    """The folder that zimg would have for an original."""
    place = folder / str(int(id[:3], 16) // 4) / str(int(id[3:6], 16) // 4) / id
    place.mkdir(parents=True)
    return place


def test_what_can_never_be_read_stops_nobody(tmp_path: Path) -> None:
    good = store_as_zimg(tmp_path / "img", make_photo(1))
    told = {"its original is no file": "a" * 32, "its original has more than 1048576 bytes": "b" * 32}
    os.mkfifo(make_place(tmp_path / "img", "a" * 32) / "0*0")
    with (make_place(tmp_path / "img", "b" * 32) / "0*0").open("wb") as file:
        file.write(make_photo(2))
        file.truncate(1 << 30)
    for loop in (tmp_path / "img" / "0", tmp_path / "img" / "1" / "2"):
        loop.parent.mkdir(exist_ok=True)
        loop.symlink_to(loop)
        told[f"{loop}: cannot be looked into"] = ""
    os.mkdir(bytes(tmp_path / "img") + b"/\xff\xfe")
    done = run(f"--store=local:{tmp_path}/data", "--workers=1", "--max-size=1MiB", str(tmp_path / "img"))
    assert done.stdout.endswith("1 originals imported, 0 were there, 4 failed\n"), (done.stdout, done.stderr)
    assert (done.returncode, done.stderr) == (1, "")
    for note, id in told.items():
        assert (f"{id}: {note}" if id else note) in done.stdout
    assert good not in done.stdout


def test_a_folder_whose_name_is_no_text_is_told_all_the_same(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"im\xffg")
    good = store_as_zimg(folder, make_photo(1))
    (folder / "0").symlink_to(folder / "0")
    done = run(f"--store=local:{tmp_path}/data", "--workers=1", str(folder))
    assert done.stdout.endswith("1 originals imported, 0 were there, 1 failed\n"), done.stderr
    assert r"im\udcffg/0: cannot be looked into" in done.stdout
    assert good not in done.stdout


def test_a_server_that_speaks_only_some_of_redis_protocol_is_asked_by_a_list(tmp_path: Path) -> None:
    """As SSDB does, whose SCAN is another one."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                while data := connection.recv(10_000):
                    connection.sendall(b"*0\r\n" if b"SCAN" in data else b"+OK\r\n")

        threads.submit(answer)
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}"
        done = run(f"--store=local:{tmp_path}/data", "--workers=1", url)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "--ids FILE" in done.stderr


def test_a_zimg_that_kept_its_images_in_redis_is_taken_over(tmp_path: Path, redis_server: Program) -> None:
    client = redis.Redis(port=redis_server.port, db=9)
    client.flushdb()
    photos = {hashlib.md5(photo).hexdigest(): photo for photo in map(make_photo, range(5))}
    for id, photo in photos.items():
        client.set(id, photo)
        client.set(f"{id}:100:100:1:0:-1:-1:0:75:jpeg", b"a rendition")
    client.set("f" * 32, make_photo(9))
    url = f"redis://127.0.0.1:{redis_server.port}/9"
    done = run(f"--store=local:{tmp_path}/data", "--workers=1", url)
    client.flushdb()
    assert done.returncode == 1
    assert done.stdout.startswith("f" * 32 + ": its bytes have another MD5")
    assert done.stdout.endswith("5 originals imported, 0 were there, 1 failed\n")
    again = run(f"--store=local:{tmp_path}/data", "--workers=1", url)
    assert (again.returncode, again.stdout) == (0, "0 originals imported, 0 were there\n")


def test_a_zimg_that_kept_its_images_in_memcached_is_taken_over_by_a_list(tmp_path: Path) -> None:
    server = start_memcached(tmp_path)
    try:
        photos = {hashlib.md5(photo).hexdigest(): photo for photo in map(make_photo, range(4))}
        with socket.create_connection(("127.0.0.1", server.port), 5) as client:
            for id, photo in photos.items():
                client.sendall(b"set %b 0 0 %d\r\n%b\r\n" % (id.encode(), len(photo), photo))
                assert client.recv(100) == b"STORED\r\n"
        (tmp_path / "ids").write_text("\n".join([*photos, "", "0" * 32]) + "\n")
        url = f"memcached://127.0.0.1:{server.port}"
        blind = run(f"--store=local:{tmp_path}/data", "--workers=1", url)
        assert (blind.returncode, "--ids FILE" in blind.stderr) == (1, True)
        done = run(f"--store=local:{tmp_path}/data", "--workers=1", "--ids", str(tmp_path / "ids"), url)
    finally:
        server.kill()
    assert done.returncode == 1
    assert done.stdout == (f"{'0' * 32}: its original is not there\n4 originals imported, 0 were there, 1 failed\n")


def test_who_waits_for_ids_can_be_interrupted(tmp_path: Path) -> None:
    id = store_as_zimg(tmp_path / "img", make_photo(1, 900, 700))
    command = [sys.executable, "-m", "uvimg", "import-zimg", f"--store=local:{tmp_path}/data", "--workers=1", "--ids=-"]
    process = subprocess.Popen(
        [*command, tmp_path / "img"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    # No end of a line, and no end of the list.
    process.stdin.write(f"{id}\n{id[:5]}".encode())
    process.stdin.flush()
    deadline = time.monotonic() + 20
    while not any(path.is_file() for path in (tmp_path / "data" / "blobs").glob("*/*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    out, errors = process.communicate()
    assert out.endswith(b"were there\n")
    assert errors == b""


@pytest.mark.parametrize(
    ("origin", "ids", "told"),
    [
        ("redis://127.0.0.1:1", "", "does not answer"),
        ("redis+cluster://127.0.0.1:1", "", "not a cluster"),
        ("memcached://", "", "memcached is written"),
        ("redis://a:b:c", "", "HOST:PORT"),
        (".", "odd", "line 2: not 32 hex digits"),
        (".", "missing", "missing: No such file"),
        (".", "long", "line 2501: not 32 hex digits"),
        (".", "endless", "line 1: not 32 hex digits"),
    ],
)
def test_what_cannot_be_imported_is_told_in_one_line(
    origin: str, ids: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "endless").symlink_to("/dev/zero")
    (tmp_path / "long").write_text(("\n" * 2500) + "x")
    (tmp_path / "odd").write_text("0" * 32 + "\nrm -rf\x1b[0m\n")
    done = run("--store=local:data", "--workers=1", *(["--ids", ids] if ids else []), origin)
    assert done.returncode in (1, 2)
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_folder_that_is_not_there_is_told_in_one_line(tmp_path: Path) -> None:
    done = run(f"--store=local:{tmp_path}/data", str(tmp_path / "missing"))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "there is no such folder" in done.stderr
    assert not (tmp_path / "data").exists()
