"""What was answered is there: after kill -9 in the middle of everything, again and again."""

import concurrent.futures
import contextlib
import hashlib
import http.client
import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable

from bench import corpus
from tests.conftest import Server

ROUNDS = 20
UPLOADS = 200
CLIENTS = 16


def make_uploads(seed: int) -> list[bytes]:
    """Different images, most of them small blobs, every eighth a file: a comment makes each one new."""
    small = corpus.jpeg(corpus.photo(48, 32))
    large = corpus.jpeg(corpus.photo(400, 300), quality=97)
    assert len(small) < 65_000 < len(large)
    uploads = []
    for number in range(UPLOADS):
        comment = f"round {seed} image {number}".encode()
        segment = b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment
        picture = large if number % 8 == 0 else small
        uploads.append(picture[:2] + segment + picture[2:])
    return uploads


def test_every_answered_upload_survives_kill_9(start_server: Callable[..., Server]) -> None:
    chance = random.Random(4869)
    server = start_server(access_log=False, workers=1)
    total = 0
    interrupted = 0
    for number in range(ROUNDS):
        uploads = make_uploads(number)
        kill_after = chance.randrange(1, UPLOADS)
        acknowledged: list[bytes] = []
        enough = threading.Event()

        def upload(
            uploads: list[bytes],
            port: int = server.port,
            acknowledged: list[bytes] = acknowledged,
            kill_after: int = kill_after,
            enough: threading.Event = enough,
        ) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
                for data in uploads:
                    connection.request("POST", "/upload", data)
                    answer = json.loads(connection.getresponse().read())
                    assert answer["ret"], answer
                    acknowledged.append(data)
                    if len(acknowledged) >= kill_after:
                        enough.set()

        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as clients:
            waiting = [clients.submit(upload, uploads[number::CLIENTS]) for number in range(CLIENTS)]
            assert enough.wait(30)
            server.kill()
        for done in waiting:
            done.result()
        interrupted += len(acknowledged) < UPLOADS
        server = start_server(access_log=False, workers=1)
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
            for data in acknowledged:
                # By its one name and, every other time, by its other.
                names = hashlib.md5(data).hexdigest(), hashlib.sha256(data).hexdigest()
                connection.request("GET", f"/{names[len(data) % 2]}?p=0")
                assert connection.getresponse().read() == data
        total += len(acknowledged)
    assert total > ROUNDS
    assert interrupted > ROUNDS // 2
    server.stop()
    for command in ("scrub", "gc", "scrub"):
        done = subprocess.run(
            [sys.executable, "-m", "uvimg", command, "--store", f"local:{server.store}"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
