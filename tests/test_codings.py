"""Coded copies: made while they are sent, kept, made better, gone with what they are of; and independent decoders."""

import asyncio
import base64
import gzip
import hashlib
import os
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
import pytest
import zstandard

from bench.prose import write_book
from tests.conftest import Server
from tests.test_documents import PAGE, Docs, decode, wait_until
from uvimg.apps.codings import Codings
from uvimg.apps.documents import Facts, replace_document
from uvimg.coders import Coders
from uvimg.core.document import document_name
from uvimg.store import open_store

# Longer than one step of a coder, and than what is read at once.
BOOK = write_book(1_200_000)


def names(server: Server, prefix: bytes) -> list[bytes]:
    """What the server's store has, read beside it."""

    async def scan() -> list[bytes]:
        store = open_store(f"local:{server.store}", create=False)
        try:
            return [name for name, _ in await store.scan(prefix)]
        finally:
            await store.close()

    return asyncio.run(scan())


def unbind(server: Server, name: bytes) -> None:
    async def take() -> None:
        store = open_store(f"local:{server.store}", create=False)
        try:
            await store.unbind([name])
        finally:
            await store.close()

    asyncio.run(take())


def run(server: Server, command: str) -> str:
    arguments = [sys.executable, "-m", "uvimg", command, f"--store=local:{server.store}"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def need(program: str, package: str) -> None:
    if shutil.which(program) is None:
        message = f"{program} is not installed: apt-get install {package}"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)


def test_the_programs_of_others_decode_every_level_and_make_nothing_smaller_with_the_same_library(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    need("zstd", "zstd")
    docs = Docs(start_server(apps=("documents",), coded_copies="none"), "")
    text = BOOK[:100_000]
    docs.put("/text.html", text)
    for level in range(1, 23):
        coded = docs.get(f"/text.html?compression=zstd&level={level}").content
        plain = subprocess.run(["zstd", "-dcq"], input=coded, capture_output=True, check=True).stdout
        assert plain == text, level
        parameters = zstandard.get_frame_parameters(coded)
        assert parameters.content_size == len(text)
        assert parameters.window_size <= 8 << 20
        bare = zstandard.ZstdCompressor(level=level).compress(text)
        assert abs(len(coded) / len(bare) - 1) < 0.003, level
    for level in range(1, 10):
        coded = docs.get(f"/text.html?compression=gzip&level={level}").content
        assert subprocess.run(["gzip", "-dc"], input=coded, capture_output=True, check=True).stdout == text
        assert gzip.decompress(coded) == text


def test_the_first_copy_is_kept_and_made_better_and_goes_with_its_document(
    start_server: Callable[..., Server],
) -> None:
    server = start_server(apps=("documents",))
    docs = Docs(server, "")
    docs.put("/book.html", BOOK)
    docs.put("/also/book.html", BOOK)
    first = docs.get("/book.html", "zstd")
    assert first.headers["ETag"].endswith('-zstd-3"')
    assert decode(first) == BOOK

    def best() -> bool:
        return docs.get("/book.html", "zstd").headers["ETag"].endswith('-zstd-19"')

    wait_until(best, 60)
    kept = docs.get("/book.html", "zstd")
    assert "Content-Length" in kept.headers
    assert len(kept.content) < len(first.content)
    assert decode(kept) == BOOK
    # Who has the first one has what was asked for.
    held = docs.get("/book.html", "zstd", If_None_Match=first.headers["ETag"])
    assert (held.status_code, held.headers["ETag"]) == (304, first.headers["ETag"])
    docs.delete("/book.html")
    assert docs.get("/also/book.html", "zstd").headers["ETag"].endswith('-zstd-19"')
    assert names(server, b"codings/")
    docs.put("/also/book.html", PAGE)
    assert not names(server, b"codings/")


def test_gc_takes_away_copies_of_what_is_gone(start_server: Callable[..., Server]) -> None:
    server = start_server(apps=("documents",), coded_copies="first")
    docs = Docs(server, "")
    docs.put("/page.html", PAGE)
    docs.get("/page.html", "gzip")
    wait_until(lambda: bool(names(server, b"codings/")))
    server.stop()
    # As after a crash between the two.
    unbind(server, b"documents/page.html")
    collected = run(server, "gc")
    assert "a coded copy of what is gone" in collected
    assert not names(server, b"codings/")
    assert "no damage" in run(server, "scrub")


def test_who_goes_away_stops_the_coding_and_too_many_are_told_so(start_server: Callable[..., Server]) -> None:
    server = start_server(apps=("documents",), coded_copies="none", coding_memory="1 MiB")
    docs = Docs(server, "")
    docs.put("/book.html", BOOK)
    clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(120)]
    for client in clients:
        client.sendall(b"GET /book.html?compression=zstd&level=19 HTTP/1.1\r\nHost: x\r\n\r\n")
    refused: set[socket.socket] = set()

    def all_refused() -> bool:
        for client in select.select(clients, [], [], 0)[0]:
            if client not in refused and client.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 503":
                refused.add(client)
        return len(refused) >= 19

    wait_until(all_refused)
    # One is at work, a hundred wait.
    assert len(refused) == 19
    # Others are served meanwhile, and who did not choose by hand also coded.
    assert docs.get("/book.html").content == BOOK
    assert docs.get("/book.html", "zstd").headers["Content-Encoding"] == "zstd"
    for client in clients:
        client.close()
    # There is room for one at a time: all of these leave it.
    wait_until(lambda: docs.get("/book.html?compression=zstd").status_code == 200)


def test_what_there_is_no_room_to_code_is_sent_as_it_is(start_server: Callable[..., Server]) -> None:
    server = start_server(apps=("documents",), coded_copies="none", coding_memory="1 MiB")
    docs = Docs(server, "")
    text = Random(6).randbytes(8_000_000).hex().encode()
    docs.put("/long.txt", text)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        # It takes the beginning, and no more.
        client.sendall(b"GET /long.txt HTTP/1.1\r\nHost: x\r\nAccept-Encoding: zstd\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 200"
        plain = docs.get("/long.txt", "zstd")
        assert (plain.status_code, plain.headers.get("Content-Encoding")) == (200, None)
        assert plain.headers["Vary"] == "Accept-Encoding"
        assert plain.content == text
        assert docs.get("/long.txt", "zstd, identity;q=0").status_code == 503
    wait_until(lambda: docs.get("/long.txt", "zstd").headers.get("Content-Encoding") == "zstd")


def test_what_takes_long_is_sent_while_it_is_made(start_server: Callable[..., Server]) -> None:
    docs = Docs(start_server(apps=("documents",)), "")
    docs.put("/book.html", BOOK)
    answer = docs.get("/book.html?compression=zstd&level=17")
    assert answer.headers["Transfer-Encoding"] == "chunked"
    assert decode(answer) == BOOK
    head = docs.get("/book.html?compression=zstd&level=17", None, "HEAD")
    assert (head.status_code, head.headers["ETag"]) == (200, answer.headers["ETag"])


def test_a_client_that_has_the_version_before_gets_the_difference(start_server: Callable[..., Server]) -> None:
    docs = Docs(start_server(apps=("documents",)), "")
    use = 'match="/app/*", id="v1"'
    old, new = BOOK, BOOK[:700_000] + b"Something new." + BOOK[700_000:]
    docs.put("/app/book.html", old, Use_As_Dictionary=use)
    assert docs.get("/app/book.html").headers["Use-As-Dictionary"] == use
    digest = hashlib.sha256(old).digest()
    have = {"Available_Dictionary": f":{base64.b64encode(digest).decode()}:"}
    # The dictionary itself is no difference to itself.
    assert docs.get("/app/book.html", "zstd, dcz", **have).headers["Content-Encoding"] == "zstd"
    docs.put("/app/book.html", new, Use_As_Dictionary=use)
    for _ in range(2):
        answer = docs.get("/app/book.html", "gzip, zstd, dcz", **have)
        assert answer.headers["Content-Encoding"] == "dcz"
        assert answer.headers["Vary"] == "Accept-Encoding, Available-Dictionary"
        assert len(answer.content) < 1000
        # RFC 9842 5: a skippable frame with the dictionary's digest.
        assert answer.content[:8] == bytes([0x5E, 0x2A, 0x4D, 0x18, 0x20, 0, 0, 0])
        assert answer.content[8:40] == digest
        dictionary = zstandard.ZstdCompressionDict(old, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
        decoder = zstandard.ZstdDecompressor(dict_data=dictionary)
        assert decoder.decompressobj().decompress(answer.content[40:]) == new
    for unknown in (":AAAA:", f":{base64.b64encode(bytes(32)).decode()}:", "x", ":" + "A" * 5000, ":é:"):
        answer = docs.get("/app/book.html", "zstd, dcz", Available_Dictionary=unknown.encode().decode("latin-1"))
        assert (answer.status_code, answer.headers["Content-Encoding"]) == (200, "zstd")
    # Nobody gets dcz who has not asked for it by name.
    assert docs.get("/app/book.html", "*", **have).headers["Content-Encoding"] == "zstd"
    docs.delete("/app/book.html")
    docs.put("/app/book.html", new)
    assert docs.get("/app/book.html", "zstd, dcz", **have).headers["Content-Encoding"] == "zstd"


def test_the_copies_of_a_dictionary_go_with_it(start_server: Callable[..., Server]) -> None:
    server = start_server(apps=("documents",), coded_copies="first")
    docs = Docs(server, "")
    for number in range(6):
        docs.put("/a.html", PAGE + b"%d" % number, Use_As_Dictionary='match="/*"')
        docs.get("/a.html", "gzip")
        wait_until(lambda number=number: len(names(server, b"codings/")) == min(number + 1, 5))
    # The last, and four before it.
    assert len(names(server, b"dictionaries/")) == 5
    docs.delete("/a.html")
    assert not names(server, b"dictionaries/")
    assert not names(server, b"codings/")


def test_versions_that_come_at_once_leave_the_dictionaries_that_their_document_tells_of(tmp_path: Path) -> None:
    async def put_many() -> None:
        store, coders = open_store(f"local:{tmp_path / 'data'}"), Coders(1)
        codings = Codings(store, coders, 3, "none")

        async def put(number: int) -> None:
            async with store.incoming() as incoming:
                await incoming.write(b"%d" % number)
                facts = Facts(use='match="/*"')
                await replace_document(store, codings, document_name("a"), incoming, "text/plain", facts)

        try:
            await asyncio.gather(*map(put, range(20)))
            last = await store.record(document_name("a"))
            assert last is not None
            told = {last.digest, *msgspec.msgpack.decode(last.facts, type=Facts).versions}
            assert {record.digest for _, record in await store.scan(b"dictionaries/")} == told
            assert len(told) == 5
        finally:
            coders.close()
            await store.close()

    asyncio.run(put_many())


def test_the_zstd_program_decodes_a_difference(start_server: Callable[..., Server], tmp_path: Path) -> None:
    need("zstd", "zstd")
    docs = Docs(start_server(apps=("documents",)), "")
    docs.put("/a.html", BOOK, Use_As_Dictionary='match="/*"')
    docs.put("/b.html", BOOK[1000:] + b"new")
    digest = base64.b64encode(hashlib.sha256(BOOK).digest()).decode()
    coded = docs.get("/b.html", "dcz", Available_Dictionary=f":{digest}:").content
    (tmp_path / "dictionary").write_bytes(BOOK)
    # It skips the frame before by itself.
    command = ["zstd", "-dcq", f"--patch-from={tmp_path / 'dictionary'}"]
    assert subprocess.run(command, input=coded, capture_output=True, check=True).stdout == BOOK[1000:] + b"new"


def test_an_uploaded_svg_is_text_and_is_coded_and_locked_down(start_server: Callable[..., Server]) -> None:
    server = start_server(allowed_types="jpeg,svg")
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9">' + b"<rect/>" * 200 + b"</svg>"
    image = hashlib.md5(svg).hexdigest()
    server.upload(svg)
    root = Docs(server, "")
    for accept in ("gzip", "zstd", None):
        for _ in range(2):
            answer = root.get(f"/{image}?p=0", accept)
            assert (answer.status_code, decode(answer)) == (200, svg)
            assert answer.headers.get("Content-Encoding") == accept
            assert answer.headers["Vary"] == "Accept-Encoding"
            assert "sandbox" in answer.headers["Content-Security-Policy"]
        assert root.get(f"/{image}?p=0", accept, If_None_Match=answer.headers["ETag"]).status_code == 304
    server.http.delete(f"{server.url}/images/{image}")
    # One that was being made better in this moment comes, and goes again.
    wait_until(lambda: not names(server, b"codings/"))
    assert root.get(f"/{image}?p=0", "gzip").status_code == 404
