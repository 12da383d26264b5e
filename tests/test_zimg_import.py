"""`uvimg import-zimg`: what a zimg has stored is served under the ids that its clients know."""

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.conftest import Server, make_photo


def store_as_zimg(folder: Path, data: bytes, id: str | None = None) -> str:
    """A file where zimg would have it; its MD5, unless another id is wanted."""
    id = id or hashlib.md5(data).hexdigest()
    place = folder / str(int(id[:3], 16) // 4) / str(int(id[3:6], 16) // 4) / id
    place.mkdir(parents=True)
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


def test_a_folder_that_is_not_there_is_told_in_one_line(tmp_path: Path) -> None:
    done = run(f"--store=local:{tmp_path}/data", str(tmp_path / "missing"))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "there is no such folder" in done.stderr
    assert not (tmp_path / "data").exists()
