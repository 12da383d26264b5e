"""The documents app: files under paths, each compressed once and then served as it was compressed.

A document is a name that points at a blob; its coded copies belong to the blob (apps/codings.py). What a stored page
does in a browser is its author's doing, so the headers of every document take from it the origin that it came from
unless the settings say otherwise: else it could act on this server in the name of whoever looks at it.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable
from dataclasses import dataclass

import msgspec

from uvimg.apps.codings import Codings, blob_etag
from uvimg.core.access import AccessRules, Network, find_client, is_cross_site, is_rebound
from uvimg.core.address import Digest
from uvimg.core.coding import Forced, read_forced
from uvimg.core.dictionary import MOST_VERSIONS, dictionary_name, parse_use
from uvimg.core.document import (
    MOST_LISTED,
    AddSlash,
    Delete,
    Enter,
    List,
    Options,
    Put,
    Query,
    Show,
    behind,
    document_name,
    entry_of,
    guess_type,
    link,
    parse_caching,
    parse_type,
    route,
)
from uvimg.core.errors import (
    BadParameter,
    BadRequest,
    Forbidden,
    NotFound,
    NotImplementedHere,
    PreconditionFailed,
    TooLarge,
    UnsupportedType,
    UvimgError,
)
from uvimg.core.message import Request, Response
from uvimg.core.negotiate import allows_change
from uvimg.store import Incoming, Record, Store


@dataclass(frozen=True, slots=True)
class DocumentsSettings:
    """The configuration as this app sees it. `mount` is where it is, "" or "/docs"; `forcing` allows ?compression=."""

    mount: str
    headers: tuple[tuple[str, str], ...]
    forcing: bool
    zstd_level: int
    max_bytes: int
    write_rule: AccessRules
    download_rule: AccessRules
    admin_rule: AccessRules
    trusted_proxies: tuple[Network, ...]


class Facts(msgspec.Struct, frozen=True, array_like=True):
    """The facts in a document's record. `versions` are those before it that clients may have as a dictionary."""

    caching: str = ""
    use: str = ""
    versions: tuple[Digest, ...] = ()


_NO_FACTS = Facts()
_encode_facts = msgspec.msgpack.Encoder().encode
_decode_facts = msgspec.msgpack.Decoder(Facts).decode
_encode_json = msgspec.json.Encoder().encode

_MOST_TRIES = 3
# Entries of a directory that are looked at before others have their turn.
_LIST_STEP = 100


class Documents:
    """See `App` in service.py for its doors."""

    name = "documents"

    def __init__(self, settings: DocumentsSettings, store: Store, codings: Codings) -> None:
        self._settings, self._store, self._codings = settings, store, codings

    # The two doors

    def try_now(self, request: Request) -> Response | None:
        query = self._route(request)
        response = None
        match query:
            case Show() | Enter() if self._store.near is not None:
                self._admit(request, self._settings.download_rule)
                response = self._show_now(request, query)
                if response is not None and self._settings.download_rule.allows_everybody:
                    response.lasts = "while the store is unchanged"
            case Options(allow):
                response = Response(204, {"Allow": allow}, lasts="always")
            case AddSlash(location):
                response = _redirect(request, location[1:])
        if response is not None:
            response.route = query.name
        return response

    async def handle(self, request: Request) -> Response:
        query = self._route(request)
        response = await self._answer(request, query)
        response.route = query.name
        return response

    async def _answer(self, request: Request, query: Query) -> Response:
        match query:
            case Show() | Enter():
                self._admit(request, self._settings.download_rule)
                return await self._show(request, query)
            case List():
                self._admit(request, self._settings.download_rule)
                return await self._list(request, query)
            case Put():
                self._admit_change(request, self._settings.write_rule)
                return await self._put(request, query)
            case Delete():
                self._admit_change(request, self._settings.admin_rule)
                return await self._delete(request, query)
            case _:
                response = self.try_now(request)
                assert response is not None
                return response

    def refuse(self, request: Request, error: UvimgError) -> Response:
        """An error as problem+json (RFC 9457)."""
        problem: dict[str, object] = {"type": "about:blank", "title": error.title, "status": error.status}
        problem["detail"] = error.detail
        if isinstance(error, BadParameter):
            problem["parameter"] = error.parameter
        headers = {"Content-Type": "application/problem+json", "Cache-Control": "no-store"} | error.headers
        try:
            name = self._route(request).name
        except UvimgError:
            name = "none"
        return Response(error.status, headers, _encode_json(problem), route=name)

    def _route(self, request: Request) -> Query:
        return route(request.method, request.path, request.query, request.target, self._settings.mount)

    def _admit(self, request: Request, rules: AccessRules) -> None:
        if rules.allows_everybody:
            return
        if not rules.allows(find_client(request.peer, request.headers, self._settings.trusted_proxies)):
            raise Forbidden()

    def _admit_change(self, request: Request, rules: AccessRules) -> None:
        self._admit(request, rules)
        client = find_client(request.peer, request.headers, self._settings.trusted_proxies)
        if is_cross_site(request.headers) or is_rebound(client, request.headers):
            raise Forbidden("A page of another site may have asked for this.")

    # Showing

    def _show_now(self, request: Request, query: Show | Enter) -> Response | None:
        near = self._store.near
        assert near is not None
        record = near.record(document_name(query.path if isinstance(query, Show) else query.index))
        if record is None:
            return None
        return self._codings.show_now(near, request, record, self._describe(record), self._read_forced(query))

    async def _show(self, request: Request, query: Show | Enter) -> Response:
        name = document_name(query.path if isinstance(query, Show) else query.index)
        # Between the look at the name and that at the blob it may be deleted, and be there again.
        for _ in range(_MOST_TRIES):
            record = await self._store.record(name)
            if record is None:
                return await self._show_directory(request, query)
            shown = await self._codings.show(request, record, self._describe(record), self._read_forced(query))
            if shown is not None:
                return shown
        raise UvimgError("The document's bytes are missing from the store.")

    def _read_forced(self, query: Show | Enter) -> Forced | None:
        if not query.fields or not self._settings.forcing:
            return None
        return read_forced(query.fields, self._settings.zstd_level)

    def _describe(self, record: Record) -> dict[str, str]:
        """The fields of a document's head that are its own."""
        headers = dict(self._settings.headers)
        if record.facts:
            facts = _decode_facts(record.facts)
            if facts.caching:
                headers["Cache-Control"] = facts.caching
            if facts.use:
                headers["Use-As-Dictionary"] = facts.use
        return headers

    # Directories

    async def _show_directory(self, request: Request, query: Show | Enter) -> Response:
        directory = query.path if isinstance(query, Enter) else query.path + "/"
        if isinstance(query, Enter):
            return await self._list(request, List(directory, MOST_LISTED, ""))
        try:
            below = await self._store.scan(document_name(directory), limit=1)
        except NotImplementedHere:
            # There are no directories in a store that cannot list.
            below = []
        if not below:
            raise NotFound("There is no such document.")
        return _redirect(request, self._settings.mount[1:] + "/" * bool(self._settings.mount) + directory)

    async def _list(self, request: Request, query: List) -> Response:
        entries, more = await self._find_entries(query)
        if not entries and query.path and not query.after:
            raise NotFound("There is no such directory.")
        told: dict[str, object] = {"path": query.path, "entries": [_tell_entry(*entry) for entry in entries]}
        if more:
            told["next"] = entries[-1][0]
        return Response(200, {"Content-Type": "application/json", "Cache-Control": "no-cache"}, _encode_json(told))

    async def _find_entries(self, query: List) -> tuple[list[tuple[str, Record]], bool]:
        """Entries of a directory, and whether there are more. All that is below one of its directories is one entry."""
        prefix = document_name(query.path)
        after = behind(query.path, query.after) if query.after else b""
        found: list[tuple[str, Record]] = []
        while page := await self._store.scan(prefix, after, _LIST_STEP):
            for name, record in page:
                if name <= after:
                    continue
                if len(found) == query.limit:
                    return found, True
                entry = entry_of(name, query.path)
                found.append((entry, record))
                after = behind(query.path, entry)
            # A large directory must not hold up everybody else.
            await asyncio.sleep(0)
        return found, False

    # Changing

    async def _put(self, request: Request, query: Put) -> Response:
        headers = request.headers
        if headers.get("content-encoding", "identity").lower() not in ("", "identity"):
            raise UnsupportedType("Documents are stored as they are: send this one without Content-Encoding.")
        if "content-range" in headers:
            raise BadRequest("A part of a document cannot be put.")
        if (request.length or 0) > self._settings.max_bytes:
            raise TooLarge()
        media_type = _read_type(headers.get("content-type", ""), query.path)
        use, caching = headers.get("use-as-dictionary"), headers.get("cache-control")
        facts = Facts(parse_caching(caching) if caching else "", str(parse_use(use)) if use else "")
        name = document_name(query.path)
        # Before the body, which may be large; and once more with the change itself.
        _check_may_change(request, await self._store.record(name))
        async with self._store.incoming() as incoming:
            async for chunk in _bounded(request.body, self._settings.max_bytes):
                await incoming.write(chunk)
            old, new = await replace_document(
                self._store,
                self._codings,
                name,
                incoming,
                media_type,
                facts,
                lambda old: _check_may_change(request, old),
            )
        location = link(request.prefix, request.path[1:])
        answer = {"ETag": blob_etag(new), "Location": location, "Cache-Control": "no-store"}
        if old is not None:
            return Response(204, answer)
        answer["Content-Type"] = "application/json"
        return Response(201, answer, _encode_json({"url": location, **_tell_entry(query.path, new)}))

    async def _delete(self, request: Request, query: Delete) -> Response:
        def remove(_: bytes, old: Record | None) -> None:
            if old is None:
                raise NotFound("There is no such document.")
            _check_may_change(request, old)

        ((old, _),) = await self._store.change([document_name(query.path)], remove)
        assert old is not None
        await _forget(self._store, self._codings, old, None)
        return Response(204)


# What a change of one document does to dictionaries


async def replace_document(
    store: Store,
    codings: Codings,
    name: bytes,
    incoming: Incoming,
    media_type: str,
    facts: Facts = _NO_FACTS,
    check: Callable[[Record | None], None] = lambda old: None,
) -> tuple[Record | None, Record]:
    """Give a name to a blob that has all come; the records before and after. `check` may object, with what is there."""
    digest = await incoming.finish()
    plain = Record(digest, incoming.size, media_type, int(time.time()))

    def replace(changed: bytes, old: Record | None) -> Record:
        if changed != name:
            return plain
        check(old)
        # Clients may still have versions before it as a dictionary.
        versions = tuple(known for known in _versions(old) if known != digest)[:MOST_VERSIONS]
        known = msgspec.structs.replace(facts, versions=versions)
        return plain if known == _NO_FACTS else msgspec.structs.replace(plain, facts=_encode_facts(known))

    # At once: whoever replaces it in the next moment must find the dictionary to let go of.
    names = [name, dictionary_name(digest)] if facts.use else [name]
    (old, new), *_ = await store.change(names, replace, incoming)
    assert new is not None
    if old is not None:
        await _forget(store, codings, old, new)
    return old, new


def _versions(record: Record | None) -> tuple[Digest, ...]:
    """The dictionaries that a document has held on to, itself among them; the newest first."""
    if record is None or not record.facts:
        return ()
    facts = _decode_facts(record.facts)
    return (*((record.digest,) if facts.use else ()), *facts.versions)


async def _forget(store: Store, codings: Codings, old: Record, new: Record | None) -> None:
    """Let go of what a document had before: dictionaries that it no longer holds, and the copies of all of them."""
    digests = sorted(set(_versions(old)) - set(_versions(new)))
    if digests:
        await store.unbind([dictionary_name(digest) for digest in digests])
    for digest in {old.digest, *digests}:
        await codings.forget(digest)


# Reading and telling


def _read_type(field: str, path: str) -> str:
    # What curl says of every body that it is given nothing about.
    if not field or field.lower() == "application/x-www-form-urlencoded":
        return guess_type(path)
    return parse_type(field)


async def _bounded(body: AsyncIterable[bytes], max_bytes: int) -> AsyncIterator[bytes]:
    """A body of undeclared size is counted while it comes."""
    size = 0
    async for chunk in body:
        size += len(chunk)
        if size > max_bytes:
            raise TooLarge()
        yield chunk


def _check_may_change(request: Request, old: Record | None) -> None:
    headers = {
        name: _CODED_TAG.sub(r"\1", field)
        for name in ("if-match", "if-none-match")
        if (field := request.headers.get(name)) is not None
    }
    if not allows_change(headers, None if old is None else blob_etag(old)):
        raise PreconditionFailed()


# Whoever changes a document may have seen a coded copy of it.
_CODED_TAG = re.compile(r'("[0-9a-f]{32})-[a-z0-9-]+(?=")')


def _redirect(request: Request, path: str) -> Response:
    location = link(request.prefix, path) + (f"?{request.query}" if request.query else "")
    return Response(301, {"Location": location, "Cache-Control": "no-cache"})


def _tell_entry(name: str, record: Record) -> dict[str, object]:
    if name.endswith("/"):
        return {"name": name}
    facts = {"size": record.size, "type": record.type, "sha256": record.digest.hex(), "modified": record.created_s}
    return {"name": name, **facts}
