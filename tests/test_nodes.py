"""Several nodes behind a balancer, on stores that they share; and the files in conf/ that set them up."""

import itertools
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests
import yaml

from tests.backends import S3, Program, change, find_port, find_program, start_nginx
from tests.conftest import Server, make_photo
from uvimg import config

CONF = Path(__file__).parent.parent / "conf"


@dataclass(frozen=True)
class Site:
    """Nodes on one S3 server and one Redis Cluster, and nginx before them as conf/nginx.conf says."""

    url: str
    store: str
    nodes: list[Server]


@pytest.fixture
def site(tmp_path: Path, s3: S3, redis_cluster: list[Program]) -> Iterator[Site]:
    store = s3.url()
    cache = "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in redis_cluster)
    nodes: list[Server] = []
    for number in range(3):
        folder = tmp_path / f"node{number}"
        folder.mkdir()
        settings = {"store": store, "cache": f"{cache}?prefix={tmp_path.name}:", "tier": str(folder / "tier")}
        nodes.append(Server(folder, **settings, workers=1, trusted_proxies="127.0.0.1"))
    nginx = balance_by_nginx(tmp_path, [node.port for node in nodes])
    yield Site(f"http://127.0.0.1:{nginx.port}", store, nodes)
    nginx.stop()
    for node in nodes:
        node.kill()


def balance_by_nginx(folder: Path, nodes: list[int]) -> Program:
    port = find_port()
    text = re.sub(r"upstream uvimg \{.*?\n\}\n", "", (CONF / "nginx.conf").read_text(), count=1, flags=re.DOTALL)
    text = re.sub(r"(?m)^# (upstream uvimg|    hash|    server 10|    keepalive|\})", r"\1", text)
    (folder / "template").write_text(text)
    changes = place_nodes(nodes) | {"listen 80;": f"listen {port};"}
    return start_nginx(folder, change(folder / "template", changes), port)


def balance_by_haproxy(folder: Path, nodes: list[int]) -> Program:
    port = find_port()
    changes = place_nodes(nodes) | {"    bind :80\n": f"    bind 127.0.0.1:{port}\n"}
    (folder / "haproxy.cfg").write_text(change(CONF / "haproxy.cfg", changes))
    return Program([find_program("haproxy"), "-f", str(folder / "haproxy.cfg")], port, folder)


def place_nodes(ports: list[int]) -> dict[str, str]:
    return {f"10.0.0.{number}:4869": f"127.0.0.1:{port}" for number, port in enumerate(ports, 1)}


class Load:
    """Clients that upload and look, until they are stopped; what was acknowledged, and when what failed."""

    def __init__(self, url: str) -> None:
        self.stored: dict[str, bytes] = {}
        # From when to when each was under way, and what became of it.
        self.failed: list[tuple[float, float, str]] = []
        self.answered = 0
        self._url, self._numbers, self._over = url, itertools.count(), threading.Event()
        self._threads = [threading.Thread(target=self._work) for _ in range(6)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _work(self) -> None:
        session = requests.Session()
        session.trust_env = False
        while not self._over.is_set():
            number = next(self._numbers)
            began = time.monotonic()
            try:
                if number % 3 == 0:
                    photo = make_photo(number, 120, 90)
                    answer = session.post(f"{self._url}/upload", photo, headers={"Content-Type": "jpeg"}, timeout=20)
                    answer.raise_for_status()
                    self.stored[answer.json()["info"]["md5"]] = photo
                else:
                    id, photo = list(self.stored.items())[number % max(1, len(self.stored))]
                    answer = session.get(f"{self._url}/{id}{'?p=0' if number % 3 == 1 else '?w=40'}", timeout=20)
                    answer.raise_for_status()
                    assert answer.content == photo if number % 3 == 1 else answer.content[:2] == b"\xff\xd8"
                self.answered += 1
            except IndexError:
                time.sleep(0.01)
            except (requests.RequestException, AssertionError, KeyError) as exc:
                self.failed.append((began, time.monotonic(), repr(exc)))


def wait_for(holds: "threading.Event | None" = None, *, load: Load, answers: int) -> None:
    """Until there are so many answers more."""
    target, deadline = load.answered + answers, time.monotonic() + 30
    while load.answered < target:
        assert time.monotonic() < deadline, load.failed
        time.sleep(0.01)


def test_a_node_that_dies_takes_with_it_what_it_was_doing_and_no_more(site: Site) -> None:
    load = Load(site.url)
    try:
        wait_for(load=load, answers=60)
        before = time.monotonic()
        site.nodes[1].kill()
        after = time.monotonic()
        wait_for(load=load, answers=150)
    finally:
        load.stop()
    late = [failure for failure in load.failed if not (failure[0] <= after and failure[1] >= before)]
    assert late == []
    assert len(load.failed) <= 6
    session = requests.Session()
    session.trust_env = False
    for id, photo in load.stored.items():
        assert session.get(f"{site.url}/{id}?p=0", timeout=20).content == photo
    scrub = subprocess.run(
        [sys.executable, "-m", "uvimg", "scrub", "--store", site.store],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (scrub.returncode, scrub.stdout) == (0, f"no damage found in {hide(site.store)}\n"), scrub.stderr


def hide(url: str) -> str:
    from uvimg.core.backend import hide_secrets

    return hide_secrets(url)


def test_equal_requests_at_all_nodes_at_once_are_answered_alike(site: Site) -> None:
    id = site.nodes[0].upload(make_photo(1, 640, 480))

    def ask(node: Server, width: int) -> bytes:
        answer = requests.get(f"{node.url}/{id}?w={width}", timeout=20)
        assert answer.status_code == 200
        return answer.content

    with ThreadPoolExecutor(12) as threads:
        for width in range(50, 60):
            answers = list(threads.map(lambda node, width=width: ask(node, width), site.nodes * 4))
            assert len(set(answers)) == 1


def test_what_one_node_has_deleted_is_gone_at_the_others_when_it_is_said_to_be(site: Site) -> None:
    id = site.nodes[0].upload(make_photo(2))
    for node in site.nodes:
        assert node.get(f"/{id}?w=20").status_code == 200
    assert site.nodes[0].http.delete(f"{site.nodes[0].url}/images/{id}").status_code == 204
    deadline = time.monotonic() + config.Settings().tier_valid_s + 2
    while any(node.get(f"/{id}?w=20").status_code != 404 for node in site.nodes):
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Number(BaseHTTPRequestHandler):
    """What stands for a node, and tells which one it is."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        told = str(self.server.server_address[1]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("balance", [balance_by_nginx, balance_by_haproxy])
def test_uploads_are_spread_and_an_image_belongs_to_one_node(
    balance: Callable[[Path, list[int]], Program], tmp_path: Path
) -> None:
    nodes = [ThreadingHTTPServer(("127.0.0.1", 0), Number) for _ in range(3)]
    for node in nodes:
        threading.Thread(target=node.serve_forever, args=(0.01,), daemon=True).start()
    balancer = balance(tmp_path, [node.server_address[1] for node in nodes])
    try:
        url = f"http://127.0.0.1:{balancer.port}"
        with requests.Session() as session:
            session.trust_env = False
            takers = {session.post(f"{url}/upload", b"x" * size, timeout=20).text for size in range(30, 60)}
            assert len(takers) == 3
            owners = [
                {session.get(f"{url}/{number:032x}?w={width}", timeout=20).text for width in range(3)}
                for number in range(20)
            ]
            assert {len(each) for each in owners} == {1}
            assert len(set.union(*owners)) == 3
            # A node that has gone refuses: another answers, an upload too.
            nodes[0].shutdown()
            nodes[0].server_close()
            for number in range(20):
                assert session.get(f"{url}/{number:032x}", timeout=20).status_code == 200
                assert session.post(f"{url}/upload", b"x" * number, timeout=20).status_code == 200
    finally:
        balancer.stop()
        for node in nodes[1:]:
            node.shutdown()
            node.server_close()


# Files


def check_environment(variables: dict[str, str]) -> None:
    """Every variable of ours is a setting, and takes this value."""
    ours = {name: value for name, value in variables.items() if name.startswith("UVIMG_")}
    assert len(ours) >= 4
    config.load({name.removeprefix("UVIMG_").lower(): value for name, value in ours.items()}, {})


def test_haproxys_file_is_one(tmp_path: Path) -> None:
    haproxy = find_program("haproxy")
    compose = yaml.safe_load((CONF / "compose.yaml").read_text())
    (tmp_path / "compose.cfg").write_text(compose["configs"]["balancer"]["content"])
    for file in (CONF / "haproxy.cfg", tmp_path / "compose.cfg"):
        done = subprocess.run([haproxy, "-c", "-f", file], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr.lower()


def test_the_nodes_of_the_compose_file_have_settings_that_there_are() -> None:
    services = yaml.safe_load((CONF / "compose.yaml").read_text())["services"]
    nodes = [services[f"node{number}"] for number in (1, 2, 3)]
    for node in nodes:
        check_environment(node["environment"])
    for service in services.values():
        for needed in service.get("depends_on", ()):
            assert needed in services


def test_kubernetes_asks_for_what_the_service_answers(start_server) -> None:  # type: ignore[no-untyped-def]
    parts = {part["kind"]: part for part in yaml.safe_load_all((CONF / "kubernetes.yaml").read_text())}
    (container,) = parts["Deployment"]["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    check_environment(variables)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert variables["UVIMG_OPERATIONS_LISTEN"] == f":{ports['operations']}"
    assert ports["http"] == config.Settings().port
    operations = find_port()
    server = start_server(operations_listen=f"127.0.0.1:{operations}")
    urls = {"http": server.url, "operations": f"http://127.0.0.1:{operations}"}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert requests.get(urls[asked["port"]] + asked["path"], timeout=10).status_code == 200
    (metric, _) = parts["HorizontalPodAutoscaler"]["spec"]["metrics"]
    told = requests.get(f"{urls['operations']}/metrics", timeout=10).text
    assert f'\n{metric["pods"]["metric"]["name"]}{{lane="fast"}} 0.0\n' in told
    labels = parts["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert parts["Service"]["spec"]["selector"] == parts["Deployment"]["spec"]["selector"]["matchLabels"] == labels
