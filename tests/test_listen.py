"""A server on every kind of place at once, through every front-end: TCP with TLS, and unix sockets without."""

import contextlib
import hashlib
import re
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Server, make_photo

EVERY_FRONT_END = True


def _has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


def ask(place: socket.socket, request: str, body: bytes = b"", field: str = "X: y") -> tuple[int, bytes]:
    """Status and body of the answer to one request on a connection of its own."""
    with place:
        place.settimeout(20)
        head = (
            f"{request} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n{field}\r\n"
        )
        place.sendall(f"{head}\r\n".encode() + body)
        received = b""
        while piece := place.recv(65_536):
            received += piece
    start, _, rest = received.partition(b"\r\n\r\n")
    return int(start.split()[1]), rest


def connect_unix(path: Path | str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(20)
    connection.connect(str(path))
    return connection


@pytest.fixture(scope="module")
def everywhere(
    tmp_path_factory: pytest.TempPathFactory, front_end: dict[str, str], certificate: Path
) -> Iterator[Server]:
    """One server on all kinds of places at once; the sockets lie in its folder."""
    folder = tmp_path_factory.mktemp("everywhere")
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as local:
        tcp.bind(("127.0.0.1", 0))
        # Both what is only bound and what listens already may be handed over.
        local.bind(str(folder / "inherited.sock"))
        local.listen()
        fds = (tcp.fileno(), local.fileno())
        places = ["127.0.0.1:0", f"unix:{folder}/own.sock", *(f"fd:{fd}" for fd in fds)]
        if _has_ipv6():
            places.append("[::1]:0")
        tls = {"tls_certificate": certificate, "tls_key": certificate}
        running = Server(folder, listen=places, pass_fds=fds, workers=1, **tls, **front_end)
    yield running
    running.kill()


def reach_all(server: Server, certificate: Path) -> list[socket.socket]:
    """A connection to every place that the line at the start names."""
    folder = server.store.parent
    addresses = re.findall(r"https://(\S+):(\d+)/", server.ready_line)
    paths = re.findall(r"unix:(\S+)", server.ready_line)
    assert sorted(paths) == [f"{folder}/inherited.sock", f"{folder}/own.sock"]
    assert len(addresses) == 2 + _has_ipv6()
    context = ssl.create_default_context(cafile=str(certificate))
    reached: list[socket.socket] = [*map(connect_unix, paths)]
    for host, port in addresses:
        plain = socket.create_connection((host.strip("[]"), int(port)), timeout=20)
        reached.append(context.wrap_socket(plain, server_hostname="localhost"))
    return reached


def test_every_place_takes_and_gives_the_same_images(everywhere: Server, certificate: Path) -> None:
    ones, others = reach_all(everywhere, certificate), reach_all(everywhere, certificate)
    for seed, (one, other) in enumerate(zip(ones, reversed(others), strict=True)):
        # Larger than any buffer on the way.
        photo = make_photo(700 + seed, 600, 400) + bytes(6_000_000)
        assert ask(one, "POST /images", photo)[0] == 201
        md5 = hashlib.md5(photo).hexdigest()
        assert ask(other, f"GET /{md5}?p=0") == (200, photo)
    assert ask(reach_all(everywhere, certificate)[-1], f"GET /{md5}?w=30")[0] == 200


def test_whoever_comes_by_a_unix_socket_counts_as_this_machine(everywhere: Server) -> None:
    path = everywhere.store.parent / "own.sock"
    assert ask(connect_unix(path), "GET /admin")[0] == 200
    assert ask(connect_unix(path), "GET /admin", field="X-Forwarded-For: 127.0.0.1")[0] == 403
    assert re.search(r" 127\.0\.0\.1 GET /admin 200 ", everywhere.log)
