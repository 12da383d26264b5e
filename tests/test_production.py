"""What runs in production: nginx in front, systemd's units, and the scripts that the Dockerfile runs."""

import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from tests.backends import change, find_port, find_program, start_nginx
from tests.conftest import Server, decode, make_photo
from uvimg.config import Settings

ROOT = Path(__file__).parent.parent


# nginx


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[tuple[str, Server]]:
    """conf/nginx.conf as it is but for its port and the socket's path, in front of a uvimg started as it says."""
    port = find_port()
    changes = {
        "listen 80;": f"listen 127.0.0.1:{port};",
        "    server unix:/run/uvimg/uvimg.sock;": f"    server unix:{tmp_path}/uvimg.sock;",
    }
    server = Server(
        tmp_path,
        front_end="transport",
        listen=f"unix:{tmp_path}/uvimg.sock",
        trusted_proxies="127.0.0.1",
        upload_rule="deny 127.0.0.9; allow all",
        admin_rule="allow 127.0.0.2",
        workers=1,
    )
    proxy = start_nginx(tmp_path, change(ROOT / "conf/nginx.conf", changes), port)
    try:
        yield f"http://127.0.0.1:{port}", server
        assert not [line for line in (tmp_path / "error.log").read_text().splitlines() if "too large" not in line]
    finally:
        proxy.stop()
        server.kill()


class _From(requests.adapters.HTTPAdapter):
    """Connections from an address of this machine's own choice: all of 127.0.0.0/8 is there."""

    def __init__(self, address: str) -> None:
        self._address = address
        super().__init__()

    def init_poolmanager(self, *arguments: object, **options: object) -> None:
        super().init_poolmanager(*arguments, source_address=(self._address, 0), **options)


def client(address: str) -> requests.Session:
    session = requests.Session()
    session.trust_env = False
    session.mount("http://", _From(address))
    return session


def test_through_nginx_all_is_as_without_it(proxied: tuple[str, Server]) -> None:
    url, server = proxied
    photo = make_photo(950, 300, 200) + bytes(20_000_000)
    md5 = hashlib.md5(photo).hexdigest()
    someone, denied, admin = map(client, ("127.0.0.3", "127.0.0.9", "127.0.0.2"))
    assert someone.post(f"{url}/images", data=photo).status_code == 201
    assert someone.get(f"{url}/{md5}?p=0").content == photo
    assert decode(someone.get(f"{url}/{md5}?w=40").content).width == 40
    # The rules see who it is, whatever is claimed on the way.
    for claim in ({}, {"X-Forwarded-For": "127.0.0.2"}, {"Forwarded": "for=127.0.0.2"}):
        assert denied.post(f"{url}/images", data=make_photo(951), headers=claim).status_code == 403
        assert someone.get(f"{url}/admin", headers=claim).status_code == 403
        assert someone.delete(f"{url}/images/{md5}", headers=claim).status_code == 403
    assert admin.get(f"{url}/admin").status_code == 200
    assert " 127.0.0.1 GET /admin 200 " in server.log
    # Refused by nginx before it is sent.
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as large:
        large.sendall(b"POST /images HTTP/1.1\r\nHost: x\r\nContent-Length: 104857601\r\n\r\n")
        assert large.recv(100).startswith(b"HTTP/1.1 413")


def test_nginx_lets_through_what_uvimg_takes() -> None:
    found = re.search(r"client_max_body_size (\d+)m;", (ROOT / "conf/nginx.conf").read_text())
    assert found is not None
    assert int(found[1]) << 20 == Settings().max_size


# systemd


def test_the_units_are_sound_and_leave_little_open(tmp_path: Path) -> None:
    analyze = find_program("systemd-analyze")
    unit = (ROOT / "conf/uvimg.service").read_text()
    command = re.search(r"^ExecStart=(\S+)", unit, re.MULTILINE)
    assert command is not None
    # Its folder need not be here, and what is to be run is looked for.
    (tmp_path / "uvimg.service").write_text(unit.replace(command[1], "/bin/true"))
    shutil.copy(ROOT / "conf/uvimg.socket", tmp_path)
    units = [tmp_path / "uvimg.service", tmp_path / "uvimg.socket"]
    verified = subprocess.run([analyze, "verify", *units], capture_output=True, text=True, check=False)
    about_ours = [line for line in verified.stderr.splitlines() if "uvimg" in line]
    assert (verified.returncode, about_ours) == (0, [])
    judged = subprocess.run(
        [analyze, "security", "--offline=true", "--threshold=20", units[0]], capture_output=True, text=True, check=False
    )
    assert judged.returncode == 0, judged.stdout


def test_the_unit_waits_longer_than_a_stop_may_take() -> None:
    found = re.search(r"^TimeoutStopSec=(\d+)", (ROOT / "conf/uvimg.service").read_text(), re.MULTILINE)
    assert found is not None
    assert int(found[1]) > Settings().grace_s + Settings().drain_delay_s + 5


def test_the_unit_says_settings_that_there_are() -> None:
    found = re.search(r"^Environment=(.*)", (ROOT / "conf/uvimg.service").read_text(), re.MULTILINE)
    assert found is not None
    environment = dict(os.environ) | dict(variable.split("=") for variable in found[1].split())
    command = [sys.executable, "-m", "uvimg", "config"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert "\nprocesses = 2\n" in shown


# The Dockerfile


def test_the_dockerfile_copies_what_exists_and_runs_as_nobody_special() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    steps = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    for step in steps:
        if step[0] == "COPY" and not step[1].startswith("--from"):
            for source in step[1:-1]:
                assert (ROOT / source).exists(), source
        if step[0] == "FROM":
            assert re.fullmatch(r"python:3\.\d+-slim-\w+", step[1])
    names = [step[0] for step in steps]
    # Nothing is installed by the user that serves, and it is not root.
    assert int(steps[names.index("USER")][1]) > 0
    assert "RUN" not in names[names.index("USER") :]
    for variable in re.findall(r"UVIMG_(\w+)=", text):
        assert hasattr(Settings(), variable.lower())
    assert f"EXPOSE {Settings().port}\n" in text


def test_the_healthcheck_is_well_only_with_a_service_that_is(server: Server) -> None:
    def check(url: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, ROOT / "scripts/healthcheck", url]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert check(f"{server.url}/echo").returncode == 0
    ill = check(f"{server.url}/images/{'0' * 64}")
    assert (ill.returncode, ill.stderr.count("\n")) == (1, 1)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        gone = check(f"http://127.0.0.1:{closed.getsockname()[1]}/echo")
    assert (gone.returncode, gone.stderr.count("\n")) == (1, 1)


def test_the_script_has_server_and_workers_use_jemalloc_where_it_is_installed(tmp_path: Path) -> None:
    known = subprocess.run([find_program("ldconfig"), "-p"], capture_output=True, text=True, check=True).stdout
    if "libjemalloc.so.2 " not in known:
        if os.environ.get("CI"):
            pytest.fail("CI must have libjemalloc.so.2")
        pytest.skip("libjemalloc.so.2 is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [ROOT / "scripts/serve", "--port=0", f"--store=local:{tmp_path}", "--workers=1"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None
        assert "is ready" in server.stdout.readline()
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        assert len(children) == 1
        for pid in (server.pid, *children):
            assert "libjemalloc.so.2" in Path(f"/proc/{pid}/maps").read_text()
    finally:
        server.terminate()
        server.wait(40)
