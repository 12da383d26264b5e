"""Twisted's echo server: a Protocol on its epoll reactor. Argument: the port."""

import sys

from twisted.internet import epollreactor

epollreactor.install()

from twisted.internet import protocol, reactor  # noqa: E402


class Echo(protocol.Protocol):
    def connectionMade(self) -> None:
        self.transport.setTcpNoDelay(True)

    def dataReceived(self, data: bytes) -> None:
        self.transport.write(data)


reactor.listenTCP(int(sys.argv[1]), protocol.Factory.forProtocol(Echo), backlog=4096, interface="127.0.0.1")
reactor.run()
