"""Sockets to listen on, bound before anything is started: a port that is taken is found at once."""

import socket


def bind_sockets(host: str, port: int, *, reuse_port: bool = False) -> list[socket.socket]:
    """A socket for each address that `host` stands for. OSError when one cannot be had; then none is left open.

    With port 0 all of them get the same free port. Nobody can connect before a front-end listens.
    With `reuse_port` several processes of one user may have the same port, and the kernel chooses between them.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            listener = socket.socket(family, socket.SOCK_STREAM)
            listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                # Else [::] takes IPv4 as well, and 0.0.0.0 beside it fails.
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # What a client has not taken yet waits with us, not in the kernel: each connection may hold megabytes
            # there, and frees them in such lumps that a slow client looks like one that takes nothing.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, 131_072)
            listener.bind((address[0], port, *address[2:]))
            port = listener.getsockname()[1]
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners
