"""One bucket of an object store, asked in bounded time and told of in our own errors.

S3, Google's and Azure's are asked through obstore, which does their protocols and finds their credentials. What is
asked is little: whole small objects with a tag that changes with them, writes on the condition of a tag, large
objects as files and as streams, and listings in order.
Rule: no write is made twice. Whether one that was not answered has happened only the next look tells.
Surprise: a client of obstore's does not survive a fork, so it is made at the first call of each process.
"""

import asyncio
import configparser
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from uvimg.core.bucket import BucketPlace, is_loopback
from uvimg.core.errors import Overloaded, StoreDown, StoreFull, UvimgError
from uvimg.store.guard import Guard

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

log = logging.getLogger("uvimg.store")

T = TypeVar("T")

# Calls at a time, and how many may wait for their turn: each of those before them takes the guard's time at most.
_MOST_CALLS = 64
_MOST_WAITING = 2000
# Beside those, calls that hold megabytes: 20 of them each, in parts.
_MOST_LARGE_CALLS = 6
_LARGE_BYTES = 1 << 20
# Bytes on their way get so much time above that of a call; a link that is slower is as good as none.
_LEAST_BYTES_PER_S = 1 << 20
# S3 takes no smaller parts, and 10,000 of them at most. Three are in flight, and one is being read.
_PART_BYTES = 5 << 20
_MOST_PARTS = 9_000
_PARTS_AT_ONCE = 3
# A stream comes in pieces of at least this.
PIECE_BYTES = 262_144

# What changes with every change of an object: its ETag, and its version where there is one.
Tag = tuple[str | None, str | None]


@dataclass(frozen=True, slots=True)
class Listed:
    """An object as a listing tells it; `key` is without the bucket's prefix."""

    key: str
    size: int
    modified_s: float


@dataclass(frozen=True, slots=True)
class Found:
    """A small object, whole."""

    data: bytes
    tag: Tag
    modified_s: float


class Bucket:
    def __init__(self, place: BucketPlace, timeout_s: float) -> None:
        self._place, self._timeout_s = place, timeout_s
        self.prefix = place.prefix
        self.guard = Guard(str(place), self._translate, timeout_s)
        self._clients: tuple[int, Client, Client] | None = None
        self._turns, self._large_turns = asyncio.Semaphore(_MOST_CALLS), asyncio.Semaphore(_MOST_LARGE_CALLS)
        self._waiting = 0
        self._safe = False
        self._judging = asyncio.Lock()

    # Small objects

    async def get(self, key: str) -> Found | None:
        """An object of at most some megabytes, or None."""

        async def call() -> Found | None:
            try:
                found = await self._reader.get_async(self.prefix + key)
            except FileNotFoundError as exc:
                self._absent(exc)
                return None
            return Found(bytes(await found.bytes_async()), _tag_of(found.meta), _second_of(found.meta))

        return await self._run(call)

    async def size_of(self, key: str) -> int | None:
        """The size of an object, or None."""
        return (await self._head(key) or (None, 0.0))[0]

    async def modified_s(self, key: str) -> float | None:
        """When an object was written, by the server's clock, or None."""
        return (await self._head(key) or (0, None))[1]

    async def _head(self, key: str) -> tuple[int, float] | None:
        async def call() -> tuple[int, float] | None:
            try:
                meta = await self._reader.head_async(self.prefix + key)
            except FileNotFoundError:
                return None
            return meta["size"], _second_of(meta)

        return await self._run(call)

    async def put(self, key: str, data: bytes) -> None:
        await self._run(lambda: self._writer.put_async(self.prefix + key, data, use_multipart=False), len(data))

    async def create(self, key: str, data: bytes) -> bool:
        """Write an object unless there is one. Whether it was written."""
        await self._ensure_safe()
        return await self._put_if(key, data, "create")

    async def replace(self, key: str, data: bytes, tag: Tag) -> bool:
        """Write an object in the place of the one with this tag. Whether that one was there."""
        await self._ensure_safe()
        return await self._put_if(key, data, _condition(tag))

    async def _put_if(self, key: str, data: bytes, mode: Any) -> bool:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        async def call() -> bool:
            try:
                await self._writer.put_async(self.prefix + key, data, mode=mode)
            except (AlreadyExistsError, PreconditionError):
                return False
            except FileNotFoundError as exc:
                # The one to be replaced has gone.
                self._absent(exc)
                return False
            return True

        return await self._run(call, len(data))

    async def delete(self, *keys: str) -> None:
        """Remove objects, of which any may be gone already."""

        async def call() -> None:
            with contextlib.suppress(FileNotFoundError):
                await self._writer.delete_async([self.prefix + key for key in keys])

        if keys:
            await self._run(call)

    async def _ensure_safe(self) -> None:
        """Make sure, once, that the server keeps to the condition of a write. UvimgError where it does not."""
        if self._safe:
            return
        async with self._judging:
            if self._safe:
                return
            key = f"probe/{os.urandom(16).hex()}"
            try:
                made = await self._put_if(key, b"1", "create")
                again = await self._put_if(key, b"2", "create")
                other = await self._put_if(key, b"3", _condition(('"0123456789abcdef0123456789abcdef"', "1")))
                found = await self.get(key)
                right = found is not None and await self._put_if(key, b"4", _condition(found.tag))
            finally:
                with contextlib.suppress(UvimgError):
                    await self.delete(key)
            if not made or again or other or not right:
                raise _unsafe(self.guard.name)
            self._safe = True

    # Large objects

    async def put_file(self, key: str, descriptor: int, size: int) -> None:
        """Write an object from an open file, in parts of which a few are in flight."""
        # By way of /proc, for it may have no name; and obstore reads it itself, in threads of its own.
        path = Path(f"/proc/self/fd/{descriptor}")
        part = max(_PART_BYTES, -(-size // _MOST_PARTS))
        await self._run(
            lambda: self._writer.put_async(
                self.prefix + key, path, use_multipart=True, chunk_size=part, max_concurrency=_PARTS_AT_ONCE
            ),
            size,
        )

    async def open(self, key: str) -> tuple[int, AsyncGenerator[bytes, None]] | None:
        """The size of an object, and its bytes as they come, for who takes them at once; None where there is none.

        The pieces raise what the guard does, and StoreDown where they end too early.
        """

        async def call() -> Any:
            try:
                return await self._reader.get_async(self.prefix + key)
            except FileNotFoundError as exc:
                self._absent(exc)
                return None

        found = await self._run(call)
        if found is None:
            return None
        size: int = found.meta["size"]
        return size, self._stream(found, size)

    async def read(self, key: str, start: int, stop: int) -> tuple[int, bytes] | None:
        """The size of an object, and its bytes from start to stop; None where there is none."""

        async def call() -> tuple[int, bytes] | None:
            try:
                found = await self._reader.get_async(self.prefix + key, options={"range": (start, stop)})
            except FileNotFoundError as exc:
                self._absent(exc)
                return None
            return found.meta["size"], bytes(await found.bytes_async())

        return await self._run(call, stop - start)

    async def _stream(self, found: Any, size: int) -> AsyncGenerator[bytes, None]:
        stream = found.stream(min_chunk_size=PIECE_BYTES)
        left = size

        async def call() -> bytes | None:
            try:
                return bytes(await stream.__anext__())
            except StopAsyncIteration:
                return None

        while (piece := await self._run(call)) is not None:
            left -= len(piece)
            yield piece
        if left:
            raise StoreDown()

    # Listings

    async def list(self, folder: str, after: str = "") -> AsyncIterator[Sequence[Listed]]:
        """Objects below a folder and behind a key, in order, in pages."""
        stream: Any = None
        last = after

        async def call() -> list[Any] | None:
            nonlocal stream
            if stream is None:
                offset = self.prefix + after if after else None
                stream = self._reader.list(self.prefix + folder, offset=offset, chunk_size=1000)
            try:
                return list(await stream.__anext__())
            except StopAsyncIteration:
                return None

        while (page := await self._run(call)) is not None:
            listed = [_listed(meta, len(self.prefix)) for meta in page]
            for each in listed:
                if each.key <= last and each.key > after:
                    # S3 Express does so: nothing that is built on order would be right.
                    raise UvimgError("The store lists its objects in no order, which uvimg needs.")
                last = max(last, each.key)
            yield [each for each in listed if each.key > after]

    # The client

    @property
    def _reader(self) -> "Client":
        return self._client()[1]

    @property
    def _writer(self) -> "Client":
        return self._client()[2]

    def _client(self) -> "tuple[int, Client, Client]":
        if self._clients is None or self._clients[0] != os.getpid():
            try:
                # A read that fails may be tried again at once; see the rule above for writes.
                reader, writer = (make_client(self._place, self._timeout_s, retries) for retries in (1, 0))
            except Exception as exc:
                # Before anything was sent: a region or a key that cannot be.
                log.error("%s cannot be used: %s", self._place, _first_line(exc))
                raise UvimgError("The store is not configured as it has to be; the log knows more.") from exc
            self._clients = os.getpid(), reader, writer
        return self._clients

    async def _run(self, call: Callable[[], Awaitable[T]], size: int = 0) -> T:
        """A call in its turn, with time for so many bytes."""
        if self._waiting >= _MOST_WAITING:
            raise Overloaded()
        turns = self._large_turns if size > _LARGE_BYTES else self._turns
        self._waiting += 1
        try:
            await turns.acquire()
        finally:
            self._waiting -= 1
        try:
            return await self.guard.run(call, self._timeout_s + size / _LEAST_BYTES_PER_S)
        finally:
            turns.release()

    def _absent(self, exc: FileNotFoundError) -> None:
        """Not every 404 means that there is no such object."""
        if _tells_of_no_bucket(exc):
            raise _NoBucket from exc

    def _translate(self, exc: Exception) -> UvimgError | None:
        from obstore.exceptions import BaseError, NotSupportedError

        if isinstance(exc, _NoBucket) or _tells_of_no_bucket(exc):
            return StoreDown(f"There is no bucket {self._place.bucket}.")
        if isinstance(exc, NotSupportedError) or ("501 Not Implemented" in str(exc)):
            return _unsafe(self.guard.name)
        if isinstance(exc, BaseError):
            return StoreFull() if any(mark in str(exc) for mark in _FULL) else StoreDown()
        # A file that obstore could not read, say.
        return StoreDown() if isinstance(exc, OSError) else None


class _NoBucket(Exception):
    """Nothing can be there."""


def _tells_of_no_bucket(exc: Exception) -> bool:
    return any(
        mark in str(exc) for mark in ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
    )


# By their codes, in whatever dialect.
_FULL = ("507 Insufficient", "QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "AccountStorageLimit")


def _unsafe(name: str) -> UvimgError:
    log.error("%s does not keep to If-None-Match and If-Match, without which two nodes would undo each other", name)
    return UvimgError("The store cannot be written to safely: it knows no conditional writes.")


def _tag_of(meta: Any) -> Tag:
    return meta["e_tag"], meta["version"]


def _condition(tag: Tag) -> Any:
    return {name: value for name, value in zip(("e_tag", "version"), tag, strict=True) if value is not None}


def _second_of(meta: Any) -> float:
    modified: datetime = meta["last_modified"]
    return modified.timestamp()


def _listed(meta: Any, prefix: int) -> Listed:
    return Listed(meta["path"][prefix:], meta["size"], _second_of(meta))


def _first_line(exc: Exception) -> str:
    return str(exc).partition("\n")[0]


# How a client is made


_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": (),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}


def make_client(place: BucketPlace, timeout_s: float, retries: int) -> "Client":
    """A client of obstore's. What the URL does not say the usual variables of the environment do."""
    from obstore.store import AzureStore, GCSStore, S3Store

    endpoint = place.endpoint
    variables = {"s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"), "gs": (), "az": ("AZURE_ENDPOINT",)}
    configured: dict[str, Any] = {}
    if place.scheme == "s3":
        configured = _read_profile(place.profile)
    told = (
        endpoint
        or next(filter(None, map(os.environ.get, variables[place.scheme])), "")
        or configured.get("endpoint", "")
    )
    if told and is_loopback(told):
        _bypass_proxies()
    options: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=timeout_s),
        "read_timeout": timedelta(seconds=timeout_s),
        # The guard knows how much time each has.
        "timeout": timedelta(hours=1),
        # Shorter than servers and balancers keep idle ones, so that none is closed while it is written to.
        "pool_idle_timeout": timedelta(seconds=4),
    }
    if place.allow_http or (told.startswith("http://") and is_loopback(told)):
        options["allow_http"] = True
    common: dict[str, Any] = {
        "client_options": options,
        "retry_config": {
            "max_retries": retries,
            "retry_timeout": timedelta(seconds=timeout_s),
            "backoff": {
                "init_backoff": timedelta(milliseconds=50),
                "max_backoff": timedelta(seconds=timeout_s),
                "base": 2,
            },
        },
    }
    match place.scheme:
        case "s3":
            if told:
                configured["endpoint"] = told
            if place.region:
                configured["region"] = place.region
            if not place.path_style:
                configured["virtual_hosted_style_request"] = True
            return S3Store(place.bucket, **configured, **common)
        case "gs":
            if endpoint:
                configured["base_url"] = endpoint
            return GCSStore(place.bucket, **configured, **common)
        case _:
            if place.account:
                configured["account_name"] = place.account
            if endpoint:
                configured["endpoint"] = endpoint
            return AzureStore(place.bucket, **configured, **common)


def _bypass_proxies() -> None:
    """A proxy that is meant for the world knows nothing of this machine's own servers."""
    known = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
    hosts = [host for host in ("localhost", "127.0.0.0/8", "::1") if host not in known.split(",")]
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join([*filter(None, [known]), *hosts])


def _read_profile(profile: str) -> dict[str, Any]:
    """What the files of the AWS tools say, as far as obstore does not read them: fixed keys, region and endpoint.

    The environment's keys come before those of a file, but not before those of a profile that the URL names.
    """
    name = profile or os.environ.get("AWS_PROFILE", "")
    if not name and "AWS_ACCESS_KEY_ID" in os.environ:
        return {}
    files = configparser.RawConfigParser()
    secret = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials"
    config = os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config"
    with contextlib.suppress(configparser.Error, RuntimeError):
        files.read(Path(secret).expanduser())
    others = configparser.RawConfigParser()
    with contextlib.suppress(configparser.Error, RuntimeError):
        others.read(Path(config).expanduser())
    found: dict[str, Any] = {}
    section = name or "default"
    for parser, title in ((others, section if section == "default" else f"profile {section}"), (files, section)):
        if parser.has_section(title):
            found |= dict(parser.items(title))
    if profile and not found:
        raise ValueError(f"there is no profile {profile!a} in {secret} and {config}")
    keys = {
        "aws_access_key_id": "access_key_id",
        "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "session_token",
        "region": "region",
        "endpoint_url": "endpoint",
    }
    read = {keys[key]: value for key, value in found.items() if key in keys}
    if "region" in read and (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
        del read["region"]
    return read
