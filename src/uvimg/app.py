"""The process that serves: settings → a service behind a front-end; start, announce, drain, stop.

Order matters: the port is bound first (what is wrong with it is found at once), then the service is started;
listening comes last (nobody is let in before there is something to answer with), and all of it backwards at the end.
"""

import asyncio
import contextlib
import dataclasses
import logging
import signal
from collections.abc import Callable

from uvimg import __version__, config, logs
from uvimg.assembly import CannotStart, count_workers, start_service
from uvimg.config import Settings
from uvimg.imaging import Ready
from uvimg.service import Service
from uvimg.web import FrontEnd, WebSettings
from uvimg.web.aiohttp import AiohttpFrontEnd
from uvimg.web.listen import bind_sockets
from uvimg.web.streams import StreamsFrontEnd
from uvimg.web.transport import TransportFrontEnd

log = logging.getLogger("uvimg")


_FRONT_ENDS: dict[str, Callable[[Service, WebSettings], FrontEnd]] = {
    "aiohttp": AiohttpFrontEnd,
    "streams": StreamsFrontEnd,
    "transport": TransportFrontEnd,
}


async def serve(settings: Settings, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. `announce` gets one line when the first request can be answered.

    Raises CannotStart, StoreDown and WorkerDied when it cannot be started as configured.
    """
    logs.set_up(settings.log, settings.log_level)
    for name, value in config.changed(settings).items():
        log.info("setting %s = %s", name, value)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        listeners = bind_sockets(settings.host, settings.port)
    except OSError as exc:
        raise CannotStart(f"cannot listen on {settings.host} port {settings.port}: {exc.strerror}") from exc
    with contextlib.ExitStack() as sockets:
        for listener in listeners:
            sockets.enter_context(listener)
        settings = dataclasses.replace(settings, port=listeners[0].getsockname()[1])
        async with start_service(settings) as (service, ready):
            front_end = _FRONT_ENDS[settings.front_end](service, web_settings(settings))
            await front_end.start(listeners)
            try:
                announce(_describe(settings, ready))
                await stop.wait()
                log.info("stopping: requests in flight have %g s", settings.grace_s)
            finally:
                await front_end.stop()
    log.info("stopped")


def web_settings(settings: Settings) -> WebSettings:
    return WebSettings(
        keepalive_s=settings.keepalive_s,
        grace_s=settings.grace_s,
        backlog=settings.backlog,
        max_connections=settings.max_connections,
    )


def _describe(settings: Settings, ready: Ready) -> str:
    """The line that a person waits for."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return (
        f"uvimg {__version__} is ready: http://{host}:{settings.port}/  "
        f"(store {settings.store}, workers {count_workers(settings)}, libvips {ready.libvips}, "
        f"confined by {', '.join(ready.confined_by) or 'nothing'})"
    )
