"""gevent's echo server: a greenlet for each connection. Argument: the port."""

import socket
import sys

from gevent.server import StreamServer


def echo(connection: socket.socket, _peer: object) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := connection.recv(102_400):
        connection.sendall(data)


StreamServer(("127.0.0.1", int(sys.argv[1])), echo, backlog=4096).serve_forever()
