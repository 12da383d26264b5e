"""The process that serves: settings → a service behind a front-end; start, announce, drain, stop.

Order matters: the port is bound first (what is wrong with it is found at once), then the service is started;
listening comes last (nobody is let in before there is something to answer with), and all of it backwards at the end.
"""

import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
import ssl
from collections.abc import Callable

from uvimg import __version__, config, logs, systemd
from uvimg.assembly import CannotStart, count_workers, start_service
from uvimg.config import ConfigError, Settings
from uvimg.core.place import Tcp, parse_place
from uvimg.imaging import Ready
from uvimg.service import Service
from uvimg.web import FrontEnd, WebSettings
from uvimg.web.aiohttp import AiohttpFrontEnd
from uvimg.web.listen import CannotListen, open_sockets, show_address
from uvimg.web.streams import StreamsFrontEnd
from uvimg.web.tls import make_context
from uvimg.web.transport import TransportFrontEnd

log = logging.getLogger("uvimg")


_FRONT_ENDS: dict[str, Callable[[Service, WebSettings], FrontEnd]] = {
    "aiohttp": AiohttpFrontEnd,
    "streams": StreamsFrontEnd,
    "transport": TransportFrontEnd,
}


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
    web_settings = make_web_settings(settings)
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
            await front_end.start(listeners)
            try:
                announce(_describe(settings, listeners, ready))
                systemd.tell_ready()
                await stop.wait()
                systemd.tell_stopping()
                service.draining = True
                await asyncio.sleep(settings.drain_delay_s)
                log.info("stopping: requests in flight have %g s", settings.grace_s)
            finally:
                await front_end.stop()
    log.info("stopped")


def make_web_settings(settings: Settings) -> WebSettings:
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


def _describe(settings: Settings, listeners: list[socket.socket], ready: Ready) -> str:
    """The line that a person waits for."""
    scheme = "https" if settings.tls_certificate else "http"
    return (
        f"uvimg {__version__} is ready: {' '.join(show_address(each, scheme) for each in listeners)}  "
        f"(store {settings.store}, workers {count_workers(settings)}, libvips {ready.libvips}, "
        f"confined by {', '.join(ready.confined_by) or 'nothing'})"
    )
