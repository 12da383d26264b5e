"""Settings → parts, in order; start, serve, drain, stop. Alone knows the settings.

Order matters: the port is bound and the store opened first (what is wrong with them is found at once), then the
workers are started; listening comes last (nobody is let in before there is something to answer with), and all of
it backwards at the end. A listener of /health and /metrics alone is open for longer than any other: it tells
whoever balances load that this is the end.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any, cast

from uvimg import __version__, config, logs, systemd
from uvimg.apps.images import Images, ImagesSettings, Rendition, weigh
from uvimg.apps.operations import PATHS, Health, Operations, OperationsSettings, judge_health
from uvimg.cache import Cache
from uvimg.config import ConfigError, Settings
from uvimg.core.access import parse_network, parse_rules
from uvimg.core.errors import StoreDown
from uvimg.core.formats import Format, parse_output_format
from uvimg.core.place import Tcp, parse_place
from uvimg.core.plan import Rules
from uvimg.imaging import Limits, Ready
from uvimg.imaging.pool import Pool, PoolSettings
from uvimg.metrics import Metrics, Reading, watch_process
from uvimg.service import Service
from uvimg.store import Store, open_store
from uvimg.web import FrontEnd, WebSettings
from uvimg.web.aiohttp import AiohttpFrontEnd
from uvimg.web.listen import CannotListen, bind_sockets, open_sockets, show_address
from uvimg.web.streams import StreamsFrontEnd
from uvimg.web.tls import make_context
from uvimg.web.transport import TransportFrontEnd

log = logging.getLogger("uvimg")

# For answers about health and metrics that are on their way at the very end.
_LAST_WORDS_S = 1.0

_FRONT_ENDS: dict[str, Callable[[Service, WebSettings], FrontEnd]] = {
    "aiohttp": AiohttpFrontEnd,
    "streams": StreamsFrontEnd,
    "transport": TransportFrontEnd,
}


class CannotStart(Exception):
    """The service cannot be started as configured; the message is one readable line."""


async def serve(settings: Settings, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. `announce` gets one line when the first request can be answered.

    Raises ConfigError, CannotStart, StoreDown and WorkerDied when it cannot be started as configured.
    """
    logs.set_up(settings.log, settings.log_level)
    for name, value in config.changed(settings).items():
        log.info("setting %s = %s", name, value)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    web_settings = _web_settings(settings)
    places = [parse_place(text) for text in settings.listen] or systemd.inherited_places()
    with contextlib.ExitStack() as sockets:
        try:
            (listeners,) = sockets.enter_context(open_sockets(places or [Tcp(settings.host, settings.port)]))
        except CannotListen as exc:
            raise CannotStart(str(exc)) from exc
        ports = [each.getsockname()[1] for each in listeners if each.family != socket.AF_UNIX]
        settings = dataclasses.replace(settings, port=(ports or [settings.port])[0])
        async with start_service(settings) as (service, ready):
            front_end = _FRONT_ENDS[settings.front_end](service, web_settings)
            service.metrics.watch(
                lambda: [Reading("uvimg_connections_open", (settings.front_end,), front_end.open_connections)]
            )
            await front_end.start(listeners)
            try:
                announce(_describe(settings, listeners, ready))
                systemd.tell_ready()
                await stop.wait()
                systemd.tell_stopping()
                service.draining = True
                await service.metrics.publish()
                await asyncio.sleep(settings.drain_delay_s)
                log.info("stopping: requests in flight have %g s", settings.grace_s)
            finally:
                await front_end.stop()
    log.info("stopped")


@contextlib.asynccontextmanager
async def start_service(settings: Settings) -> AsyncIterator[tuple[Service, Ready]]:
    """The service with everything behind it, and what its workers can do; stopped in order at the end."""
    metrics = Metrics(settings.metrics_dir)
    with _operations_sockets(settings) as listeners:
        async with _publishing(metrics):
            store = open_store(settings.store)
            try:
                pool = Pool(_pool_settings(settings))
                ready = await pool.start()
                try:
                    _check_formats(settings, ready)
                    cache: Cache[Any, Rendition] = Cache(settings.cache_size, weigh)
                    images = Images(_images_settings(settings), store, pool, cache)
                    access_log = logs.make_access_log() if settings.access_log else None
                    version = (store.near or _Unchanging()).version

                    def health() -> Health:
                        return _find_health(service, pool, store)

                    operations = Operations(_operations_settings(settings), metrics, health)
                    pages = {} if settings.operations_listen else dict.fromkeys(PATHS, operations)
                    service = Service(images, access_log, version, metrics, pages=pages)
                    _watch(metrics, service, pool, cache, store, settings)
                    metrics.info = {"version": __version__, "libvips": ready.libvips}
                    beside = Service(operations, access_log, version, metrics)
                    # One that drains looks whether others serve.
                    await metrics.publish()
                    async with _serving_operations(beside, settings, listeners):
                        try:
                            yield service, ready
                        finally:
                            await images.drain()
                finally:
                    await pool.stop()
            finally:
                await store.close()


# Health and metrics


@contextlib.contextmanager
def _operations_sockets(settings: Settings) -> Iterator[list[socket.socket]]:
    """The listener of /health and /metrics alone, if there is one. CannotStart when it cannot be had."""
    with contextlib.ExitStack() as sockets:
        listeners: list[socket.socket] = []
        if settings.operations_listen:
            place = parse_place(settings.operations_listen)
            try:
                if isinstance(place, Tcp) and settings.metrics_dir:
                    # Processes that serve together share it: any of them answers for all. Else two services at one
                    # port would be a mistake that nobody sees.
                    listeners = bind_sockets(place.host, place.port, shared=True)
                    for listener in listeners:
                        sockets.enter_context(listener)
                else:
                    (listeners,) = sockets.enter_context(open_sockets([place]))
            except OSError as exc:
                raise CannotStart(f"cannot listen on {place}: {exc.strerror or exc}") from exc
            except CannotListen as exc:
                raise CannotStart(str(exc)) from exc
        yield listeners


@contextlib.asynccontextmanager
async def _serving_operations(
    service: Service, settings: Settings, listeners: list[socket.socket]
) -> AsyncIterator[None]:
    if not listeners:
        yield
        return
    web_settings = dataclasses.replace(_web_settings(settings), grace_s=_LAST_WORDS_S, tls=None)
    front_end = _FRONT_ENDS[settings.front_end](service, web_settings)
    await front_end.start(listeners)
    try:
        log.info("health and metrics at %s", ", ".join(map(show_address, listeners)))
        yield
    finally:
        await front_end.stop()


@contextlib.asynccontextmanager
async def _publishing(metrics: Metrics) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(metrics.publishing())
        except OSError as exc:
            raise CannotStart(f"metrics_dir cannot be used: {exc}") from exc
        yield


def _find_health(service: Service, pool: Pool, store: Store) -> Health:
    """What is asked for every second or so: nothing here waits, and the store's answer takes a microsecond."""
    draining = service.draining and not service.metrics.others_serve()
    try:
        if store.near is not None:
            store.near.record(b"health")
    except StoreDown:
        store_answers = False
    else:
        store_answers = True
    return judge_health(draining=draining, workerless_s=pool.workerless_s, store_answers=store_answers)


def _watch(
    metrics: Metrics, service: Service, pool: Pool, cache: Cache[Any, Rendition], store: Store, settings: Settings
) -> None:
    metrics.watch(watch_process(lambda: pool.pids, lambda: service.draining))
    metrics.watch(lambda: _read_pool(pool, _pool_settings(settings)))
    metrics.watch(lambda: _read_cache(cache, settings.cache_size))
    metrics.view(lambda: _read_store(store))


def _read_pool(pool: Pool, settings: PoolSettings) -> Iterator[Reading]:
    for lane, waiting in pool.queues.items():
        yield Reading("uvimg_queue_jobs", (lane,), waiting)
        yield Reading("uvimg_queue_limit_jobs", (lane,), settings.queue_limit)
        yield Reading("uvimg_jobs", (lane,), pool.given[lane])
        yield Reading("uvimg_jobs_refused", (lane,), pool.refused[lane])
    yield Reading("uvimg_job_timeouts", (), pool.timeouts)
    yield Reading("uvimg_worker_restarts", ("died",), pool.died)
    yield Reading("uvimg_worker_restarts", ("recycled",), pool.recycled)
    yield Reading("uvimg_workers", ("idle",), pool.idle)
    yield Reading("uvimg_workers", ("busy",), len(pool.pids) - pool.idle)
    yield Reading("uvimg_workers_wanted", (), settings.workers)


def _read_cache(cache: Cache[Any, Rendition], limit_bytes: int) -> Iterator[Reading]:
    yield Reading("uvimg_cache_entries", (), len(cache))
    yield Reading("uvimg_cache_bytes", (), cache.size_bytes)
    yield Reading("uvimg_cache_limit_bytes", (), limit_bytes)


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


def _count_workers(settings: Settings) -> int:
    return settings.workers or len(os.sched_getaffinity(0))


def _pool_settings(settings: Settings) -> PoolSettings:
    return PoolSettings(
        workers=_count_workers(settings),
        queue_limit=settings.queue_limit,
        timeout_s=settings.worker_timeout_s,
        memory_bytes=settings.worker_memory,
        jobs_per_worker=settings.worker_jobs,
        sandbox=settings.sandbox,
        formats=cast(tuple[Format, ...], settings.allowed_types),
    )


def _web_settings(settings: Settings) -> WebSettings:
    return WebSettings(
        keepalive_s=settings.keepalive_s,
        grace_s=settings.grace_s,
        backlog=settings.backlog,
        max_connections=settings.max_connections,
        memo_bytes=settings.memo_size,
        tls=_make_tls(settings),
    )


def _make_tls(settings: Settings) -> ssl.SSLContext | None:
    if not settings.tls_certificate:
        return None
    try:
        return make_context(settings.tls_certificate, settings.tls_key)
    except ValueError as exc:
        raise ConfigError(f"tls_certificate and tls_key: {exc}") from exc


def _operations_settings(settings: Settings) -> OperationsSettings:
    return OperationsSettings(
        rule=None if settings.operations_listen else parse_rules(settings.admin_rule),
        trusted_proxies=tuple(parse_network(proxy) for proxy in settings.trusted_proxies),
    )


def _images_settings(settings: Settings) -> ImagesSettings:
    return ImagesSettings(
        rules=Rules(
            quality=settings.quality,
            format=parse_output_format(settings.format),
            background=config.parse_colour(settings.background),
            zoom_up=not settings.disable_zoom_up,
            max_side=settings.max_output_side,
            max_pixels=settings.max_output_pixels,
            max_frames=settings.max_output_frames,
            webp_effort=settings.webp_effort,
            avif_effort=settings.avif_effort,
            gif_effort=settings.gif_effort,
            png_compression=settings.png_compression,
        ),
        limits=Limits(
            max_pixels=settings.max_pixels,
            max_side=settings.max_side,
            max_frames=settings.max_frames,
            max_progressive_pixels=settings.max_progressive_pixels,
        ),
        formats=cast(tuple[Format, ...], settings.allowed_types),
        max_bytes=settings.max_size,
        save_new=int(settings.save_new),
        disable_args=settings.disable_args,
        upload_rule=parse_rules(settings.upload_rule),
        download_rule=parse_rules(settings.download_rule),
        admin_rule=parse_rules(settings.admin_rule),
        trusted_proxies=tuple(parse_network(proxy) for proxy in settings.trusted_proxies),
        image_headers=_fold_headers(settings.image_headers),
        port=settings.port,
        index_page=_read_page("index.html", settings.index_page),
        admin_page=_read_page("admin.html", settings.admin_page),
    )


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


def _describe(settings: Settings, listeners: list[socket.socket], ready: Ready) -> str:
    """The line that a person waits for."""
    scheme = "https" if settings.tls_certificate else "http"
    return (
        f"uvimg {__version__} is ready: {' '.join(show_address(each, scheme) for each in listeners)}  "
        f"(store {settings.store}, workers {_count_workers(settings)}, libvips {ready.libvips}, "
        f"confined by {', '.join(ready.confined_by) or 'nothing'})"
    )
