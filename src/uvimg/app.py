"""The process that serves: settings → a service behind a front-end; start, announce, drain, stop.

Order matters: the port is bound first (what is wrong with it is found at once), then the service is started;
listening comes last (nobody is let in before there is something to answer with), and all of it backwards at the end.
A listener of /health and /metrics alone is open for longer than any other: it tells whoever balances load that this
is the end.
"""

import asyncio
import contextlib
import dataclasses
import gc
import logging
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator

from uvimg import __version__, config, logs, systemd
from uvimg.assembly import CannotStart, assemble, count_workers
from uvimg.config import ConfigError, Settings
from uvimg.core.backend import hide_secrets
from uvimg.core.place import Tcp, parse_place
from uvimg.imaging import Ready
from uvimg.metrics import Reading
from uvimg.service import Service
from uvimg.supervisor import RETIRE
from uvimg.web import FrontEnd, WebSettings
from uvimg.web.listen import CannotListen, bind_sockets, choose_places, open_sockets, show_address
from uvimg.web.tls import make_context

log = logging.getLogger("uvimg")

# For answers about health and metrics that are on their way at the very end.
_LAST_WORDS_S = 1.0


def _make_front_end(service: Service, name: str, settings: WebSettings) -> FrontEnd:
    # Each where it is chosen: aiohttp alone takes a quarter of all the time that a start takes.
    match name:
        case "aiohttp":
            from uvimg.web.aiohttp import AiohttpFrontEnd

            return AiohttpFrontEnd(service, settings)
        case "streams":
            from uvimg.web.streams import StreamsFrontEnd

            return StreamsFrontEnd(service, settings)
    from uvimg.web.transport import TransportFrontEnd

    return TransportFrontEnd(service, settings)


async def serve(settings: Settings, announce: Callable[[str], None], *, supervised: bool = False) -> None:
    """Serve until SIGTERM or SIGINT. `announce` gets one line when the first request can be answered.

    A `supervised` process has siblings on the same sockets, and leaves reloading to who started it: SIGUSR1
    retires it in favour of its successor.

    Raises ConfigError, CannotStart, StoreDown and WorkerDied when it cannot be started as configured.
    """
    logs.set_up(settings.log, settings.log_level)
    for name, value in config.changed(settings).items():
        log.info("setting %s = %s", name, value)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    has_successor = False

    def retire() -> None:
        nonlocal has_successor
        has_successor = True
        stop.set()

    if supervised:
        loop.add_signal_handler(RETIRE, retire)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    else:
        loop.add_signal_handler(signal.SIGHUP, log.warning, "reloading needs processes, at least 1: nothing was done")
    web_settings = make_web_settings(settings)
    places = choose_places(settings.listen, settings.host, settings.port)
    with contextlib.ExitStack() as sockets:
        try:
            (listeners,) = sockets.enter_context(open_sockets(places))
        except CannotListen as exc:
            raise CannotStart(str(exc)) from exc
        ports = [each.getsockname()[1] for each in listeners if each.family != socket.AF_UNIX]
        settings = dataclasses.replace(settings, port=(ports or [settings.port])[0])
        async with start_service(settings, has_siblings=supervised) as (service, ready):
            front_end = _make_front_end(service, settings.front_end, web_settings)
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
                if not has_successor:
                    await asyncio.sleep(settings.drain_delay_s)
                log.info("stopping: requests in flight have %g s", settings.grace_s)
            finally:
                await front_end.stop()
    log.info("stopped")


@contextlib.asynccontextmanager
async def start_service(
    settings: Settings, *, has_siblings: bool = False
) -> AsyncIterator[tuple[Service, Ready | None]]:
    """The service, and what its workers can do, with health and metrics on a listener of their own if they have one."""
    with _operations_sockets(settings) as listeners:
        async with (
            assemble(settings, has_siblings=has_siblings) as parts,
            _serving_operations(parts.operations, settings, listeners),
        ):
            _spare_collections()
            yield parts.service, parts.ready


# Containers made before the youngest of them are looked through for cycles. At Python's 700 a fifth of the CPU of a
# durable PUT went into looking; and a few thousand young containers weigh some hundred kilobytes.
_YOUNG = 10_000


def _spare_collections() -> None:
    """What is there now stays for good: nobody need look through it for cycles again. For a process that is ours."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 10, 10)


@contextlib.contextmanager
def _operations_sockets(settings: Settings) -> Iterator[list[socket.socket]]:
    """The listener of /health and /metrics alone, if there is one. CannotStart when it cannot be had."""
    with contextlib.ExitStack() as sockets:
        listeners: list[socket.socket] = []
        for place in map(parse_place, settings.operations_listen):
            try:
                if isinstance(place, Tcp) and settings.metrics_dir:
                    # Processes that serve together share it: any of them answers for all. Else two services at one
                    # port would be a mistake that nobody sees.
                    found = bind_sockets(place.host, place.port, shared=True)
                    for listener in found:
                        sockets.enter_context(listener)
                else:
                    (found,) = sockets.enter_context(open_sockets([place]))
                listeners += found
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
    web_settings = dataclasses.replace(make_web_settings(settings), grace_s=_LAST_WORDS_S, tls=None)
    front_end = _make_front_end(service, settings.front_end, web_settings)
    await front_end.start(listeners)
    try:
        log.info("health and metrics at %s", ", ".join(map(show_address, listeners)))
        yield
    finally:
        await front_end.stop()


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


def _describe(settings: Settings, listeners: list[socket.socket], ready: Ready | None) -> str:
    """The line that a person waits for."""
    scheme = "https" if settings.tls_certificate else "http"
    return (
        f"uvimg {__version__} is ready: {' '.join(show_address(each, scheme) for each in listeners)}  "
        f"(store {hide_secrets(settings.store)}{describe_workers(settings, ready)})"
    )


def describe_workers(settings: Settings, ready: Ready | None) -> str:
    if ready is None:
        return ""
    confined = ", ".join(ready.confined_by) or "nothing"
    return f", workers {count_workers(settings)}, libvips {ready.libvips}, confined by {confined}"
