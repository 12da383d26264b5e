"""Sockets to listen on: what is taken over, replaced, refused and left alone; and what systemd hands over and hears."""

import os
import re
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Server
from tests.test_listen import ask, connect_unix
from uvimg import systemd
from uvimg.core.place import Inherited, Tcp, Unix
from uvimg.web.listen import CannotListen, open_sockets, show_address


def test_a_stale_unix_socket_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
        dead.listen()
    with open_sockets([Unix(path)]) as [[listener]], socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        assert show_address(listener) == f"unix:{path}"
    assert not os.path.lexists(path)


def test_a_live_unix_socket_is_left_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    # Live from its first moment on, also before there is a front-end; and when nobody can be let in any more.
    with (
        open_sockets([Unix(path)]) as [[listener]],
        pytest.raises(CannotListen, match=r"unix:.*/s: Address already in use"),
        open_sockets([Unix(path)]),
    ):
        pass
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(path)
        with pytest.raises(CannotListen, match="Address already in use"), open_sockets([Unix(path)]):
            pass
        for client in waiting:
            client.close()
    assert os.path.lexists(path)


def test_a_path_that_is_no_socket_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "folder", "link"):
        with pytest.raises(CannotListen, match="no socket"), open_sockets([Unix(str(tmp_path / name))]):
            pass
        assert (tmp_path / name).exists()
    with pytest.raises(CannotListen, match="No such file"), open_sockets([Unix(str(tmp_path / "no/such"))]):
        pass


def test_a_unix_socket_that_is_somebody_elses_by_now_is_not_removed(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with open_sockets([Unix(path)]), socket.socket(socket.AF_UNIX) as other:
        os.unlink(path)
        other.bind(path)
    assert os.path.lexists(path)


def test_only_what_can_be_listened_on_is_taken_over(tmp_path: Path) -> None:
    pair, other = socket.socketpair()
    with (
        pair,
        other,
        socket.socket() as unbound,
        socket.socket(type=socket.SOCK_DGRAM) as datagrams,
        open(tmp_path / "file", "w") as file,
    ):
        datagrams.bind(("127.0.0.1", 0))
        for fd in (pair.fileno(), unbound.fileno(), datagrams.fileno(), file.fileno(), 900):
            with pytest.raises(CannotListen, match=f"cannot listen on fd:{fd}: "), open_sockets([Inherited(fd)]):
                pass
        # Whoever opened it goes on using it.
        file.write("x")
        pair.sendall(b"x")
        assert other.recv(1) == b"x"


def test_nothing_stays_open_when_one_place_cannot_be_had(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with (
        pytest.raises(CannotListen, match=r"192\.0\.2\.1:80"),
        open_sockets([Tcp("127.0.0.1", 0), Unix(str(tmp_path / "s")), Tcp("192.0.2.1", 80)], 2),
    ):
        pass
    assert len(os.listdir("/proc/self/fd")) == before
    assert not (tmp_path / "s").exists()


def test_who_is_about_to_serve_keeps_others_from_the_port() -> None:
    with open_sockets([Tcp("127.0.0.1", 0)], 2) as ((first,), (_,)):
        port = first.getsockname()[1]
        for processes in (1, 2):
            with pytest.raises(CannotListen, match="in use"), open_sockets([Tcp("127.0.0.1", port)], processes):
                pass


def test_each_process_has_a_tcp_socket_of_its_own_on_the_same_free_port(tmp_path: Path) -> None:
    with open_sockets([Tcp("127.0.0.1", 0), Unix(str(tmp_path / "s"))], 3) as groups:
        assert len({group[0].getsockname() for group in groups}) == 1
        assert len({group[0].fileno() for group in groups}) == 3
        assert len({group[1].fileno() for group in groups}) == 1
        for group in groups:
            group[0].listen()
        # Shared ports are joined by nobody unnoticed.
        port = groups[0][0].getsockname()[1]
        for processes in (1, 2):
            with (
                pytest.raises(CannotListen, match="Address already in use"),
                open_sockets([Tcp("127.0.0.1", port)], processes) as [[listener], *_],
            ):
                listener.listen()


# In a server


def test_a_unix_socket_is_there_for_a_proxy_and_goes_when_the_server_does(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    place = f"unix:{tmp_path}/s"
    proxy = {"trusted_proxies": "127.0.0.1", "admin_rule": "allow 10.1.1.1"}
    server = start_server(listen=place, store="memory:", workers=1, **proxy)
    assert server.port == 0
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o666
    with pytest.raises(AssertionError, match=r"cannot listen on unix:.*/s: Address already in use"):
        start_server(listen=place, store="memory:", workers=1)
    for client, status in (("10.1.1.1", 200), ("10.1.1.2", 403), ("127.0.0.1", 403), ("203.0.113.9", 403)):
        assert ask(connect_unix(tmp_path / "s"), "GET /admin", field=f"X-Forwarded-For: {client}")[0] == status
    assert server.stop() == 0
    assert not (tmp_path / "s").exists()


def test_systemd_hands_over_sockets_and_hears_how_it_goes(start_server: Callable[..., Server]) -> None:
    name = f"\0uvimg-test-{os.getpid()}"
    with (
        socket.socket() as handed,
        socket.socket() as taken,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
    ):
        for listener in (handed, taken):
            listener.bind(("127.0.0.1", 0))
            listener.listen()
        manager.bind(name)
        manager.settimeout(20)
        script = f'exec 3<&{handed.fileno()}; LISTEN_PID=$$ LISTEN_FDS=1 NOTIFY_SOCKET=$0 exec "$@"'
        server = start_server(
            run=("bash", "-c", script, name.replace("\0", "@")),
            pass_fds=(handed.fileno(),),
            store="memory:",
            workers=1,
            # Taken: what systemd hands over goes before host and port.
            port=taken.getsockname()[1],
        )
        assert server.port == handed.getsockname()[1]
        assert manager.recv(100) == b"READY=1"
        assert server.get("/echo").status_code == 200
        assert server.stop() == 0
        assert manager.recv(100) == b"STOPPING=1"


def test_a_manager_with_a_named_socket_hears_of_reloads_and_one_that_is_gone_harms_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        systemd.tell_reloading()
        told = manager.recv(100).decode()
        assert re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=\d+", told)
    systemd.tell_ready()
    monkeypatch.setenv("NOTIFY_SOCKET", "nonsense")
    systemd.tell_ready()


def test_sockets_meant_for_another_process_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_FDS", "2")
    assert systemd.inherited_places() == []
    monkeypatch.setenv("LISTEN_PID", str(os.getppid()))
    assert systemd.inherited_places() == []
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    assert systemd.inherited_places() == [Inherited(3), Inherited(4)]
