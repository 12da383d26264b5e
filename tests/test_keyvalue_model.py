"""Random requests in both dialects, with time passing, against a plain dictionary: on every backend."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import quote_from_bytes, unquote_to_bytes

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from uvimg.apps.keyvalue import KeyValue, KeyValueSettings
from uvimg.apps.values import INLINE_BYTES
from uvimg.coders import Coders
from uvimg.core.access import parse_rules
from uvimg.core.kyoto import decode_fields, encode_fields, read_coding
from uvimg.core.message import FilePart, Pieces, Request, Response
from uvimg.service import Service
from uvimg.store import Store, open_store

KEYS = [b"a", b"a\x01", b"a/b", b"ab", b"b", b"\xff", b"\xff\xff", b"z" * 400]
keys = st.sampled_from(KEYS)
# Inline, a blob in the database, a file; equal ones often.
values = st.builds(
    lambda letter, size: letter * size,
    st.sampled_from([b"x", b"\x00", b"\n"]),
    st.sampled_from([0, 1, 8, INLINE_BYTES, INLINE_BYTES + 1, 70_000]),
)
offsets = st.sampled_from([None, 0, 1, 2, 5])


def spell(key: bytes) -> str:
    return quote_from_bytes(key, safe="")


async def pieces_of(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), 50_000):
        yield data[at : at + 50_000]


class Machine(RuleBasedStateMachine):
    # One for all runs, which leave it empty: to make one takes longer than all that is done with it.
    runner: asyncio.Runner
    store: Store

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1_800_000_000
        # Key → value and the second from which it has expired.
        self.model: dict[bytes, tuple[bytes, int | None]] = {}
        everybody = parse_rules("allow all")
        chosen = KeyValueSettings("olegdb", 1 << 20, everybody, everybody, ())
        self.app = KeyValue(chosen, self.store, Coders(64 << 20), lambda: self.now_s)
        near = self.store.near
        self.service = Service(self.app, None, near.version if near is not None else lambda: 0)

    def teardown(self) -> None:
        for database in (b"db", b"dc", b"d"):
            self.runner.run(self.app.values.clear(database))

    # Asking

    def ask(self, method: str, target: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, str], bytes]:
        async def answer() -> tuple[int, dict[str, str], bytes]:
            fields = {name.replace("_", "-").lower(): value for name, value in headers.items()}
            request = Request(method, target, target, "", fields, "127.0.0.1", len(body), pieces_of(body))
            response = self.service.try_now(request) or await self.service.handle(request)
            return response.status, response.headers, await read(response)

        return self.runner.run(answer())

    def call(self, procedure: str, **arguments: bytes) -> dict[bytes, bytes] | None:
        fields = [(name.encode(), value) for name, value in {"DB": b"db", **arguments}.items()]
        kind = "text/tab-separated-values; colenc=U"
        status, headers, body = self.ask("POST", f"/rpc/{procedure}", encode_fields(fields, "U"), content_type=kind)
        assert status in (200, 450)
        return dict(decode_fields(body, read_coding(headers["Content-Type"]))) if status == 200 else None

    # What is

    def live(self) -> dict[bytes, bytes]:
        return {
            key: value
            for key, (value, expires_s) in sorted(self.model.items())
            if expires_s is None or expires_s > self.now_s
        }

    def expire(self, offset: int | None) -> int | None:
        return None if offset is None else self.now_s + offset

    # Rules

    @rule(key=keys, value=values, offset=offsets, mode=st.sampled_from(["set", "add", "replace"]))
    def put(self, key: bytes, value: bytes, offset: int | None, mode: str) -> None:
        told = {} if offset is None else {"X-OlegDB-use-by": str(self.now_s + offset)}
        status, _, _ = self.ask("PUT", f"/db/{spell(key)}", value, x_kt_mode=mode, **told)
        there = key in self.live()
        if mode == {True: "add", False: "replace"}[there]:
            assert status == 450
            return
        assert status == (200 if there else 201)
        self.model[key] = value, self.expire(offset)

    @rule(key=keys, value=values, data=st.data())
    def put_if(self, key: bytes, value: bytes, data: Any) -> None:
        _, headers, _ = self.ask("GET", f"/db/{spell(key)}")
        etag = headers.get("ETag", '"none"')
        name, tag = data.draw(st.sampled_from([("if_match", etag), ("if_match", '"x"'), ("if_none_match", "*")]))
        there = key in self.live()
        status, _, _ = self.ask("POST", f"/db/{spell(key)}", value, **{name: tag})
        if (there and tag == etag) or (not there and name == "if_none_match"):
            assert status == (200 if there else 201)
            self.model[key] = value, None
        else:
            assert status == 412

    @rule(key=keys)
    def delete(self, key: bytes) -> None:
        status, _, _ = self.ask("DELETE", f"/db/{spell(key)}")
        assert status == (200 if key in self.live() else 404)
        self.model.pop(key, None)

    @rule(key=keys)
    def get(self, key: bytes) -> None:
        status, headers, body = self.ask("GET", f"/db/{spell(key)}")
        if key not in self.live():
            assert status == 404
            return
        value, expires_s = self.model[key]
        assert (status, body) == (200, value)
        assert headers.get("Expires") == (None if expires_s is None else str(expires_s))

    @rule(key=keys, step=st.integers(-5, 5), offset=offsets)
    def increment(self, key: bytes, step: int, offset: int | None) -> None:
        told = {} if offset is None else {"xt": b"%d" % offset}
        answer = self.call("increment", key=key, num=b"%d" % step, **told)
        value = self.live().get(key, bytes(8))
        if len(value) != 8:
            assert answer is None
            return
        number = int.from_bytes(value, "big", signed=True) + step
        if not -(1 << 63) <= number < 1 << 63:
            assert answer is None
            return
        assert answer == {b"num": b"%d" % number}
        self.model[key] = number.to_bytes(8, "big", signed=True), self.expire(offset)

    @rule(key=keys, value=values)
    def append(self, key: bytes, value: bytes) -> None:
        assert self.call("append", key=key, value=value) == {}
        self.model[key] = self.live().get(key, b"") + value, None

    @rule(key=keys, old=values, new=st.none() | values)
    def compare_and_swap(self, key: bytes, old: bytes, new: bytes | None) -> None:
        answer = self.call("cas", key=key, oval=old, **({} if new is None else {"nval": new}))
        assert (answer is not None) == (self.live().get(key) == old)
        if answer is not None:
            del self.model[key]
            if new is not None:
                self.model[key] = new, None

    @rule(key=keys)
    def seize(self, key: bytes) -> None:
        answer = self.call("seize", key=key)
        assert (answer and answer[b"value"]) == self.live().get(key)
        self.model.pop(key, None)

    @rule(chosen=st.sets(keys), value=values)
    def set_bulk(self, chosen: set[bytes], value: bytes) -> None:
        fields = [(b"DB", b"db"), *((b"_" + key, value) for key in chosen)]
        kind = "text/tab-separated-values; colenc=U"
        assert self.ask("POST", "/rpc/set_bulk", encode_fields(fields, "U"), content_type=kind)[0] == 200
        self.model.update(dict.fromkeys(chosen, (value, None)))

    @rule(key=keys)
    def look_around(self, key: bytes) -> None:
        live = list(self.live())
        behind, before = [each for each in live if each > key], [each for each in live if each < key]
        for path, wanted in (
            (f"/db/{spell(key)}/_next", behind[:1]),
            (f"/db/{spell(key)}/_prev", before[-1:]),
            ("/db/_first", live[:1]),
            ("/db/_last", live[-1:]),
        ):
            status, headers, body = self.ask("GET", path)
            assert status == (200 if wanted else 404)
            if wanted:
                assert unquote_to_bytes(headers["X-Olegdb-Key"]) == wanted[0]
                assert body == self.live()[wanted[0]]

    @rule(prefix=st.sampled_from([b"", b"a", b"\xff", b"q"]), limit=st.integers(1, 9), after=keys | st.just(b""))
    def list_keys(self, prefix: bytes, limit: int, after: bytes) -> None:
        wanted = [key for key in self.live() if key.startswith(prefix) and key > after][:limit]
        target = f"/db/{spell(prefix)}/_match?limit={limit}&after={spell(after)}"
        status, headers, body = self.ask("GET", target)
        assert status == (200 if wanted else 404)
        if wanted:
            assert [unquote_to_bytes(line) for line in body.split(b"\n")] == wanted
            assert headers["X-Olegdb-Num-Matches"] == str(len(wanted))

    @rule(seconds=st.integers(1, 3))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds

    @rule()
    def squish(self) -> None:
        assert self.ask("POST", "/db/_squish")[0] == 200

    @initialize()
    def begin_with_another_database(self) -> None:
        assert self.ask("PUT", "/dc/a", b"not ours")[0] == 201
        assert self.ask("PUT", "/d/a", b"not ours either")[0] == 201

    @invariant()
    def counts_are_right(self) -> None:
        assert self.call("status") == {b"count": b"%d" % len(self.live())}


async def read(response: Response) -> bytes:
    body = response.body
    if isinstance(body, Pieces):
        return b"".join([piece async for piece in body.pieces])
    if isinstance(body, FilePart):
        with body.file as file:
            file.seek(body.start)
            return bytes(file.read(body.size))
    return body


@pytest.mark.parametrize("store_url", ["local", "memory", "redis", "redis+cluster"], indirect=True)
def test_random_requests_leave_what_a_dictionary_would_hold(store_url: str) -> None:
    # In memory where there is such a file system: nothing here is about a disk.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder, asyncio.Runner() as runner:

        async def start() -> Store:
            return open_store(f"local:{folder}/data" if store_url.startswith("local:") else store_url)

        store = runner.run(start())
        machine: Callable[[], Machine] = type("Machine", (Machine,), {"runner": runner, "store": store})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=int(os.environ.get("MODEL_EXAMPLES", "15")),
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
        runner.run(store.close())
