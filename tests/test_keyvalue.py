"""The tables of both dialects, row by row, through real sockets on every front-end; both on the same data."""

import asyncio
import base64
import contextlib
import gzip
import http.client
import random
import re
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import quote, quote_from_bytes, unquote_to_bytes

import pytest
import uvloop

from tests.conftest import FRONT_ENDS
from tests.wire_server import listening
from uvimg.apps.keyvalue import KeyValue, KeyValueSettings
from uvimg.apps.values import INLINE_BYTES
from uvimg.coders import Coders
from uvimg.core.access import parse_rules
from uvimg.core.keyvalue import Dialect
from uvimg.service import Service
from uvimg.store import open_store

EVERY_FRONT_END = True

MAX_BYTES = 1_200_000
# Inline, a blob in the database, a file; and what lies between them.
SIZES = (0, 1, INLINE_BYTES, INLINE_BYTES + 1, 65_536, 65_537, MAX_BYTES)
START_S = 1_800_000_000
STORED = "無駄".encode()
DIALECTS: tuple[Dialect, ...] = ("olegdb", "kyoto")


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def fields(self) -> dict[bytes, bytes]:
        """The lines of a procedure's answer, decoded."""
        coding = re.search(r"colenc=([UB])", self.headers["Content-Type"])
        decode = {"U": unquote_to_bytes, "B": base64.b64decode}[coding[1]] if coding else bytes
        return dict(tuple(map(decode, line.split(b"\t"))) for line in self.body.splitlines())  # type: ignore[misc]


class Place:
    """Both dialects on one store, behind one kind of front-end, in a thread of its own. `now_s` is its time."""

    def __init__(self, url: str, front_end: str, loop: str) -> None:
        self.now_s = START_S
        self._url, self._front_end = url, front_end
        self._make_loop = uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        self._connections = {dialect: self.connect(dialect) for dialect in DIALECTS}

    def connect(self, dialect: Dialect) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._ports[dialect], timeout=20)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self._make_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        store = self.store = open_store(self._url)
        assert store.near is not None
        everybody = parse_rules("allow all")
        self._ports = {}
        self.apps = {}
        for dialect in DIALECTS:
            settings = KeyValueSettings(dialect, MAX_BYTES, everybody, everybody, ())
            self.apps[dialect] = KeyValue(settings, store, Coders(64 << 20), lambda: self.now_s)
        async with (
            listening(self._front_end, Service(self.apps["olegdb"], None, store.near.version)) as olegdb,
            listening(self._front_end, Service(self.apps["kyoto"], None, store.near.version)) as kyoto,
        ):
            self._ports = {"olegdb": olegdb, "kyoto": kyoto}
            self._ready.set()
            await self._end.wait()
        await store.close()

    def stop(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def ask(self, method: str, path: str, body: Any = None, *, to: Dialect = "olegdb", **headers: str) -> Answer:
        connection = self._connections[to]
        told = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, told)
        answer = connection.getresponse()
        return Answer(answer.status, answer.headers, answer.read())

    def call(self, procedure: str, _coding: str = "B", /, **arguments: Any) -> Answer:
        """A procedure of Kyoto Tycoon's; `_DB` is DB."""
        encode = {"B": base64.b64encode, "U": lambda data: quote_from_bytes(data, safe="").encode(), "": bytes}[_coding]
        lines = []
        for name, value in arguments.items():
            data = value if isinstance(value, bytes) else str(value).encode()
            lines.append(encode(name.encode()) + b"\t" + encode(data))
        kind = "text/tab-separated-values" + (f"; colenc={_coding}" if _coding else "")
        return self.ask("POST", f"/rpc/{procedure}", b"\n".join(lines), Content_Type=kind)


@pytest.fixture(scope="module")
def shared_place(front_end: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    # Each backend behind one front-end: on a disk, most of the time would go by with waiting for it.
    url = "memory:"
    if tuple(front_end.values()) == FRONT_ENDS[0]:
        url = f"local:{tmp_path_factory.mktemp('values')}/data"
    place = Place(url, front_end["front_end"], front_end["loop"])
    yield place
    place.stop()


@pytest.fixture
def place(shared_place: Place) -> Iterator[Place]:
    """Empty, at the beginning of time."""
    shared_place.now_s = START_S
    yield shared_place
    for database in ("default", "db", "other"):
        assert shared_place.call("clear", DB=database).status == 200


def make_bytes(size: int) -> bytes:
    return random.Random(size).randbytes(size)


# OlegDB


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_a_write_creates_and_then_replaces(place: Place, method: str) -> None:
    first = place.ask(method, "/db/key", b"one", Content_Type="text/plain")
    assert (first.status, first.body) == (201, STORED)
    second = place.ask(method, "/db/key", b"two", Content_Type="text/csv")
    assert (second.status, second.body) == (200, STORED)
    found = place.ask("GET", "/db/key")
    assert (found.status, found.body, found.headers["Content-Type"]) == (200, b"two", "text/csv")
    assert found.headers["ETag"] == second.headers["ETag"] != first.headers["ETag"]


@pytest.mark.parametrize("size", SIZES)
def test_values_of_every_size_come_back_in_one_piece_and_from_chunks(place: Place, size: int) -> None:
    data = make_bytes(size)
    pieces = (data[at : at + 65_000] for at in range(0, size, 65_000))
    assert place.ask("PUT", "/db/declared", data).status == 201
    assert place.ask("PUT", "/db/chunked", pieces).status == 201
    for path in ("/db/declared", "/db/chunked"):
        assert place.ask("GET", path).body == data
        head = place.ask("HEAD", path)
        assert (head.status, head.headers["Content-Length"], head.body) == (200, str(size), b"")
        assert head.headers["Content-Type"] == "application/octet-stream"
    assert place.call("get", key="declared", DB="db").fields[b"value"] == data


def test_a_value_that_is_too_large_is_not_stored(place: Place) -> None:
    data = bytes(MAX_BYTES + 1)
    place.ask("PUT", "/db/key", b"before")
    for body in (data, (data[at : at + 65_000] for at in range(0, len(data), 65_000))):
        connection = place.connect("olegdb")
        # The answer may come, and the connection go, before all of it is sent.
        with contextlib.suppress(OSError):
            connection.request("PUT", "/db/key", body)
        assert connection.getresponse().status == 413
        connection.close()
    assert place.ask("GET", "/db/key").body == b"before"
    assert place.ask("GET", "/db/_all").body == b"key"


@pytest.mark.parametrize("key", [b"a/b", b"\xff\x01\n", b" ", b"%", "無駄".encode(), b"_next_", b"k" * 400])
def test_keys_are_any_bytes(place: Place, key: bytes) -> None:
    path = f"/db/{quote_from_bytes(key, safe='')}"
    assert place.ask("PUT", path, b"value").status == 201
    assert place.ask("GET", path).body == b"value"
    first = place.ask("GET", "/db/_first")
    assert unquote_to_bytes(first.headers["X-Olegdb-Key"].encode("latin-1")) == key
    listed = place.ask("GET", "/db/_all").body
    assert b"\n" not in listed
    assert unquote_to_bytes(listed) == key
    assert place.ask("POST", "/db/_bulk_unjar", listed).body == b"00000005value"
    assert place.call("match_prefix", prefix=key, DB="db").fields == {b"_" + key: b"0", b"num": b"1"}
    assert place.ask("GET", f"{path}/_info").headers["X-Olegdb-Rcrd-Cnt"] == "1"


@pytest.mark.parametrize(
    ("method", "path", "told"),
    [
        ("PUT", "/db/" + "k" * 401, "400 bytes"),
        ("GET", "/db/" + "%ff" * 401, "400 bytes"),
        ("PUT", "/db/", "1 to 400"),
        ("PUT", "/db/a%00b", "no NUL"),
        ("PUT", "/" + "d" * 101 + "/key", "database has 1 to 100"),
        ("PUT", "/a%2Fb/key", "no slash"),
        ("PUT", "/rpc/x/_first", "slash in a key is written %2F"),
        ("PUT", "/_all/key", "cannot be a database"),
        ("PUT", "/db/a/b", "written %2F"),
        ("PUT", "/db/_all", "_all is the name of an operation"),
        ("POST", "/db/_first", "name of an operation"),
        ("POST", "/db/%5Ffirst", "name of an operation"),
        ("PUT", "/_next", "name of an operation"),
        ("GET", "/db/_all?limit=0", "limit"),
        ("GET", "/db/x/_match?limit=x", "limit"),
        ("GET", "/db/_all?after=" + "k" * 401, "after"),
    ],
)
def test_what_is_no_key_is_refused_and_nothing_is_stored(place: Place, method: str, path: str, told: str) -> None:
    answer = place.ask(method, path, b"value" if method != "GET" else None)
    assert answer.status == 400, answer
    assert told in answer.body.decode()
    assert place.call("report").fields[b"db_total_count"] == b"0"


def test_a_method_that_is_not_for_a_path_is_405_with_those_that_are(place: Place) -> None:
    for method, path, allow in (
        ("PATCH", "/db/key", "GET, HEAD, PUT, DELETE, POST, OPTIONS"),
        ("DELETE", "/db/_all", "GET, HEAD, OPTIONS"),
        ("GET", "/db/_squish", "POST, OPTIONS"),
        ("PUT", "/db/key/_next", "GET, HEAD, OPTIONS"),
        ("GET", "/rpc/void", "POST, OPTIONS"),
    ):
        answer = place.ask(method, path)
        assert (answer.status, answer.headers["Allow"]) == (405, allow)
        options = place.ask("OPTIONS", path)
        assert (options.status, options.headers["Allow"]) == (204, allow)
    assert place.ask("BREW", "/db/key").status == 501
    assert place.ask("GET", "/").status == 404


def test_what_is_missing_is_404_with_olegdbs_words(place: Place) -> None:
    for method, path, told in (
        ("GET", "/db/key", "These aren't your ghosts."),
        ("DELETE", "/db/key", "These aren't your ghosts."),
        ("GET", "/db/_first", "No records found"),
        ("GET", "/db/_last", "No records found"),
        ("GET", "/db/key/_next", "No records found"),
        ("GET", "/db/key/_prev", "No records found"),
        ("GET", "/db/key/_match", "No matches found"),
        ("GET", "/db/_all", "No matches found"),
        ("GET", "/db/key/_info", "Key not found in database"),
    ):
        answer = place.ask(method, path)
        assert (answer.status, answer.body.decode()) == (404, told)
    assert place.ask("HEAD", "/db/key").status == 404


def test_a_deleted_key_is_gone(place: Place) -> None:
    place.ask("PUT", "/db/key", b"value")
    place.ask("GET", "/db/key")
    place.ask("GET", "/db/key")
    deleted = place.ask("DELETE", "/db/key")
    assert (deleted.status, deleted.body) == (200, b"Key deleted successfully!")
    assert place.ask("GET", "/db/key").status == 404


def test_one_segment_is_a_key_of_the_database_default(place: Place) -> None:
    place.ask("PUT", "/test", b"value")
    assert place.ask("GET", "/default/test").body == b"value"
    assert place.ask("GET", "/_first").headers["X-Olegdb-Key"] == "test"
    assert place.ask("GET", "/tes/_match").body == b"test"
    assert place.ask("GET", "/db/test").status == 404


def test_cursors_go_in_byte_order_from_keys_that_need_not_be_there(place: Place) -> None:
    keys = [b"a", b"a\x01", b"ab", b"b", b"\xff"]
    for key in keys:
        place.ask("PUT", f"/db/{quote_from_bytes(key, safe='')}", key)
        place.ask("PUT", f"/other/{quote_from_bytes(key, safe='')}x", b"not ours")

    def look(path: str) -> bytes | None:
        answer = place.ask("GET", path)
        if answer.status == 404:
            return None
        assert unquote_to_bytes(answer.headers["X-Olegdb-Key"].encode("latin-1")) == answer.body
        return answer.body

    assert (look("/db/_first"), look("/db/_last")) == (b"a", b"\xff")
    forward = [look(f"/db/{quote_from_bytes(key, safe='')}/_next") for key in keys]
    assert forward == [*keys[1:], None]
    back = [look(f"/db/{quote_from_bytes(key, safe='')}/_prev") for key in keys]
    assert back == [None, *keys[:-1]]
    assert (look("/db/aa/_next"), look("/db/aa/_prev")) == (b"ab", b"a\x01")
    assert place.ask("HEAD", "/db/_first").headers["X-Olegdb-Key"] == "a"


def test_matches_are_listed_in_order_and_in_pages(place: Place) -> None:
    for number in range(30):
        place.ask("PUT", f"/db/k{number:02}", b"")
    place.ask("PUT", "/db/j", b"")
    place.ask("PUT", "/db/l", b"")
    wanted = [f"k{number:02}" for number in range(30)]
    answer = place.ask("GET", "/db/k/_match")
    assert answer.headers["X-Olegdb-Num-Matches"] == "30"
    assert answer.body.decode().split("\n") == wanted
    found: list[str] = []
    while (page := place.ask("GET", f"/db/k/_match?limit=7&after={found[-1] if found else ''}")).status == 200:
        found += page.body.decode().split("\n")
    assert found == wanted
    everything = place.ask("GET", "/db/_all")
    assert everything.body.decode().split("\n") == ["j", *wanted, "l"]
    assert everything.headers["X-Olegdb-Num-Matches"] == "32"
    assert place.ask("GET", "/db/_all?limit=2").body == b"j\nk00"
    assert place.ask("GET", "/db/_all?after=k29").body == b"l"


def test_a_long_listing_is_streamed_whole(place: Place) -> None:
    keys = [b"key %05d" % number for number in range(5000)]
    for start in range(0, 5000, 1000):
        place.call("set_bulk", DB="db", **{f"_{key.decode()}": b"" for key in keys[start : start + 1000]})
    for path, wanted in (
        ("/db/_all", keys),
        ("/db/key%200/_match", keys),
        ("/db/_all?limit=1500", keys[:1500]),
        ("/db/_all?after=key+00999", keys[1000:]),
    ):
        answer = place.ask("GET", path)
        assert answer.headers["Transfer-Encoding"] == "chunked"
        assert answer.headers["X-Olegdb-Num-Matches"] == str(len(wanted))
        assert answer.body == b"\n".join(wanted)
    assert place.ask("HEAD", "/db/_all").body == b""
    matched = place.call("match_prefix", prefix="key", DB="db")
    assert matched.fields[b"num"] == b"5000"
    assert list(matched.fields)[:-1] == [b"_" + key for key in keys]
    # To HTTP/1.0, which knows no chunks, it ends with the connection.
    connection = place.connect("olegdb")
    connection._http_vsn, connection._http_vsn_str = 10, "HTTP/1.0"  # type: ignore[attr-defined]
    connection.request("GET", "/db/_all")
    old = connection.getresponse()
    assert old.headers["Transfer-Encoding"] is None
    assert old.read() == b"\n".join(keys)
    connection.close()


def test_many_values_at_once_come_with_their_lengths(place: Place) -> None:
    place.ask("PUT", "/db/small", b"a\x00b")
    place.ask("PUT", "/db/empty", b"")
    place.ask("PUT", "/db/large", make_bytes(1_100_000))
    answer = place.ask("POST", "/db/_bulk_unjar", b"small\nnone\nempty\n_all\nlarge\n" + b"k" * 500)
    assert answer.status == 200
    wanted = [b"00000003a\x00b", b"00000000", b"00000000", b"00000000", b"01100000" + make_bytes(1_100_000)]
    assert answer.body == b"".join([*wanted, b"00000000"])
    assert place.ask("POST", "/db/_bulk_unjar", b"").body == b""
    assert place.ask("POST", "/db/_bulk_unjar", b"\n" * 200_000).status == 413


def test_info_counts_and_uptime_is_seconds(place: Place) -> None:
    for number in range(3):
        place.ask("PUT", f"/db/{number}", b"", X_OlegDB_use_by=str(START_S + 100))
    info = place.ask("GET", "/db/1/_info")
    assert (info.headers["X-Olegdb-Rcrd-Cnt"], info.headers["Expires"]) == ("3", str(START_S + 100))
    assert place.ask("GET", "/db/_uptime").body.isdigit()
    assert place.ask("GET", "/_uptime").status == 200


# Expiry


def test_an_expired_record_is_seen_by_nobody(place: Place) -> None:
    place.ask("PUT", "/db/a", b"1", X_OlegDB_use_by=str(START_S + 10))
    place.ask("PUT", "/db/b", b"2", X_Kt_Xt="-10")
    place.ask("PUT", "/db/c", b"3", X_Kt_Xt=str(START_S + 11))
    place.ask("PUT", "/db/d", b"4")
    for path in ("/db/a", "/db/b"):
        for method in ("GET", "HEAD"):
            found = place.ask(method, path)
            assert (found.status, found.headers["Expires"]) == (200, str(START_S + 10))
            assert found.headers["X-Kt-Xt"] == "Fri, 15 Jan 2027 08:00:10 GMT"
    # Asked for often enough that it would be kept.
    assert [place.ask("GET", "/db/a").status for _ in range(4)] == [200] * 4
    place.now_s += 9
    assert place.ask("GET", "/db/a").status == 200
    place.now_s += 1
    for path in ("/db/a", "/db/b"):
        assert [place.ask(method, path).status for method in ("GET", "HEAD", "DELETE")] == [404] * 3
        assert place.ask("GET", f"{path}/_info").status == 404
    assert place.ask("GET", "/db/_first").headers["X-Olegdb-Key"] == "c"
    assert place.ask("GET", "/db/a/_next").headers["X-Olegdb-Key"] == "c"
    assert place.ask("GET", "/db/c/_prev").status == 404
    place.now_s += 1
    assert place.ask("GET", "/db/_all").body == b"d"
    assert place.ask("GET", "/db/c/_match").status == 404
    assert place.ask("GET", "/db/d/_info").headers["X-Olegdb-Rcrd-Cnt"] == "1"
    assert place.ask("POST", "/db/_bulk_unjar", b"a\nd").body == b"00000000000000014"
    assert place.call("get_bulk", DB="db", _a="", _d="").fields == {b"_d": b"4", b"num": b"1"}
    assert place.call("match_prefix", DB="db", prefix="").fields == {b"_d": b"0", b"num": b"1"}
    assert place.call("status", DB="db").fields == {b"count": b"1"}
    assert place.ask("POST", "/db/_squish").status == 200
    assert place.ask("PUT", "/db/a", b"new").status == 201
    assert place.ask("GET", "/db/a").headers["Expires"] is None


def test_a_time_in_the_past_is_gone_at_once(place: Place) -> None:
    place.ask("PUT", "/db/key", b"before")
    gone = place.ask("PUT", "/db/key", b"value", X_OlegDB_use_by=str(START_S))
    assert gone.status == 200
    assert place.ask("GET", "/db/key").status == 404
    assert place.ask("PUT", "/db/key", b"value", X_OlegDB_use_by="0").status == 201
    assert place.ask("GET", "/db/_all").status == 404


def test_a_malformed_time_is_refused_in_olegdbs_words_and_nothing_is_stored(place: Place) -> None:
    for text in ("", "soon", "1.5", "--5", "+5", "99999999999999999999", "999999999999", "1e3"):
        for name in ("X-OlegDB-use-by", "X-Kt-Xt"):
            answer = place.ask("PUT", "/db/key", b"value", **{name: text})
            assert (answer.status, answer.body) == (400, b"The expiration format is wrong!")
    assert place.ask("GET", "/db/key").status == 404


# Conditions


def test_writes_and_removals_hold_to_their_conditions(place: Place) -> None:
    assert place.ask("PUT", "/db/key", b"0", If_Match="*").status == 412
    assert place.ask("DELETE", "/db/key", If_Match='"x"').status == 412
    first = place.ask("PUT", "/db/key", b"1", If_None_Match="*")
    assert first.status == 201
    refused = place.ask("POST", "/db/key", b"2", If_None_Match="*")
    assert (refused.status, refused.headers["ETag"]) == (412, first.headers["ETag"])
    assert place.ask("PUT", "/db/key", b"2", If_Match='"nonsense"').status == 412
    assert place.ask("DELETE", "/db/key", If_Match='"nonsense"').status == 412
    assert place.ask("GET", "/db/key").body == b"1"
    second = place.ask("PUT", "/db/key", b"2", If_Match=first.headers["ETag"])
    assert second.status == 200
    assert place.ask("PUT", "/db/key", b"3", If_Match=first.headers["ETag"]).status == 412
    assert place.ask("PUT", "/db/key", b"3", If_Match=f"W/{second.headers['ETag']}").status == 412
    assert place.ask("DELETE", "/db/key", If_Match=second.headers["ETag"]).status == 200


def test_reads_hold_to_their_conditions_and_ranges(place: Place) -> None:
    for size in (100, 200_000):
        data = make_bytes(size)
        etag = place.ask("PUT", "/db/key", data).headers["ETag"]
        assert re.fullmatch(r'"[0-9a-f]{32}"', etag)
        unchanged = place.ask("GET", "/db/key", If_None_Match=etag)
        assert (unchanged.status, unchanged.body, unchanged.headers["ETag"]) == (304, b"", etag)
        assert place.ask("GET", "/db/key", If_Match='"other"').status == 412
        part = place.ask("GET", "/db/key", Range="bytes=10-19")
        assert (part.status, part.body) == (206, data[10:20])
        assert part.headers["Content-Range"] == f"bytes 10-19/{size}"
        assert place.ask("GET", "/db/key", Range=f"bytes={size}-").status == 416


def test_a_write_of_a_part_or_of_a_coded_value_is_refused(place: Place) -> None:
    assert place.ask("PUT", "/db/key", b"v", Content_Range="bytes 0-0/9").status == 400
    assert place.ask("PUT", "/db/key", b"v", Content_Encoding="gzip").status == 415
    assert place.ask("GET", "/db/key").status == 404
    assert place.ask("PUT", "/db/key", b"v", Content_Encoding="identity").status == 201


def test_text_is_coded_whatever_its_length(place: Place) -> None:
    for size in (10_000, 300_000, MAX_BYTES):
        text = (b"".join(b"line %d of a text\n" % number for number in range(size // 15)))[:size]
        plain = place.ask("PUT", "/db/key", text, Content_Type="text/plain").headers["ETag"]
        found = place.ask("GET", "/db/key", Accept_Encoding="gzip")
        assert (found.status, found.headers["Content-Encoding"]) == (200, "gzip")
        assert gzip.decompress(found.body) == text
        assert len(found.body) < size / 4
        assert found.headers["ETag"] != plain
        assert found.headers["Vary"] == "Accept-Encoding"
        unchanged = place.ask("GET", "/db/key", Accept_Encoding="gzip", If_None_Match=found.headers["ETag"])
        assert (unchanged.status, unchanged.body) == (304, b"")
        head = place.ask("HEAD", "/db/key", Accept_Encoding="gzip")
        assert (head.status, head.headers["ETag"], head.body) == (200, found.headers["ETag"], b"")
        assert place.ask("GET", "/db/key").body == text
        part = place.ask("GET", "/db/key", Accept_Encoding="identity", Range="bytes=10-19")
        assert (part.status, part.body) == (206, text[10:20])
        assert place.ask("GET", "/db/key", Accept_Encoding="identity;q=0, x").status == 406
    # What is no text stays as it is.
    place.ask("PUT", "/db/key", text, Content_Type="image/jpeg")
    assert "Content-Encoding" not in place.ask("GET", "/db/key", Accept_Encoding="gzip").headers


def test_the_etag_of_a_coded_answer_is_good_for_a_compare_and_set(place: Place) -> None:
    place.ask("PUT", "/db/key", b"text " * 1000, Content_Type="text/plain")
    coded = place.ask("GET", "/db/key", Accept_Encoding="gzip")
    assert coded.headers["Content-Encoding"] == "gzip"
    etag = coded.headers["ETag"]
    assert place.ask("PUT", "/db/key", b"", If_None_Match=etag).status == 412
    assert place.ask("PUT", "/db/key", b"", If_Match=f"W/{etag}").status == 412
    assert place.ask("PUT", "/db/key", b"new", If_Match=etag).status == 200
    assert place.ask("DELETE", "/db/key", If_Match=etag).status == 412


def test_a_page_whose_name_was_bent_to_this_machine_cannot_write(place: Place) -> None:
    bent = {"Host": "evil.example:8080", "Origin": "http://evil.example:8080"}
    assert place.ask("POST", "/db/key", b"value", **bent).status == 403
    assert place.ask("POST", "/rpc/clear", b"", **bent).status == 403
    assert place.ask("GET", "/db/key").status == 404
    # A client that is no browser may call the machine by any name.
    assert place.ask("PUT", "/db/key", b"value", Host="values.example").status == 201
    own = {"Host": "127.0.0.1:8080", "Origin": "http://127.0.0.1:8080"}
    assert place.ask("PUT", "/db/key", b"value", **own).status == 200


def test_a_page_of_another_site_cannot_write(place: Place) -> None:
    elsewhere = {"Origin": "http://evil.example", "Sec_Fetch_Site": "cross-site"}
    assert place.ask("POST", "/db/key", b"value", **elsewhere).status == 403
    assert place.ask("POST", "/rpc/clear", b"", **elsewhere).status == 403
    assert place.ask("GET", "/db/key").status == 404


def test_a_value_that_a_browser_would_run_is_locked_down(place: Place) -> None:
    for kind, locked in (("text/html", True), ("image/svg+xml", True), ("text/plain", False), ("image/png", False)):
        place.ask("PUT", "/db/key", b"<script>", Content_Type=kind)
        found = place.ask("GET", "/db/key")
        assert ("sandbox" in found.headers.get("Content-Security-Policy", "")) == locked
        assert found.headers["X-Content-Type-Options"] == "nosniff"
    assert place.ask("PUT", "/db/key", b"", Content_Type="x" * 300).status == 400


# Kyoto Tycoon


def test_kyotos_dialect_differs_in_what_it_answers_to_put_post_and_delete(place: Place) -> None:
    for status in (201, 201):
        put = place.ask("PUT", "/db/key", b"value", to="kyoto")
        assert (put.status, put.body) == (status, b"")
    assert place.ask("POST", "/db/key", b"value", to="kyoto").status == 501
    assert place.ask("GET", "/db/key", to="kyoto").body == b"value"
    removed = place.ask("DELETE", "/db/key", to="kyoto")
    assert (removed.status, removed.body) == (204, b"")
    assert place.ask("DELETE", "/db/key", to="kyoto").status == 404
    assert place.ask("GET", "/db/key", to="kyoto").status == 404


def test_both_dialects_see_each_others_writes_at_once(place: Place) -> None:
    for number in range(5):
        place.ask("PUT", "/db/key", b"%d" % number, to=DIALECTS[number % 2])
        for dialect in DIALECTS:
            # Twice and more, so that it would be kept.
            assert [place.ask("GET", "/db/key", to=dialect).body for _ in range(3)] == [b"%d" % number] * 3
    assert place.ask("GET", "/db/_all", to="kyoto").body == b"key"
    assert place.ask("POST", "/rpc/void", to="kyoto").status == 200


def test_modes_add_and_replace(place: Place) -> None:
    assert place.ask("PUT", "/db/key", b"0", X_Kt_Mode="replace").status == 450
    assert place.ask("PUT", "/db/key", b"1", X_Kt_Mode="add").status == 201
    assert place.ask("PUT", "/db/key", b"2", X_Kt_Mode="add", to="kyoto").status == 450
    assert place.ask("GET", "/db/key").body == b"1"
    assert place.ask("PUT", "/db/key", b"3", X_Kt_Mode="replace").status == 200
    assert place.ask("PUT", "/db/key", b"3", X_Kt_Mode="set").status == 200
    assert place.ask("PUT", "/db/key", b"3", X_Kt_Mode="append").status == 400


def refused(answer: Answer, status: int = 450) -> bool:
    return answer.status == status and answer.body.startswith(b"ERROR\t") and answer.body.endswith(b"\n")


@pytest.mark.parametrize("coding", ["", "U", "B"])
def test_procedures_take_and_give_their_columns_encoded(place: Place, coding: str) -> None:
    assert place.call("echo", coding, a="1", b="x y%").fields == {b"a": b"1", b"b": b"x y%"}
    value = b"plain % value" if not coding else b"\x00\t\n\xff%"
    assert place.call("set", coding, key="key", value=value).status == 200
    assert place.call("get", coding, key="key").fields == {b"value": value}
    assert place.ask("GET", "/key").body == value


def test_void_report_status_vacuum_and_synchronize(place: Place) -> None:
    assert (place.call("void").status, place.call("void").body) == (200, b"")
    place.call("set", key="key", value="value", DB="db")
    assert place.call("report").fields[b"db_total_count"] == b"1"
    assert place.call("status", DB="db").fields == {b"count": b"1"}
    assert place.call("status").fields == {b"count": b"0"}
    assert place.call("vacuum").status == 200
    assert place.call("synchronize", hard="").status == 200
    assert place.call("clear", DB="db").status == 200
    assert place.call("status", DB="db").fields == {b"count": b"0"}


def test_add_replace_remove_get_check_and_seize(place: Place) -> None:
    assert refused(place.call("replace", key="k", value="0"))
    assert place.call("add", key="k", value="1", xt=100).status == 200
    assert refused(place.call("add", key="k", value="2"))
    expiry = {b"xt": b"%d" % (START_S + 100)}
    assert place.call("get", key="k").fields == {b"value": b"1", **expiry}
    assert place.call("check", key="k").fields == {b"vsiz": b"1", **expiry}
    assert place.call("replace", key="k", value="three", xt=-(START_S + 5)).status == 200
    assert place.call("check", key="k").fields == {b"vsiz": b"5", b"xt": b"%d" % (START_S + 5)}
    assert place.call("seize", key="k").fields[b"value"] == b"three"
    for procedure in ("seize", "get", "check", "remove"):
        assert refused(place.call(procedure, key="k"))
    large = make_bytes(100_000)
    place.ask("PUT", "/k", large)
    assert place.call("seize", key="k").fields == {b"value": large}
    assert place.ask("GET", "/k").status == 404
    place.call("set", key="k", value="v")
    assert place.call("remove", key="k").status == 200


def test_append_grows_a_value_over_every_bound(place: Place) -> None:
    whole = b""
    for size in (10, INLINE_BYTES, 30_000, 60_000, 10):
        place.call("append", key="k", value=make_bytes(size))
        whole += make_bytes(size)
        assert place.ask("GET", "/k").body == whole


def test_increments_count_as_kyoto_tycoon_counts(place: Place) -> None:
    assert place.call("increment", key="n", num=5).fields == {b"num": b"5"}
    assert place.call("increment", key="n", num=-8).fields == {b"num": b"-3"}
    assert place.ask("GET", "/n").body == (-3).to_bytes(8, "big", signed=True)
    assert place.call("increment", key="m", num=1, orig=41).fields == {b"num": b"42"}
    assert place.call("increment", key="s", num=7, orig="set").fields == {b"num": b"7"}
    assert refused(place.call("increment", key="t", num=7, orig="try"))
    assert place.call("increment_double", key="d", num="1.25").fields == {b"num": b"1.250000"}
    assert place.call("increment_double", key="d", num="-2.5").fields == {b"num": b"-1.250000"}
    assert place.call("increment_double", key="d", num="0.05").fields == {b"num": b"-1.200000"}
    place.call("set", key="text", value="5")
    assert refused(place.call("increment", key="text", num=1))
    assert refused(place.call("increment_double", key="n", num=1))
    place.call("increment", key="top", num=2**63 - 1)
    assert refused(place.call("increment", key="top", num=1))
    assert place.call("increment", key="top", num=0).fields == {b"num": b"%d" % (2**63 - 1)}


def test_compare_and_swap(place: Place) -> None:
    large = make_bytes(100_000)
    assert refused(place.call("cas", key="k", oval="x", nval="1"))
    assert place.call("cas", key="k", nval="1").status == 200
    assert refused(place.call("cas", key="k", nval="2"))
    assert refused(place.call("cas", key="k", oval="2", nval="3"))
    assert place.call("cas", key="k", oval="1", nval=large).status == 200
    assert place.ask("GET", "/k").body == large
    assert place.call("cas", key="k", oval=large).status == 200
    assert place.ask("GET", "/k").status == 404


@pytest.mark.parametrize("atomic", [{}, {"atomic": ""}])
def test_bulks(place: Place, atomic: dict[str, str]) -> None:
    values = {f"_{number:04}": b"%d" % number for number in range(1500)}
    assert place.call("set_bulk", DB="db", xt=50, **values, **atomic).fields == {b"num": b"1500"}
    found = place.call("get_bulk", DB="db", _0007="", _1499="", _none="")
    assert found.fields == {b"_0007": b"7", b"_1499": b"1499", b"num": b"2"}
    assert place.call("match_prefix", DB="db", prefix="000", max=3).fields == {
        b"_0000": b"0",
        b"_0001": b"1",
        b"_0002": b"2",
        b"num": b"3",
    }
    assert place.call("match_prefix", DB="db", prefix="none").fields == {b"num": b"0"}
    assert place.call("remove_bulk", DB="db", _none="", **values, **atomic).fields == {b"num": b"1500"}
    assert place.call("status", DB="db").fields == {b"count": b"0"}


def test_bulks_hold_large_values_too(place: Place) -> None:
    large, small = make_bytes(1_100_000), make_bytes(10)
    assert place.call("set_bulk", _large=large, _small=small).fields == {b"num": b"2"}
    assert place.call("get_bulk", _large="", _none="", _small="").fields == {
        b"_large": large,
        b"_small": small,
        b"num": b"2",
    }
    assert refused(place.call("set_bulk", atomic="", _large=large), 400)


@pytest.mark.parametrize(
    ("procedure", "body", "status"),
    [
        ("set", b"key\tk", 400),
        ("set", b"value\tv", 400),
        ("set", b"key\tk\tv\nvalue\tv", 400),
        ("set", b"key k", 400),
        ("set", b"key\t\nvalue\tv", 400),
        ("set", b"key\t_all\nvalue\tv", 400),
        ("set", b"key\tk\nvalue\tv\nDB\ta/b", 400),
        ("set", b"key\tk\nvalue\tv\nxt\tsoon", 400),
        ("increment", b"key\tk\nnum\t1.5", 400),
        ("increment", b"key\tk\nnum\t" + b"9" * 20, 400),
        ("increment", b"key\tk\nnum\t1\norig\tx", 400),
        ("increment_double", b"key\tk\nnum\tnan", 400),
        ("increment_double", b"key\tk\nnum\t1e99", 400),
        ("set_bulk", b"_\tv", 400),
        ("match_prefix", b"", 400),
        ("nonsense", b"", 501),
        ("_write", b"", 501),
        ("play_script", b"", 501),
        ("echo", b"a\n" * 200_000, 413),
        ("set", b"key\tk\nvalue\t" + bytes(9_000_000), 413),
    ],
)
def test_bad_arguments_are_refused_in_kyotos_form_and_nothing_is_stored(
    place: Place, procedure: str, body: bytes, status: int
) -> None:
    answer = place.ask("POST", f"/rpc/{procedure}", body)
    assert refused(answer, status), answer
    assert place.call("report").fields[b"db_total_count"] == b"0"


def test_bad_encodings_are_refused(place: Place) -> None:
    kind = "text/tab-separated-values; colenc="
    assert refused(place.ask("POST", "/rpc/echo", b"a*\tb", Content_Type=f"{kind}B"), 400)
    assert refused(place.ask("POST", "/rpc/echo", b"a\tb", Content_Type=f"{kind}Q"), 400)
    assert refused(place.ask("POST", "/rpc/echo", b"a\t%4x", Content_Type=f"{kind}U"), 400)


def test_increments_and_compare_and_set_by_many_at_once_lose_none(place: Place) -> None:
    def count() -> None:
        connection = place.connect("olegdb")
        for _ in range(10):
            connection.request("POST", "/rpc/increment", b"key\tn\nnum\t1")
            assert connection.getresponse().read()
            while True:
                connection.request("GET", "/cas")
                found = connection.getresponse()
                data = found.read()
                number = int(data) if found.status == 200 else 0
                condition = {"If-Match": found.headers["ETag"]} if found.status == 200 else {"If-None-Match": "*"}
                connection.request("PUT", "/cas", b"%d" % (number + 1), condition)
                answer = connection.getresponse()
                answer.read()
                if answer.status != 412:
                    break
        connection.close()

    threads = [threading.Thread(target=count) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert place.call("increment", key="n", num=0).fields == {b"num": b"50"}
    assert place.ask("GET", "/cas").body == b"50"


def test_a_target_in_absolute_form_is_the_same_key(place: Place) -> None:
    place.ask("PUT", "http://127.0.0.1/db/a%2Fb", b"value")
    assert place.ask("GET", f"/db/{quote('a/b', safe='')}").body == b"value"
