"""curio's echo server, over sockets or, with "streams", over streams of them. Arguments: the port, the shape."""

import sys
from typing import Any

import curio
from curio import socket


async def echo_socket(connection: Any, _peer: object) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    async with connection:
        while data := await connection.recv(102_400):
            await connection.sendall(data)


async def echo_stream(connection: Any, _peer: object) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream = connection.as_stream()
    async with stream:
        while data := await stream.read(102_400):
            await stream.write(data)


echo = echo_stream if sys.argv[2:] == ["streams"] else echo_socket
curio.run(curio.tcp_server, "127.0.0.1", int(sys.argv[1]), echo)
