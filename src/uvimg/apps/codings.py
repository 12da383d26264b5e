"""Coded copies of what is in the store: looked up, made while they are sent, kept, and made better when nobody waits.

The first copy that was made for a client is kept under the digest of what it is a copy of, and queued to be made
again with all effort. From then on an answer is a stored blob like any other, and nothing is coded for it.
Copies may be lost: they are made again. They go with the last name of what they are copies of.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from uvimg.apps.renditions import find_bytes
from uvimg.apps.streaming import stream_blob
from uvimg.coders import AT_ONCE_BYTES, OFFERED, Coded, Coders, close, code_now, size_of
from uvimg.core.address import Digest
from uvimg.core.coding import BEST, QUICK, Coding, Forced, coding_name, codings_prefix, is_worth_coding
from uvimg.core.dictionary import MAX_BYTES, MOST_VERSIONS, dictionary_name, parse_available
from uvimg.core.errors import NotAcceptable, NotImplementedHere, Overloaded, RangeNotSatisfiable, UvimgError
from uvimg.core.message import Content, FilePart, Pieces, Request, Response
from uvimg.core.negotiate import (
    Failed,
    NotModified,
    Part,
    Unsatisfiable,
    Whole,
    choose_answer,
    choose_coding,
    find_held,
    http_date,
    name_etag,
)
from uvimg.store import Incoming, Near, Record, Store

log = logging.getLogger("uvimg.codings")

Keep = Literal["none", "first", "best"]

# Copies that wait to be made better; more are queued when they are asked for again.
_MOST_WANTED = 1000
# Nobody would wait for more than minutes, not even nobody.
_LARGEST_IMPROVED = 256 << 20

_encode_level = msgspec.msgpack.Encoder().encode
_decode_level = msgspec.msgpack.Decoder(int).decode


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a representation is to be coded. A level of None is ours to choose, and one that is kept is as good."""

    coding: Coding
    level: int | None = None
    dictionary: Digest | None = None

    @property
    def kind(self) -> str:
        """What tells copies of one blob apart."""
        return self.coding if self.dictionary is None else f"{self.coding}-{self.dictionary.hex()[:16]}"


PLAIN = Wanted("identity")


class Codings:
    """The copies of one store. `level` is zstd's while a client waits."""

    def __init__(self, store: Store, coders: Coders, level: int, keep: Keep) -> None:
        self._store, self.coders, self._keep = store, coders, keep
        self._quick = {**QUICK, "zstd": level}
        self._tasks: set[asyncio.Task[None]] = set()
        self._keeping: set[bytes] = set()
        # What is to be made better, in the order of asking: name of the copy → what it is a copy of.
        self._wanted: dict[bytes, tuple[Record, Wanted]] = {}
        self._improving: asyncio.Task[None] | None = None
        # For the metrics: copies made, by why.
        self.made = {"asked": 0, "improved": 0}

    @property
    def waiting(self) -> int:
        return len(self._wanted)

    async def stop(self) -> None:
        """Keep what is on its way into the store; improve nothing more."""
        if self._improving is not None:
            self._improving.cancel()
            await asyncio.gather(self._improving, return_exceptions=True)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # Showing

    def show_now(
        self, near: Near, request: Request, record: Record, headers: dict[str, str], forced: Forced | None = None
    ) -> Response | None:
        """The answer with a stored blob, coded as the request will have it, where that is at hand.

        `headers` are the app's own. RangeNotSatisfiable, NotAcceptable.
        """
        dictionary = _named_dictionary(request)
        if dictionary is not None and not _serves(near.record(dictionary_name(dictionary)), record):
            dictionary = None
        wanted = _choose_wanted(request, record, dictionary, forced)
        copy = record if wanted.coding == "identity" else self.find_now(near, record, wanted)
        if copy is None:
            return None
        answer, headers = self._choose_answer(request, record, wanted, copy, headers)
        if isinstance(answer, Response):
            return answer
        content = near.get(copy.digest)
        if content is None or not _is_whole(copy, content):
            close(content)
            return None
        return _answer(answer, headers, content, copy.size, "original" if copy is record else "copy")

    async def show(
        self, request: Request, record: Record, headers: dict[str, str], forced: Forced | None = None
    ) -> Response | None:
        """The same, made now if need be. None where the blob itself is gone."""
        dictionary = _named_dictionary(request)
        if dictionary is not None:
            named = await self._store.record(dictionary_name(dictionary))
            dictionary = dictionary if _serves(named, record) else None
        wanted = _choose_wanted(request, record, dictionary, forced)
        copy = record if wanted.coding == "identity" else await self.find(record, wanted)
        if copy is not None:
            answer, fields = self._choose_answer(request, record, wanted, copy, headers)
            if isinstance(answer, Response):
                return answer
            pieces = await stream_blob(self._store, request, copy, answer)
            if pieces is not None:
                return _answer(answer, fields, pieces, copy.size, "original" if copy is record else "copy")
            content = await find_bytes(self._store, copy)
            if content is not None and _is_whole(copy, content):
                return _answer(answer, fields, content, copy.size, "original" if copy is record else "copy")
            # A copy that is cut or missing is made again.
            close(content)
            if copy is record:
                return None
        answer, fields = self._choose_answer(request, record, wanted, None, headers)
        if isinstance(answer, Response):
            return answer
        if request.method == "HEAD":
            # How long it would be takes making it.
            return Response(200, fields, Pieces(nothing()), origin="made")
        content = await self._store.get(record.digest)
        if content is None or not _is_whole(record, content):
            close(content)
            return None
        try:
            return Response(200, fields, await self.make(record, content, wanted), origin="made")
        except Overloaded:
            if wanted.level is not None or not takes_plain(request):
                raise
        return await self.show(request, record, headers, Forced("identity", 0))

    def _choose_answer(
        self, request: Request, record: Record, wanted: Wanted, copy: Record | None, own: dict[str, str]
    ) -> tuple[Response | Whole | Part, dict[str, str]]:
        """A whole 304 or 412, or how much to send, and the head's fields; `copy` is what there is to send already."""
        etag, plain = blob_etag(record), wanted.coding == "identity"
        if not plain:
            held = find_held(request.headers, etag, wanted.kind) if wanted.level is None else None
            level = self.level_of(wanted) if copy is None else kept_level(copy)
            etag = held or name_etag(etag, f"{wanted.kind}-{level}")
        headers = {**own, "ETag": etag, "Last-Modified": http_date(record.created_s)}
        if is_worth_coding(record.type, record.size):
            add_vary(headers, "Accept-Encoding")
            if _takes_dictionaries(request):
                add_vary(headers, "Available-Dictionary")
        ranges = plain and request.method == "GET"
        answer = choose_answer(request.headers, etag, record.created_s, record.size, ranges=ranges)
        match answer:
            case NotModified():
                return Response(304, headers, origin="not_modified"), headers
            case Failed():
                return Response(412, {"ETag": etag, "Cache-Control": "no-store"}), headers
            case Unsatisfiable():
                raise RangeNotSatisfiable(record.size)
        headers["Content-Type"] = record.type
        if plain:
            headers["Accept-Ranges"] = "bytes"
        else:
            headers["Content-Encoding"] = wanted.coding
        return answer, headers

    def level_of(self, wanted: Wanted) -> int:
        return self._quick[wanted.coding] if wanted.level is None else wanted.level

    def find_now(self, near: Near, record: Record, wanted: Wanted) -> Record | None:
        """A kept copy. One that can be made better is queued for that."""
        if wanted.level is not None:
            return None
        return self._consider(record, wanted, near.record(coding_name(record.digest, wanted.kind)))

    async def find(self, record: Record, wanted: Wanted) -> Record | None:
        if wanted.level is not None:
            return None
        return self._consider(record, wanted, await self._store.record(coding_name(record.digest, wanted.kind)))

    def _consider(self, record: Record, wanted: Wanted, kept: Record | None) -> Record | None:
        if kept is not None and kept_level(kept) < BEST[wanted.coding]:
            self._want_better(record, wanted)
        return kept

    async def make(self, record: Record, content: Content, wanted: Wanted) -> bytes | Pieces:
        """The body, made now; `content` is closed with it. Overloaded when too many wait for one already."""
        level = self.level_of(wanted)
        try:
            dictionary = None if wanted.dictionary is None else await self._find_dictionary(wanted.dictionary)
        except BaseException:
            close(content)
            raise
        coded = await self.coders.start(content, wanted.coding, level, dictionary, forced=wanted.level is not None)
        self.made["asked"] += 1
        try:
            first = await coded.step()
        except BaseException:
            coded.close()
            raise
        keeps = self._keep != "none" and wanted.level is None
        name = coding_name(record.digest, wanted.kind)
        incoming = None
        if keeps and name not in self._keeping:
            self._keeping.add(name)
            incoming = self._store.incoming()
        body = _Body(self, coded, first, _Copy(name, record, wanted, level, incoming))
        if not coded.ended:
            return Pieces(body, body.close)
        try:
            await anext(body)
        finally:
            body.close()
        return first

    async def _find_dictionary(self, digest: Digest) -> tuple[Digest, Content]:
        """UvimgError where it has gone in this very moment."""
        content = await self._store.get(digest)
        if content is None:
            raise UvimgError("The dictionary has been deleted in this moment.")
        return digest, content

    async def keep(self, copy: "_Copy") -> None:
        """Give a copy that has all come its name. Nothing is lost when that fails."""
        assert copy.incoming is not None
        try:
            digest = await copy.incoming.finish()
            facts = _encode_level(copy.level)
            record = Record(digest, copy.incoming.size, copy.record.type, int(time.time()), facts)
            if copy.wanted.dictionary is not None:
                await self._make_room(copy.record.digest, copy.name)
            await self._store.bind([copy.name], record, copy.incoming)
            # Deleting takes the last name first and looks for copies then: one of the two sees this one.
            if not await self._store.is_named(copy.record.digest):
                await self._store.unbind([copy.name])
            elif copy.level < BEST[copy.wanted.coding]:
                self._want_better(copy.record, copy.wanted)
        except UvimgError as exc:
            log.warning("a coded copy could not be kept: %s", exc.detail)
        finally:
            await self.drop(copy)

    async def drop(self, copy: "_Copy") -> None:
        """Let go of a copy, also of one that has not all come."""
        assert copy.incoming is not None
        self._keeping.discard(copy.name)
        await copy.incoming.__aexit__(None, None, None)

    async def _make_room(self, digest: Digest, name: bytes) -> None:
        """Clients may have any of many dictionaries; the copies of one blob are few: the oldest makes room."""
        try:
            kept = await self._store.scan(codings_prefix(digest) + b"dcz-", limit=MOST_VERSIONS)
        except NotImplementedHere:
            # Such a store makes room itself.
            return
        if len(kept) == MOST_VERSIONS and all(known != name for known, _ in kept):
            await self._store.unbind([min(kept, key=lambda each: each[1].created_s)[0]])

    async def forget(self, digest: Digest) -> None:
        """Take away the copies of a blob that has lost a name, if that was its last."""
        if not await self._store.is_named(digest):
            try:
                while page := await self._store.scan(codings_prefix(digest), limit=100):
                    await self._store.unbind([name for name, _ in page])
            except NotImplementedHere:
                # Those with a dictionary have names that nobody knows; nobody can ask for them any more either.
                await self._store.unbind([coding_name(digest, coding) for coding in OFFERED])

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Better ones

    def _want_better(self, record: Record, wanted: Wanted) -> None:
        if self._keep != "best" or record.size > _LARGEST_IMPROVED or len(self._wanted) >= _MOST_WANTED:
            return
        self._wanted.setdefault(coding_name(record.digest, wanted.kind), (record, wanted))
        if self._improving is None or self._improving.done():
            self._improving = asyncio.create_task(self._improve_all())

    async def _improve_all(self) -> None:
        while self._wanted:
            await self.coders.until_idle()
            name = next(iter(self._wanted))
            record, wanted = self._wanted[name]
            try:
                await self._improve(name, record, wanted)
            except (UvimgError, OSError) as exc:
                log.warning("a coded copy could not be made better: %s", exc)
            except Exception:
                # Our own bug fails this one, not all that wait behind it.
                log.exception("a coded copy could not be made better")
            finally:
                self._wanted.pop(name, None)

    async def _improve(self, name: bytes, record: Record, wanted: Wanted) -> None:
        kept = await self._store.record(name)
        level = BEST[wanted.coding]
        if kept is None or kept_level(kept) >= level:
            # Another process was first, or it has been deleted.
            return
        content = await self._store.get(record.digest)
        if content is None:
            return
        try:
            dictionary = None if wanted.dictionary is None else await self._find_dictionary(wanted.dictionary)
        except BaseException:
            close(content)
            raise
        coded = self.coders.start_idly(content, wanted.coding, level, dictionary)
        copy = _Copy(name, record, wanted, level, self._store.incoming())
        assert copy.incoming is not None
        try:
            await copy.incoming.__aenter__()
            async for piece in coded:
                await copy.incoming.write(piece)
                await self.coders.until_idle()
        except BaseException:
            await self.drop(copy)
            raise
        finally:
            coded.close()
        await self.keep(copy)
        self.made["improved"] += 1


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy on its way into the store, or past it where there is no `incoming`."""

    name: bytes
    record: Record
    wanted: Wanted
    level: int
    incoming: Incoming | None


class _Body:
    """A body that is made while it is sent, and kept then. `close` may come at any time, and again."""

    def __init__(self, codings: Codings, coded: Coded, first: bytes, copy: _Copy) -> None:
        self._codings, self._coded, self._copy = codings, coded, copy
        self._first: bytes | None = first
        # Whether there is an open copy that nobody else closes.
        self._keeps = copy.incoming is not None
        self._begun = False

    def __aiter__(self) -> "_Body":
        return self

    async def __anext__(self) -> bytes:
        piece, self._first = self._first, None
        if piece is None:
            if self._coded.ended:
                raise StopAsyncIteration
            piece = await self._coded.step()
        if self._keeps:
            await self._put(piece)
        if self._coded.ended:
            self._end()
        return piece

    async def _put(self, piece: bytes) -> None:
        """Where the store is slower than the client, the client waits: nothing is held in memory for it."""
        assert self._copy.incoming is not None
        try:
            if not self._begun:
                self._begun = True
                await self._copy.incoming.__aenter__()
            await self._copy.incoming.write(piece)
        except UvimgError as exc:
            log.warning("a coded copy could not be kept: %s", exc.detail)
            self._give_up()

    def _end(self) -> None:
        self._coded.close()
        if self._keeps:
            self._keeps = False
            self._codings.spawn(self._codings.keep(self._copy))

    def _give_up(self) -> None:
        if self._keeps:
            self._keeps = False
            self._codings.spawn(self._codings.drop(self._copy))

    def close(self) -> None:
        self._coded.close()
        self._give_up()


# How a stored blob is answered with


def _choose_wanted(request: Request, record: Record, dictionary: Digest | None, forced: Forced | None) -> Wanted:
    """The coding of a stored blob for a request. NotAcceptable for none at all."""
    accepted = request.headers.get("accept-encoding")
    if not is_worth_coding(record.type, record.size):
        # What is compressed already is not compressed again, whoever asks.
        if forced is None:
            choose_coding(accepted, ())
        return PLAIN
    if forced is not None:
        return Wanted(forced.coding, forced.level)
    coding = choose_coding(accepted, OFFERED if dictionary is None else ("dcz", *OFFERED))
    return Wanted(coding, None, dictionary if coding == "dcz" else None)


def takes_plain(request: Request) -> bool:
    """Whether a client accepts content that is not coded."""
    try:
        choose_coding(request.headers.get("accept-encoding"), ())
    except NotAcceptable:
        return False
    return True


def _takes_dictionaries(request: Request) -> bool:
    return "dcz" in request.headers.get("accept-encoding", "")


def _named_dictionary(request: Request) -> Digest | None:
    """The dictionary that the client has, where it takes dcz."""
    return parse_available(request.headers.get("available-dictionary")) if _takes_dictionaries(request) else None


def _serves(dictionary: Record | None, record: Record) -> bool:
    """Whether there is such a dictionary, fit for this blob."""
    return dictionary is not None and dictionary.digest != record.digest and dictionary.size <= MAX_BYTES


def blob_etag(record: Record) -> str:
    """Strong, from the hash of the bytes as they were stored."""
    return f'"{record.digest.hex()[:32]}"'


def kept_level(copy: Record) -> int:
    return _decode_level(copy.facts)


def _is_whole(record: Record, content: Content) -> bool:
    return size_of(content) == record.size


def _answer(answer: Whole | Part, headers: dict[str, str], body: Content | Pieces, size: int, origin: str) -> Response:
    """`size` is that of all; pieces are what is to be sent of it already."""
    if isinstance(answer, Whole):
        return Response(200, headers, body, origin=origin)
    headers["Content-Range"] = f"bytes {answer.start}-{answer.stop - 1}/{size}"
    if isinstance(body, Pieces):
        return Response(206, headers, body, origin=origin)
    if isinstance(body, FilePart):
        return Response(206, headers, body.part(answer.start, answer.stop), origin=origin)
    return Response(206, headers, body[answer.start : answer.stop], origin=origin)


async def nothing() -> AsyncIterator[bytes]:
    """The body of an answer to HEAD whose size would take making it."""
    pieces: tuple[bytes, ...] = ()
    for piece in pieces:
        yield piece


# Coding what has no ETag, for any app


def code_answer(headers: Mapping[str, str], response: Response) -> None:
    """Code an answer that has no ETag, if it is short and that is worth it. NotAcceptable for none at all.

    What has an ETag is its app's to code, for each coding has one of its own.
    """
    coding = _choose_for(headers, response)
    if coding != "identity" and response.size <= AT_ONCE_BYTES:
        _replace(response, coding)


async def code_long_answer(headers: Mapping[str, str], response: Response) -> None:
    """The same for one of any length."""
    coding = _choose_for(headers, response)
    if coding == "identity":
        return
    if response.size <= AT_ONCE_BYTES:
        _replace(response, coding)
    else:
        await asyncio.to_thread(_replace, response, coding)


def code_tagged(headers: Mapping[str, str], fields: dict[str, str], size: int) -> Coding:
    """The coding for an answer with an ETag, of so many bytes; its head's fields are made to say so."""
    if not is_worth_coding(fields.get("Content-Type", ""), size):
        return "identity"
    coding = choose_coding(headers.get("accept-encoding"), OFFERED)
    add_vary(fields, "Accept-Encoding")
    if coding != "identity":
        fields["Content-Encoding"] = coding
        fields["ETag"] = name_etag(fields["ETag"], f"{coding}-{QUICK[coding]}")
    return coding


def _choose_for(headers: Mapping[str, str], response: Response) -> Coding:
    fields = response.headers
    if response.status != 200 or "ETag" in fields or "Content-Encoding" in fields:
        return "identity"
    if not is_worth_coding(fields.get("Content-Type", ""), response.size):
        return "identity"
    coding = choose_coding(headers.get("accept-encoding"), OFFERED)
    add_vary(fields, "Accept-Encoding")
    return coding


def _replace(response: Response, coding: Coding) -> None:
    assert isinstance(response.body, bytes)
    response.body = code_now(response.body, coding, QUICK[coding])
    response.headers["Content-Encoding"] = coding


def add_vary(headers: dict[str, str], *fields: str) -> None:
    known = headers.get("Vary")
    headers["Vary"] = ", ".join([*([known] if known else []), *fields])
