"""TLS on every front-end: what is whole over it, what is dropped, and certificates that will not do."""

import contextlib
import hashlib
import socket
import ssl
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_wire import HURRY, statuses, wait_until
from tests.wire_server import Wire, get, last, receive_all

EVERY_FRONT_END = True


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory, front_end: dict[str, str], certificate: Path) -> Iterator[Wire]:
    """tests/wire_server.py over TLS, with deadlines that a test can wait for."""
    hurry = {**HURRY, "HANDSHAKE_S": 0.6, "WRITE_STALL_S": 2}
    pair = (front_end["front_end"], front_end["loop"])
    running = Wire(tmp_path_factory.mktemp("wire"), pair, hurry, keepalive_s=5, certificate=str(certificate))
    yield running
    running.kill()
    assert running.failures == []


def connect(wire: Wire, certificate: Path, **options: int) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=str(certificate))
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context.wrap_socket(wire.connect(**options), server_hostname="localhost")


def test_the_protocol_is_http_1_1_over_tls_1_2_or_newer(secure: Wire, certificate: Path) -> None:
    with connect(secure, certificate) as client:
        assert client.selected_alpn_protocol() == "http/1.1"
        assert client.version() == "TLSv1.3"
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_1):
        context = ssl.create_default_context(cafile=str(certificate))
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            context.minimum_version = ssl.TLSVersion.TLSv1
            context.maximum_version = version
        with secure.connect() as plain:
            if version == ssl.TLSVersion.TLSv1_2:
                with context.wrap_socket(plain, server_hostname="localhost") as client:
                    client.sendall(last("/now/1"))
                    assert statuses(receive_all(client)) == [200]
            else:
                with pytest.raises((ssl.SSLError, ConnectionError)):
                    context.wrap_socket(plain, server_hostname="localhost")


def test_requests_in_any_pieces_are_answered_in_order_and_the_end_is_told(secure: Wire, certificate: Path) -> None:
    body = bytes(range(256)) * 4000
    post = f"POST /body/2 HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with connect(secure, certificate) as client:
        for byte in get("/slow/1?5"):
            client.sendall(bytes([byte]))
        client.sendall(post + body + get("/large?700000") + get("/file?3000000") + last("/now/5"))
        # An SSLEOFError would say that the end came without TLS's own.
        received = receive_all(client)
    assert statuses(received) == [200] * 5
    assert hashlib.sha256(body).hexdigest().encode() in received
    assert received.endswith(b"x /now/5")


def test_who_reads_slowly_gets_all_of_a_large_answer_over_tls(secure: Wire, certificate: Path) -> None:
    for path, size in (("/large?3000000", 3_000_000), ("/file?3000000", 3_000_000)):
        with connect(secure, certificate, SO_RCVBUF=65_536) as client:
            client.sendall(last(path))
            received = 0
            # For longer than lingering, which must not begin before the last of it has gone.
            for number in range(40):
                received += len(client.recv(16_384))
                if number % 4 == 3:
                    time.sleep(0.15)
            received += len(receive_all(client))
        assert size < received < size + 1000, path


def test_a_body_refused_early_still_has_its_answer_read_over_tls(secure: Wire, certificate: Path) -> None:
    with connect(secure, certificate) as client:
        client.sendall(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n")
        client.sendall(bytes(3_000_000))
        assert statuses(receive_all(client)) == [413]


def test_a_client_that_does_not_speak_tls_harms_nobody(secure: Wire, certificate: Path) -> None:
    with connect(secure, certificate) as other:
        for data in (get("/now"), b"\x16\x03\x01\xff\xff" + bytes(20_000), b"\x16", b""):
            with secure.connect() as plain, contextlib.suppress(ConnectionError):
                plain.sendall(data)
                plain.shutdown(socket.SHUT_WR)
                assert b"HTTP" not in receive_all(plain)
        # In the middle of a conversation, too.
        with secure.connect() as plain:
            context = ssl.create_default_context(cafile=str(certificate))
            wrapped = context.wrap_socket(plain, server_hostname="localhost")
            raw = socket.socket(fileno=wrapped.detach())
            with raw, contextlib.suppress(ConnectionError):
                raw.sendall(get("/now") * 9)
                raw.settimeout(15)
                assert b"HTTP" not in receive_all(raw)
        other.sendall(last("/now/still"))
        assert receive_all(other).endswith(b"x /now/still")


def test_what_is_no_tls_behind_the_end_is_nobodys_failure(secure: Wire, certificate: Path) -> None:
    connection = connect(secure, certificate)
    connection.sendall(last("/now"))
    assert statuses(receive_all(connection)) == [200]
    raw = socket.socket(fileno=connection.detach())
    with raw, contextlib.suppress(OSError):
        raw.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
        while raw.recv(1000):
            pass
    wait_until(lambda: secure.open_files("socket:") <= secure.own_sockets)
    assert secure.failures == []


def test_a_handshake_that_does_not_end_is_dropped(secure: Wire) -> None:
    with secure.connect() as silent, secure.connect() as dripping:
        started = time.monotonic()
        # A record that declares 512 bytes and never has them.
        dripping.sendall(b"\x16\x03\x01\x02\x00")
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - started < 8:
                dripping.sendall(b"\x01")
                time.sleep(0.05)
        with contextlib.suppress(ConnectionError):
            assert silent.recv(10) == b""
        assert time.monotonic() - started < 4
    wait_until(lambda: secure.open_files("socket:") == secure.own_sockets)


def test_who_never_reads_over_tls_is_dropped(secure: Wire, certificate: Path) -> None:
    with connect(secure, certificate, SO_RCVBUF=4096) as client:
        client.sendall(get("/file?4000000") * 5)
        wait_until(lambda: secure.open_files("socket:") > secure.own_sockets)
        wait_until(lambda: secure.open_files("socket:") == secure.own_sockets)
    wait_until(lambda: secure.open_blobs() == 0)
