"""TLS without a socket: what came in ciphertext → plaintext, plaintext → what is to be sent.

Streams and transport put it between themselves and the bytes of their sockets, so that flow control, deadlines and
half-closing stay the socket's own: the loops' TLS transports cannot half-close, and do not tell how much of an
answer a slow client has yet to take.
Surprise: whatever is received may bring something to send (`take`): a handshake's answer, a new key.
"""

import asyncio
import contextlib
import ssl
from typing import Any, cast

# A record of TLS holds so much.
RECORD_BYTES = 16_384


def make_context(certificate: str, key: str) -> ssl.SSLContext:
    """From PEM files, the certificate with its chain. ValueError with a sentence when they will not do."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Asking for new keys again and again costs a client nothing.
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    for path in (certificate, key):
        try:
            with open(path, "rb"):
                pass
        except OSError as exc:
            raise ValueError(f"{path}: {exc.strerror}") from exc
    try:
        context.load_cert_chain(certificate, key, _refuse_password)
    except ssl.SSLError as exc:
        if exc.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"the key in {key} does not belong to the certificate in {certificate}") from exc
        raise ValueError(f"{certificate} and {key} are no certificate and key in PEM") from exc
    except _Encrypted:
        raise ValueError(f"the key in {key} is encrypted; nobody is there to type its password") from None
    return context


class _Encrypted(Exception):
    pass


def _refuse_password() -> str:
    raise _Encrypted


class Tls:
    """The server's side of one connection. `receive` raises ssl.SSLError, an OSError, when the client's is no TLS."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self.established = False
        # Whether the peer has said that no more will come.
        self.ended = False

    def receive(self, data: bytes) -> bytes:
        """What these bytes say; nothing while a record is not whole, or in the handshake."""
        pieces: list[bytes] = []
        # By and by: a BIO keeps the room of the most that it ever held, on every idle connection.
        for at in range(0, len(data), RECORD_BYTES):
            self._incoming.write(data[at : at + RECORD_BYTES])
            self._read(pieces)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _read(self, pieces: list[bytes]) -> None:
        try:
            if not self.established:
                self._object.do_handshake()
                self.established = True
            while not self.ended:
                piece = self._object.read(RECORD_BYTES)
                pieces.append(piece)
                self.ended = not piece
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.ended = True

    def seal(self, data: bytes | memoryview) -> bytes:
        """These bytes as records, to be sent in this order."""
        view = memoryview(data)
        records: list[bytes] = []
        while view:
            # One at a time, for the same reason.
            view = view[self._object.write(view[:RECORD_BYTES]) :]
            records.append(self._outgoing.read())
        return b"".join(records)

    def end(self) -> bytes:
        """What tells the peer that no more will come."""
        if self.established:
            # Whether it has said so too is not waited for.
            with contextlib.suppress(ssl.SSLError):
                self._object.unwrap()
        return self._outgoing.read()

    def take(self) -> bytes:
        """What has to be sent because of what was received."""
        return self._outgoing.read()


class TlsTransport(asyncio.Transport, asyncio.Protocol):
    """Between a loop's transport and a protocol, which takes this for its transport.

    The protocol meets it before the handshake, and counts it among its connections from then on.
    """

    def __init__(self, context: ssl.SSLContext, handshake_s: float, inner: asyncio.Protocol) -> None:
        super().__init__()
        self._tls, self._handshake_s, self._inner = Tls(context), handshake_s, inner
        self._has_ended = False

    # To the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._outer = cast(asyncio.Transport, transport)
        self._deadline = asyncio.get_running_loop().call_later(self._handshake_s, self._outer.abort)
        self._inner.connection_made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._tls.ended:
            return
        try:
            plain = self._tls.receive(data)
        except ssl.SSLError:
            # With it goes what tells the peer why.
            self._send(self._tls.take())
            self._outer.close()
            return
        self._send(self._tls.take())
        if self._tls.established:
            self._deadline.cancel()
        if plain:
            self._inner.data_received(plain)
        if self._tls.ended and not self._inner.eof_received():
            self.close()

    def eof_received(self) -> bool | None:
        return True if self._tls.ended else self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    # To the protocol

    def write(self, data: Any) -> None:
        if not self._outer.is_closing():
            self._outer.write(self._tls.seal(data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._send(self._tls.end())
        self._has_ended = True
        self._outer.write_eof()

    def close(self) -> None:
        if not self._outer.is_closing():
            self._send(self._tls.end())
            self._outer.close()

    def _send(self, records: bytes) -> None:
        # Behind our own end the loops refuse even nothing.
        if records and not self._has_ended:
            self._outer.write(records)

    def abort(self) -> None:
        self._outer.abort()

    def is_closing(self) -> bool:
        return self._outer.is_closing()

    def pause_reading(self) -> None:
        self._outer.pause_reading()

    def resume_reading(self) -> None:
        self._outer.resume_reading()

    def get_write_buffer_size(self) -> int:
        return self._outer.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._outer.set_write_buffer_limits(high, low)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._outer.get_extra_info(name, default)
