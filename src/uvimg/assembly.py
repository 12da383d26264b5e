"""Settings → the service with everything behind it, started in order and stopped backwards. No front-end yet.

Order matters: the store is opened first (what is wrong with it is found at once), then the workers are started.
Below `web`, so that an aiohttp application of ours can start a service in somebody else's process.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, cast

import msgspec

from uvimg import __version__, config, logs
from uvimg.apps.codings import Codings
from uvimg.apps.documents import Documents, DocumentsSettings
from uvimg.apps.images import Images, ImagesSettings, Rendition, weigh
from uvimg.apps.intermediates import Intermediates
from uvimg.apps.keyvalue import KeyValue, KeyValueSettings
from uvimg.apps.operations import PATHS, Health, Operations, OperationsSettings, judge_health
from uvimg.apps.originals import Originals
from uvimg.apps.recoding import Recoder
from uvimg.cache import Cache
from uvimg.coders import Coders
from uvimg.config import Settings
from uvimg.core.access import parse_network, parse_rules
from uvimg.core.errors import Elsewhere, StoreDown
from uvimg.core.formats import Format, parse_output_format
from uvimg.core.plan import Rules
from uvimg.core.pyramid import PyramidRules
from uvimg.core.types import Types
from uvimg.cores import usable_cores
from uvimg.imaging import Learn, Limits, Ready
from uvimg.imaging.pool import Pool, PoolSettings
from uvimg.metrics import Metrics, Reading, watch_process
from uvimg.service import App, Service
from uvimg.store import Store, open_store
from uvimg.store.guard import Guard
from uvimg.store.sharing import SharingStore, open_cache
from uvimg.store.tier import TieredStore


class CannotStart(Exception):
    """The service cannot be started as configured; the message is one readable line."""


@dataclass(frozen=True, slots=True)
class Assembled:
    """`operations` answers about health and metrics alone; `ready` is what image workers can do, if there are any."""

    service: Service
    operations: Service
    ready: Ready | None


@contextlib.asynccontextmanager
async def assemble(settings: Settings, *, has_siblings: bool = False) -> AsyncIterator[Assembled]:
    """The service with everything behind it; stopped in order at the end.

    One that `has_siblings` at the same place is well there, though it drains itself, while any of them serves.
    """
    metrics = Metrics(settings.metrics_dir)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(_publishing(metrics))
        store, sharing, tier = _open_stores(settings)
        stack.push_async_callback(store.close)
        codings = await stack.enter_async_context(_coding(settings, store, metrics))
        apps: dict[str, App] = {}
        pool: Pool | None = None
        ready: Ready | None = None
        if "images" in settings.apps:
            apps["images"], pool, ready = await stack.enter_async_context(
                _starting_images(settings, store, codings, metrics)
            )
        if "kv" in settings.apps:
            apps["kv"] = await stack.enter_async_context(_starting_values(settings, store, codings.coders))
        if "documents" in settings.apps:
            apps["documents"] = Documents(_documents_settings(settings), store, codings)
        access_log = logs.make_access_log() if settings.access_log else None
        version = (store.near or _Unchanging()).version

        def health() -> Health:
            # Processes with the same folder for metrics may have the same place for health.
            return _find_health(service, pool, store, shared=has_siblings or bool(settings.operations_listen))

        operations = Operations(_operations_settings(settings), metrics, health)
        pages = {} if settings.operations_listen else dict.fromkeys(PATHS, operations)
        mounts = {_MOUNTS[name]: app for name, app in apps.items() if _is_mounted(settings, name)}
        root = next((app for name, app in apps.items() if not _is_mounted(settings, name)), operations)
        service = Service(root, access_log, version, metrics, pages=pages, mounts=mounts)
        metrics.watch(watch_process(lambda: pool.pids if pool else [], lambda: service.draining))
        metrics.view(lambda: _read_store(store))
        metrics.watch(lambda: _read_guards(store.guards))
        if sharing is not None:
            metrics.watch(lambda: _read_sharing(sharing))
        if tier is not None:
            metrics.watch(lambda: _read_tier(tier))
            metrics.view(lambda: _read_tier_room(tier, settings.tier_size))
        metrics.info = {"version": __version__} | ({"libvips": ready.libvips} if ready else {})
        # One that drains looks whether others serve.
        await metrics.publish()
        yield Assembled(service, Service(operations, access_log, version, metrics), ready)


def _open_stores(settings: Settings) -> tuple[Store, SharingStore | None, TieredStore | None]:
    """The store; the same as one with a cache that nodes share, where it is; and as one with a tier before all that."""
    cache = open_cache(settings.cache, settings.cache_timeout_s)
    store = _open_store(settings)
    sharing = tier = None
    if cache is not None:
        secret = settings.cache_secret.encode(errors="surrogateescape")
        store = sharing = SharingStore(store, cache, settings.cache_ttl_s, secret)
    if settings.tier:
        store = tier = TieredStore(store, Path(settings.tier), settings.tier_size, settings.tier_valid_s)
    return store, sharing, tier


# Where an app is among several.
_MOUNTS = {"kv": "kv", "documents": "docs"}


def _is_mounted(settings: Settings, name: str) -> bool:
    """Whether an app is below a path of its own: one that is alone is at /, and so are images among several."""
    return len(settings.apps) > 1 and name != "images"


@contextlib.asynccontextmanager
async def _starting_images(
    settings: Settings, store: Store, codings: Codings, metrics: Metrics
) -> AsyncIterator[tuple[Images, Pool, Ready]]:
    """The images app and its workers."""
    script = _read_script(settings)
    pool = Pool(_pool_settings(settings, script))
    ready = await pool.start()
    try:
        _check_formats(settings, ready)
        cache: Cache[Any, Rendition] = Cache(settings.cache_size, weigh)
        intermediates = Intermediates(_pyramid_rules(settings), store, pool)
        images = Images(_images_settings(settings, script), store, pool, cache, intermediates, codings)
        recoder = Recoder(store, pool)
        metrics.watch(lambda: _read_pool(pool, _pool_settings(settings, script)))
        metrics.watch(lambda: _read_cache(cache, settings.cache_size))
        metrics.watch(lambda: _read_intermediates(intermediates))
        metrics.watch(lambda: _read_recoder(recoder))
        recoding = asyncio.create_task(recoder.run()) if settings.recode else None
        try:
            yield images, pool, ready
        finally:
            if recoding is not None:
                recoding.cancel()
                await asyncio.gather(recoding, return_exceptions=True)
            await intermediates.stop()
            await images.drain()
    finally:
        await pool.stop()


@contextlib.asynccontextmanager
async def open_originals(settings: Settings) -> AsyncIterator[tuple[Store, Originals, int]]:
    """A store, what takes originals into it as a service with these settings would, and its count of workers."""
    store = _open_store(settings)
    try:
        pool = Pool(_pool_settings(settings, None))
        _check_formats(settings, await pool.start())
        try:
            yield store, Originals(store, pool, _limits(settings), _formats(settings)), count_workers(settings)
        finally:
            await pool.stop()
    finally:
        await store.close()


def _open_store(settings: Settings) -> Store:
    return open_store(settings.store, durability=settings.durability, timeout_s=settings.store_timeout_s)


@contextlib.asynccontextmanager
async def _starting_values(settings: Settings, store: Store, coders: Coders) -> AsyncIterator[KeyValue]:
    """The key-value app, and the removal of what expires."""
    app = KeyValue(_values_settings(settings), store, coders)
    sweeping = asyncio.create_task(app.values.keep_sweeping())
    try:
        yield app
    finally:
        sweeping.cancel()
        await asyncio.gather(sweeping, return_exceptions=True)


@contextlib.asynccontextmanager
async def _coding(settings: Settings, store: Store, metrics: Metrics) -> AsyncIterator[Codings]:
    """The coded copies of a store, which apps share."""
    coders = Coders(settings.coding_memory)
    try:
        codings = Codings(store, coders, settings.zstd_level, settings.coded_copies)
        metrics.watch(lambda: _read_codings(codings, coders, settings.coding_memory))
        try:
            yield codings
        finally:
            await codings.stop()
    finally:
        coders.close()


@contextlib.asynccontextmanager
async def _publishing(metrics: Metrics) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(metrics.publishing())
        except OSError as exc:
            raise CannotStart(f"metrics_dir cannot be used: {exc}") from exc
        yield


def _find_health(service: Service, pool: Pool | None, store: Store, *, shared: bool) -> Health:
    """What is asked for every second or so: nothing here waits, and the store's answer takes a microsecond."""
    draining = service.draining and not (shared and service.metrics.others_serve())
    try:
        if store.near is not None:
            store.near.record(b"health")
    except StoreDown:
        store_answers = False
    except Elsewhere:
        # What is at hand is served, however the store is.
        store_answers = True
    else:
        # Of a cluster some may be away: what the others have is still served.
        store_answers = not store.guards or not all(guard.is_away for guard in store.guards)
    return judge_health(draining=draining, workerless_s=pool.workerless_s if pool else 0.0, store_answers=store_answers)


def _read_pool(pool: Pool, settings: PoolSettings) -> Iterator[Reading]:
    for lane, waiting in pool.queues.items():
        yield Reading("uvimg_queue_jobs", (lane,), waiting)
        yield Reading("uvimg_queue_limit_jobs", (lane,), settings.queue_limit_of(lane))
        yield Reading("uvimg_jobs", (lane,), pool.given[lane])
        yield Reading("uvimg_jobs_refused", (lane,), pool.refused[lane])
    yield Reading("uvimg_job_timeouts", (), pool.timeouts)
    yield Reading("uvimg_worker_restarts", ("died",), pool.died)
    yield Reading("uvimg_worker_restarts", ("recycled",), pool.recycled)
    for family, (busy, idle) in (("uvimg_workers", pool.workers), ("uvimg_slow_workers", pool.slow_workers)):
        yield Reading(family, ("busy",), busy)
        yield Reading(family, ("idle",), idle)
    yield Reading("uvimg_workers_wanted", (), settings.workers)


def _read_cache(cache: Cache[Any, Rendition], limit_bytes: int) -> Iterator[Reading]:
    yield Reading("uvimg_cache_entries", (), len(cache))
    yield Reading("uvimg_cache_bytes", (), cache.size_bytes)
    yield Reading("uvimg_cache_limit_bytes", (), limit_bytes)


def _read_codings(codings: Codings, coders: Coders, limit_bytes: int) -> Iterator[Reading]:
    for why, count in codings.made.items():
        yield Reading("uvimg_codings", (why,), count)
    yield Reading("uvimg_coding_bytes", (), coders.held_bytes)
    yield Reading("uvimg_coding_limit_bytes", (), limit_bytes)
    yield Reading("uvimg_codings_wanted", (), codings.waiting)


def _read_intermediates(intermediates: Intermediates) -> Iterator[Reading]:
    counts = intermediates.counts
    yield Reading("uvimg_intermediates_made", (), counts.made)
    yield Reading("uvimg_intermediates_made_bytes", (), counts.made_bytes)
    yield Reading("uvimg_intermediates_failed", (), counts.failed)
    yield Reading("uvimg_intermediates_used", (), counts.used)


def _read_recoder(recoder: Recoder) -> Iterator[Reading]:
    yield Reading("uvimg_recoded", ("smaller",), recoder.counts.smaller)
    yield Reading("uvimg_recoded", ("left",), recoder.counts.left)
    yield Reading("uvimg_recoded_saved_bytes", (), recoder.counts.saved_bytes)


def _read_store(store: Store) -> Iterator[Reading]:
    measures = None
    # What else there is to tell matters most when the store is down.
    with contextlib.suppress(StoreDown):
        measures = store.measure()
    if measures is not None:
        yield Reading("uvimg_store_blobs", (), measures.blobs)
        yield Reading("uvimg_store_names", (), measures.names)
        yield Reading("uvimg_store_database_bytes", (), measures.database_bytes)
        yield Reading("uvimg_store_free_bytes", (), measures.free_bytes)


def _read_tier_room(tier: TieredStore, limit_bytes: int) -> Iterator[Reading]:
    yield Reading("uvimg_tier_bytes", (), tier.kept_bytes)
    yield Reading("uvimg_tier_limit_bytes", (), limit_bytes)


def _read_tier(tier: TieredStore) -> Iterator[Reading]:
    yield Reading("uvimg_tier_blobs", ("here",), tier.hits)
    yield Reading("uvimg_tier_blobs", ("fetched",), tier.misses)


def _read_guards(guards: Sequence[Guard]) -> Iterator[Reading]:
    for guard in guards:
        yield Reading("uvimg_backend_away", (guard.name,), guard.is_away)
        yield Reading("uvimg_backend_failures", (guard.name,), guard.failures)
        yield Reading("uvimg_backend_calls_refused", (guard.name,), guard.refused)


def _read_sharing(sharing: SharingStore) -> Iterator[Reading]:
    yield from _read_guards(sharing.cache_guards)
    for outcome, count in msgspec.structs.asdict(sharing.tally).items():
        yield Reading("uvimg_shared_cache_calls", (outcome,), count)


# Settings, as each part sees them


class _Unchanging:
    """A store that is not near gives no answers that last until it changes."""

    def version(self) -> int:
        return 0


def _check_formats(settings: Settings, ready: Ready) -> None:
    """Ask libvips what it can do, never assume."""
    missing = [format for format in settings.allowed_types if format not in ready.reads]
    if missing:
        raise CannotStart(f"allowed_types names {', '.join(missing)}, which libvips {ready.libvips} here cannot read")
    if settings.format != "none" and settings.format not in ready.writes:
        raise CannotStart(f"format is {settings.format}, which libvips {ready.libvips} here cannot write")


def count_workers(settings: Settings) -> int:
    """Image workers in all: as many as there are cores for this service, where nobody says."""
    return settings.workers or usable_cores()


# How a script is to be read, and its text.
_Script = tuple[Learn, bytes]
# More text than anybody writes; it goes to every worker.
_LONGEST_SCRIPT = 1 << 20
# zimg's scripts count as syslog does.
_PRINTED = {"debug": 7, "info": 6, "warning": 4, "error": 3}


def _read_script(settings: Settings) -> _Script | None:
    """The script of the types, if there is one. It is read here, for a worker may open no file."""
    if not settings.script or settings.disable_type:
        return None
    path = Path(settings.script)
    try:
        text = path.read_bytes()
    except OSError as exc:
        raise CannotStart(f"script {path}: {exc.strerror}") from exc
    if len(text) > _LONGEST_SCRIPT:
        raise CannotStart(f"script {path}: {len(text)} bytes, where at most {_LONGEST_SCRIPT} are read")
    name = path.name if path.name.isprintable() else ascii(path.name)
    return Learn(name, _PRINTED[settings.log_level], _rules(settings)), text


def _pool_settings(settings: Settings, script: _Script | None) -> PoolSettings:
    return PoolSettings(
        workers=count_workers(settings),
        queue_limit=settings.queue_limit,
        slow_queue_limit=settings.slow_queue_limit,
        timeout_s=settings.worker_timeout_s,
        memory_bytes=settings.worker_memory,
        jobs_per_worker=settings.worker_jobs,
        sandbox=settings.sandbox,
        formats=_formats(settings),
        script=script,
    )


def _operations_settings(settings: Settings) -> OperationsSettings:
    return OperationsSettings(
        rule=None if settings.operations_listen else parse_rules(settings.admin_rule),
        trusted_proxies=tuple(parse_network(proxy) for proxy in settings.trusted_proxies),
    )


def _documents_settings(settings: Settings) -> DocumentsSettings:
    return DocumentsSettings(
        mount="/docs" if _is_mounted(settings, "documents") else "",
        headers=_fold_headers(settings.document_headers),
        forcing=settings.compression_parameter,
        zstd_level=settings.zstd_level,
        max_bytes=settings.max_size,
        write_rule=parse_rules(settings.document_write_rule),
        download_rule=parse_rules(settings.download_rule),
        admin_rule=parse_rules(settings.admin_rule),
        trusted_proxies=tuple(parse_network(proxy) for proxy in settings.trusted_proxies),
    )


def _values_settings(settings: Settings) -> KeyValueSettings:
    return KeyValueSettings(
        dialect=settings.kv_dialect,
        max_bytes=settings.kv_max_size,
        read_rule=parse_rules(settings.kv_read_rule),
        write_rule=parse_rules(settings.kv_write_rule),
        trusted_proxies=tuple(parse_network(proxy) for proxy in settings.trusted_proxies),
        depth=1 if _is_mounted(settings, "kv") else 0,
    )


def _rules(settings: Settings) -> Rules:
    return Rules(
        quality=settings.quality,
        format=parse_output_format(settings.format),
        background=config.parse_colour(settings.background),
        zoom_up=not settings.disable_zoom_up,
        max_side=settings.max_output_side,
        max_pixels=settings.max_output_pixels,
        max_frames=settings.max_output_frames,
        fast_shrink=settings.fast_shrink,
        webp_effort=settings.webp_effort,
        avif_effort=settings.avif_effort,
        gif_effort=settings.gif_effort,
        png_compression=settings.png_compression,
    )


def _limits(settings: Settings) -> Limits:
    return Limits(
        max_pixels=settings.max_pixels,
        max_side=settings.max_side,
        max_frames=settings.max_frames,
        max_progressive_pixels=settings.max_progressive_pixels,
    )


def _formats(settings: Settings) -> tuple[Format, ...]:
    return cast(tuple[Format, ...], settings.allowed_types)


def _images_settings(settings: Settings, script: _Script | None) -> ImagesSettings:
    return ImagesSettings(
        rules=_rules(settings),
        limits=_limits(settings),
        formats=_formats(settings),
        max_bytes=settings.max_size,
        save_new=int(settings.save_new),
        recode=settings.recode,
        disable_args=settings.disable_args,
        types=Types({} if settings.disable_type else dict(settings.types.by_name), script is not None),
        script_tag="" if script is None else _tag_script(*script),
        upload_rule=parse_rules(settings.upload_rule),
        download_rule=parse_rules(settings.download_rule),
        admin_rule=parse_rules(settings.admin_rule),
        trusted_proxies=tuple(parse_network(proxy) for proxy in settings.trusted_proxies),
        image_headers=_fold_headers(settings.image_headers),
        port=settings.port,
        index_page=_read_page("index.html", settings.index_page),
        admin_page=_read_page("admin.html", settings.admin_page),
    )


def _tag_script(learn: Learn, text: bytes) -> str:
    """What tells the renditions of this script, under these rules, from those of another one."""
    return hashlib.sha256(msgspec.msgpack.encode((text, learn.rules))).hexdigest()[:16]


def _pyramid_rules(settings: Settings) -> PyramidRules:
    return PyramidRules(min_pixels=settings.intermediates_from, max_percent=settings.intermediates_percent)


def _fold_headers(lines: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Fields of equal name as one (RFC 9110 5.3), in the spelling of the first."""
    folded: dict[str, tuple[str, str]] = {}
    for name, value in map(config.parse_header, lines):
        known = folded.get(name.lower())
        folded[name.lower()] = (known[0], f"{known[1]}, {value}") if known else (name, value)
    return tuple(folded.values())


def _read_page(name: str, path: str) -> bytes:
    if path:
        return Path(path).read_bytes()
    return resources.files("uvimg.web.page").joinpath(name).read_bytes()
