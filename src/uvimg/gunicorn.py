"""What gunicorn runs: `gunicorn -c conf/gunicorn.py`, or `gunicorn uvimg.gunicorn:application -k CLASS` without it.

The classes are aiohttp's, `aiohttp.GunicornUVLoopWebWorker` or `aiohttp.GunicornWebWorker`. They run what this
coroutine gives them in each of gunicorn's workers, on its loop: a runner, so that the same front-end serves here as
in a process of our own, gate, deadlines and last call included. Settings come from the environment and UVIMG_CONFIG.
"""

import asyncio
import contextlib
import logging

from aiohttp import web

from uvimg import config, logs
from uvimg.app import describe_workers, make_web_settings, start_service
from uvimg.assembly import CannotStart
from uvimg.config import ConfigError, Settings
from uvimg.core.backend import hide_secrets
from uvimg.core.errors import UvimgError
from uvimg.imaging.pool import WorkerDied
from uvimg.metrics import Reading
from uvimg.web.aiohttp import AiohttpFrontEnd

log = logging.getLogger("uvimg")

# gunicorn ends on this status of a worker instead of starting another one for ever.
_CANNOT_BOOT = 3


async def application() -> web.AppRunner:
    """The service for one of gunicorn's workers, not started yet."""
    try:
        settings = config.load({})
    except ConfigError as exc:
        raise _give_up(str(exc)) from exc
    logs.set_up(settings.log, settings.log_level)
    return _Runner(settings)


def _give_up(text: str) -> SystemExit:
    log.error("%s", text)
    return SystemExit(_CANNOT_BOOT)


class _Runner(web.AppRunner):
    """What gunicorn's worker knows of a server: it listens, counts requests, and says when to begin and to end."""

    def __init__(self, settings: Settings) -> None:
        # Of the application nothing is used; a runner has one.
        super().__init__(web.Application())
        self._settings = settings
        self._started = contextlib.AsyncExitStack()
        self._front_end: AiohttpFrontEnd | None = None

    @property
    def server(self) -> web.Server | None:
        return None if self._front_end is None else self._front_end.server

    async def setup(self) -> None:
        try:
            web_settings = make_web_settings(self._settings)
            service, ready = await self._started.enter_async_context(start_service(self._settings, has_siblings=True))
        except UvimgError as exc:
            raise _give_up(exc.detail) from exc
        except (ConfigError, CannotStart, WorkerDied) as exc:
            raise _give_up(str(exc)) from exc
        self._service = service
        front_end = self._front_end = AiohttpFrontEnd(service, web_settings)
        service.metrics.watch(lambda: [Reading("uvimg_connections_open", ("aiohttp",), front_end.open_connections)])
        await self._front_end.start([])
        log.info("ready (store %s%s)", hide_secrets(self._settings.store), describe_workers(self._settings, ready))

    async def cleanup(self) -> None:
        if self._front_end is not None:
            self._service.draining = True
            await self._service.metrics.publish()
            await asyncio.sleep(self._settings.drain_delay_s)
        log.info("stopping: requests in flight have %g s", self._settings.grace_s)
        for site in self.sites:
            await site.stop()
        if self._front_end is not None:
            await self._front_end.stop()
        await self._started.aclose()
        log.info("stopped")
