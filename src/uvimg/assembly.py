"""Settings → the service with everything behind it, started in order and stopped backwards. No front-end yet.

Order matters: the store is opened first (what is wrong with it is found at once), then the workers are started.
Below `web`, so that an aiohttp application of ours can start a service in somebody else's process.
"""

import contextlib
import os
from collections.abc import AsyncIterator
from importlib import resources
from pathlib import Path
from typing import cast

from uvimg import config, logs
from uvimg.apps.images import Images, ImagesSettings, weigh
from uvimg.cache import Cache
from uvimg.config import Settings
from uvimg.core.access import parse_network, parse_rules
from uvimg.core.formats import Format, parse_output_format
from uvimg.core.plan import Rules
from uvimg.imaging import Limits, Ready
from uvimg.imaging.pool import Pool, PoolSettings
from uvimg.service import Service
from uvimg.store import open_store


class CannotStart(Exception):
    """The service cannot be started as configured; the message is one readable line."""


@contextlib.asynccontextmanager
async def start_service(settings: Settings) -> AsyncIterator[tuple[Service, Ready]]:
    """The service with everything behind it, and what its workers can do; stopped in order at the end."""
    store = open_store(settings.store)
    try:
        pool = Pool(_pool_settings(settings))
        ready = await pool.start()
        try:
            _check_formats(settings, ready)
            images = Images(_images_settings(settings), store, pool, Cache(settings.cache_size, weigh))
            try:
                access_log = logs.make_access_log() if settings.access_log else None
                yield Service(images, access_log, (store.near or _Unchanging()).version), ready
            finally:
                await images.drain()
        finally:
            await pool.stop()
    finally:
        await store.close()


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
    return settings.workers or len(os.sched_getaffinity(0))


def _pool_settings(settings: Settings) -> PoolSettings:
    return PoolSettings(
        workers=count_workers(settings),
        queue_limit=settings.queue_limit,
        timeout_s=settings.worker_timeout_s,
        memory_bytes=settings.worker_memory,
        jobs_per_worker=settings.worker_jobs,
        sandbox=settings.sandbox,
        formats=cast(tuple[Format, ...], settings.allowed_types),
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
