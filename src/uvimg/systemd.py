"""What systemd hands over and wants to hear: sockets that it has opened, and how the service is.

Both are a variable of the environment and a convention (sd_listen_fds(3), sd_notify(3)); without them nothing happens.
"""

import logging
import os
import socket
import time

from uvimg.core.place import Inherited

log = logging.getLogger("uvimg")

_FIRST_FD = 3
# Not for those that we start: they would speak for us, or take our sockets for theirs.
VARIABLES = ("NOTIFY_SOCKET", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


def inherited_places() -> list[Inherited]:
    """The sockets of socket activation, where they are meant for this process."""
    count = os.environ.get("LISTEN_FDS", "")
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or not count.isdecimal():
        return []
    return [Inherited(_FIRST_FD + number) for number in range(min(int(count), 1000))]


def tell_ready() -> None:
    _tell("READY=1")


def tell_reloading() -> None:
    """`tell_ready` says when it is over."""
    _tell(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")


def tell_stopping() -> None:
    _tell("STOPPING=1")


def _tell(text: str) -> None:
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as speaker:
            # Whoever does not listen must not stop us.
            speaker.setblocking(False)
            # An abstract name is written with @ and begins with NUL.
            speaker.sendto(text.encode(), "\0" + path[1:] if path[0] == "@" else path)
    except OSError as exc:
        log.warning("systemd could not be told %s: %s", text.partition("\n")[0], exc)
