"""Sockets to listen on, bound before anything is started: a place that is taken is found at once.

For several processes there is a socket for each of them at every TCP address (SO_REUSEPORT), so that the kernel
shares connections out; unix and inherited sockets are one for all.
Surprise: what waits in a socket's queue is reset when its last descriptor closes. Who wants connections to
outlive a process keeps the sockets open himself.
"""

import asyncio
import contextlib
import errno
import os
import select
import socket
import stat
from collections.abc import Iterator, Sequence

from uvimg import systemd
from uvimg.core.place import Inherited, Place, Tcp, Unix, parse_place

# Whoever may enter the folder may connect: a proxy runs as another user. The folder's mode is the fence.
_UNIX_MODE = 0o666
_MOST_ROUNDS = 5000
_WATCHERS = 4


class CannotListen(Exception):
    """A place cannot be had; the message is one readable line."""


def choose_places(listen: Sequence[str], host: str, port: int) -> list[Place]:
    """Those that are named, else those that systemd hands over, else host and port."""
    return [parse_place(text) for text in listen] or [*systemd.inherited_places()] or [Tcp(host, port)]


@contextlib.contextmanager
def open_sockets(places: Sequence[Place], processes: int = 1) -> Iterator[list[list[socket.socket]]]:
    """The sockets of these places for each process. Closed at the end, and the unix sockets' files removed."""
    with contextlib.ExitStack() as open_ones:
        groups: list[list[socket.socket]] = [[] for _ in range(processes)]
        for place in places:
            try:
                if isinstance(place, Tcp):
                    for group, found in zip(groups, _bind_for_each(place, processes), strict=True):
                        for listener in found:
                            group.append(open_ones.enter_context(listener))
                            # At once: two that are only bound do not exclude each other (SO_REUSEADDR). Who connects
                            # waits until we are ready, as at a unix socket.
                            listener.listen()
                    continue
                if isinstance(place, Unix):
                    listener = open_ones.enter_context(_bind_unix(place.path))
                else:
                    listener = open_ones.enter_context(_adopt(place))
            except OSError as exc:
                raise CannotListen(f"cannot listen on {place}: {exc.strerror or exc}") from exc
            for group in groups:
                group.append(listener)
        yield groups


def watch_often(listener: socket.socket) -> list[socket.socket]:
    """This listener, as often as the running loop should watch it.

    libuv lets one connection in for each watcher and round; while thousands are served in a round, those who wait
    would give up, or be turned away by a full queue: 20,000 clients that connect for every request had 0.5 of nginx's
    rate with one watcher on each of two processes, and 0.75 with four, which cost a lone connection 2 µs.
    """
    # asyncio's own lets in whoever waits.
    often = 1 if isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop) else _WATCHERS
    return [listener, *(listener.dup() for _ in range(often - 1))]


async def close_servers(servers: Sequence[asyncio.Server], listeners: Sequence[socket.socket]) -> None:
    """Accept nobody else. Whoever waits in a queue is let in before: closing would reset the connection."""
    loop = asyncio.get_running_loop()
    # libuv accepts one in each round. Who comes faster than that is not waited for.
    for _ in range(_MOST_ROUNDS):
        await asyncio.sleep(0)
        if not _someone_waits(listeners):
            break
    # asyncio meets connections in tasks, which fail once their server is closed; uvloop in the call itself.
    for listener in listeners:
        loop.remove_reader(listener)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for server in servers:
        server.close()


def _someone_waits(listeners: Sequence[socket.socket]) -> bool:
    poll = select.poll()
    for listener in listeners:
        poll.register(listener, select.POLLIN)
    return bool(poll.poll(0))


def show_address(listener: socket.socket, scheme: str = "http") -> str:
    """Where it can be reached, as a browser or a proxy is told."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name if isinstance(name, str) else '@' + os.fsdecode(name[1:])}"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(name[0], name[0])
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{name[1]}/"


def bind_sockets(host: str, port: int, *, shared: bool = False) -> list[socket.socket]:
    """A socket for each address that `host` stands for. OSError when one cannot be had; then none is left open.

    With port 0 all of them get the same free port. Nobody can connect before it listens. What is `shared`
    may be bound again, by processes of the same user.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                listener = socket.socket(family, socket.SOCK_STREAM)
            except OSError as exc:
                # Every interface is there, where the kernel has no IPv6.
                if exc.errno == errno.EAFNOSUPPORT and listeners and not host:
                    continue
                raise
            listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                # Else [::] takes IPv4 as well, and 0.0.0.0 beside it fails.
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            _limit_unsent(listener)
            listener.bind((address[0], port, *address[2:]))
            port = listener.getsockname()[1]
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _limit_unsent(listener: socket.socket) -> None:
    # What a client has not taken yet waits with us, not in the kernel: each connection may hold megabytes
    # there, and frees them in such lumps that a slow client looks like one that takes nothing.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, 131_072)


def _bind_for_each(place: Tcp, processes: int) -> list[list[socket.socket]]:
    first = bind_sockets(place.host, place.port)
    if processes == 1:
        return [first]
    # Alone it has shown that nobody else listens there; shared sockets would join another server's unnoticed.
    port = first[0].getsockname()[1]
    for listener in first:
        listener.close()
    bound: list[list[socket.socket]] = []
    try:
        while len(bound) < processes:
            bound.append(bind_sockets(place.host, port, shared=True))
    except BaseException:
        for listeners in bound:
            for listener in listeners:
                listener.close()
        raise
    return bound


@contextlib.contextmanager
def _bind_unix(path: str) -> Iterator[socket.socket]:
    """A listening socket at this path. What nobody listens on any more is replaced, anything else left alone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(path)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                raise
            _check_stale(path)
            os.unlink(path)
            listener.bind(path)
        bound = os.lstat(path)
        try:
            os.chmod(path, _UNIX_MODE)
            # At once, or the next one to start would take it for stale. Who connects waits until we are ready.
            listener.listen()
            yield listener
        finally:
            with contextlib.suppress(OSError):
                # Somebody else's may stand there by now.
                if os.path.samestat(os.lstat(path), bound):
                    os.unlink(path)


def _check_stale(path: str) -> None:
    """OSError unless the path is a socket that nobody listens on."""
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise FileExistsError(errno.EEXIST, "there is a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        # A server that is too busy to answer is no dead one.
        caller.setblocking(False)
        try:
            caller.connect(path)
        except ConnectionRefusedError:
            return
        except BlockingIOError:
            pass
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _adopt(place: Inherited) -> socket.socket:
    """An inherited socket as ours. OSError when it is none that can be listened on; it is left as it is then."""
    listener = socket.socket(fileno=place.fd)
    try:
        if listener.family not in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
            raise OSError(errno.EAFNOSUPPORT, "it is no TCP or unix socket")
        if listener.type != socket.SOCK_STREAM:
            raise OSError(errno.ESOCKTNOSUPPORT, "it is no stream socket")
        name = listener.getsockname()
        if not name or (isinstance(name, tuple) and name[1] == 0) or _is_connected(listener):
            raise OSError(errno.EINVAL, "it is neither bound nor listening")
    except BaseException:
        listener.detach()
        raise
    listener.set_inheritable(False)
    if listener.family != socket.AF_UNIX:
        _limit_unsent(listener)
    return listener


def _is_connected(listener: socket.socket) -> bool:
    try:
        listener.getpeername()
    except OSError:
        return False
    return True
