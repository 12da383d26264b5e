"""/health and /metrics through a real socket, on every front-end: right to the last number, and never in a queue."""

import re
import signal
import socket
from collections.abc import Callable

import pytest
import requests
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.conftest import Server, make_photo
from tests.test_metrics import operations_port, parse_metrics, poll, scrape, unfinished_upload, value
from uvimg.apps.operations import judge_health

EVERY_FRONT_END = True


@pytest.mark.parametrize(
    ("draining", "workerless_s", "store_answers", "status"),
    [
        (False, 0.0, True, "ok"),
        (False, 5.0, True, "ok"),
        (False, 11.0, True, "unable"),
        (False, 0.0, False, "unable"),
        (True, 0.0, True, "draining"),
        (True, 11.0, False, "draining"),
    ],
)
def test_load_goes_elsewhere_only_where_nothing_can_be_done_here(
    draining: bool, workerless_s: float, store_answers: bool, status: str
) -> None:
    health = judge_health(draining=draining, workerless_s=workerless_s, store_answers=store_answers)
    assert health.status == status
    assert bool(health.reason) == (status != "ok")


def test_health_is_told_to_everybody(server: Server) -> None:
    answer = server.get("/health", headers={"X-Forwarded-For": "203.0.113.9"})
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert answer.headers["Cache-Control"] == "no-store"
    looked = server.http.head(f"{server.url}/health")
    assert (looked.status_code, looked.content) == (200, b"")
    assert looked.headers["Content-Length"] == answer.headers["Content-Length"]


def test_metrics_are_told_to_the_addresses_of_the_admin_rule_alone(server: Server) -> None:
    assert server.get("/metrics").status_code == 200
    # From behind an unknown proxy, and from a page whose name was made to point here.
    for headers in ({"X-Forwarded-For": "203.0.113.9"}, {"Host": "rebound.example"}):
        refused = server.get("/metrics", headers=headers)
        assert refused.status_code == 403
        assert refused.headers["Content-Type"] == "application/problem+json"
        assert "uvimg_" not in refused.text


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_what_is_only_to_be_read_says_so(server: Server, path: str) -> None:
    refused = server.http.post(server.url + path)
    assert (refused.status_code, refused.headers["Allow"]) == (405, "GET, HEAD, OPTIONS")
    assert server.http.options(server.url + path).headers["Allow"] == "GET, HEAD, OPTIONS"
    assert server.get(path + "/more").status_code == 404


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8"),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8"),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.1", "application/openmetrics-text"),
        ("application/openmetrics-text; version=nonsense", "application/openmetrics-text"),
        ("application/openmetrics-text; version=2.evil", "application/openmetrics-text"),
        ("text/plain; version=1.x", "text/plain; version=0.0.4; charset=utf-8"),
    ],
)
def test_metrics_come_in_the_format_that_was_asked_for(server: Server, accept: str, content_type: str) -> None:
    answer = server.get("/metrics", headers={"Accept": accept})
    assert answer.status_code == 200
    assert answer.headers["Content-Type"].startswith(content_type)
    assert "evil" not in answer.headers["Content-Type"]
    if "openmetrics" in content_type:
        assert answer.text.endswith("# EOF\n")
        assert list(text_string_to_metric_families(answer.text))
    else:
        assert parse_metrics(answer.text)


def talk(server: Server, data: bytes) -> bytes:
    """What comes back for these bytes, until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(data)
        received = b""
        while piece := connection.recv(65_536):
            received += piece
        return received


def test_known_requests_give_exactly_these_numbers(server: Server, front_end: dict[str, str]) -> None:
    before = scrape(server)
    md5 = server.upload(make_photo(4001))
    server.http.post(f"{server.url}/images", data=b"no image at all")
    original = f"/{md5}?p=0"
    etag = server.get(original).headers["ETag"]
    server.get(original, headers={"Range": "bytes=0-9"})
    for _ in range(2):
        server.get(original, headers={"If-None-Match": etag})
    for _ in range(4):
        server.get(f"/{md5}?w=9")
    server.get(f"/{md5}?w=x")
    for number in range(5):
        server.get(f"/{number:032}")
        server.get(f"/nothing-{number}")
        server.http.patch(f"{server.url}/images?{number}")
    # zimg's clients are told it with 200, and whoever watches must see it all the same.
    server.http.post(f"{server.url}/upload", data=b"no image at all")
    server.get("/metrics", headers={"X-Forwarded-For": "203.0.113.9"})
    talk(server, b"GET /echo HTTP/1.1\r\nHost: x\r\nHost: y\r\nConnection: close\r\n\r\n")
    after = scrape(server)

    def grown(name: str, *labels: str) -> dict[tuple[str, ...], float]:
        changes = {
            tuple(dict(pairs)[label] for label in labels): count - before.get((each, pairs), 0)
            for (each, pairs), count in after.items()
            if each == name
        }
        return {key: change for key, change in changes.items() if change}

    requests = grown("uvimg_requests_total", "app", "route", "status")
    assert requests.pop(("none", "none", "400")) == 1
    # The first look at the numbers, which counted itself afterwards.
    assert requests.pop(("operations", "metrics", "200")) == 1
    assert requests == {
        ("images", "upload", "200"): 2,
        ("images", "upload", "415"): 1,
        ("images", "image", "200"): 5,
        ("images", "image", "206"): 1,
        ("images", "image", "304"): 2,
        ("images", "image", "404"): 5,
        # What cannot be read as a request for anything.
        ("images", "none", "400"): 1,
        ("images", "none", "404"): 5,
        ("images", "none", "405"): 5,
        ("operations", "metrics", "403"): 1,
    }
    assert grown("uvimg_hits_total", "kind") == {("original",): 2, ("not_modified",): 2, ("made",): 1, ("cache",): 3}
    errors = grown("uvimg_errors_total", "route", "error")
    assert errors.pop(("none", "BadRequest")) == 1
    assert errors == {
        ("upload", "UnsupportedType"): 2,
        ("image", "NotFound"): 5,
        ("none", "BadParameter"): 1,
        ("none", "NotFound"): 5,
        ("none", "MethodNotAllowed"): 5,
        ("metrics", "Forbidden"): 1,
    }
    assert grown("uvimg_jobs_total", "lane") == {("uploads",): 1, ("fast",): 1}
    assert grown("uvimg_jobs_refused_total", "lane") == grown("uvimg_worker_restarts_total", "reason") == {}
    assert grown("uvimg_cache_entries") == {(): 1}
    times = [grown(f"uvimg_request_seconds_{part}", "app", "route", "status") for part in ("count", "sum")]
    assert times[0].items() >= requests.items()
    assert 0 < times[1]["images", "image", "200"] < 30
    assert value(after, "uvimg_request_seconds_bucket", le="+Inf") == value(after, "uvimg_request_seconds_count")
    assert value(after, "uvimg_connections_open", front_end=front_end["front_end"]) >= 1
    assert (value(after, "uvimg_workers", state="idle"), value(after, "uvimg_workers", state="busy")) == (2, 0)
    assert value(after, "uvimg_resident_bytes", part="service") > 10_000_000
    assert value(after, "uvimg_resident_bytes", part="workers") > 20_000_000
    assert value(after, "uvimg_build_info") == value(after, "uvimg_processes", state="serving") == 1
    # Nothing of what clients made up has come into a label.
    assert not re.search(f"nothing-|{md5}|{'0' * 20}", server.get("/metrics").text)


def test_an_answer_that_is_repeated_is_counted_too(server: Server) -> None:
    before = scrape(server)
    for _ in range(20):
        server.get("/echo?repeated=1")
    after = scrape(server)
    for name in ("uvimg_requests_total", "uvimg_request_seconds_count"):
        counted = [value(values, name, route="echo", status="200") for values in (before, after)]
        assert counted[1] - counted[0] == 20


def test_a_listener_of_their_own_tells_of_the_drain_to_its_very_end(start_server: Callable[..., Server]) -> None:
    server = start_server(workers=1, operations_listen="127.0.0.1:0")
    assert server.get("/health").status_code == server.get("/metrics").status_code == 404
    url = f"http://127.0.0.1:{operations_port(server)}"
    assert requests.get(f"{url}/echo").status_code == 404
    assert requests.get(f"{url}/health").json() == {"status": "ok"}
    # Who may connect may see them.
    assert requests.get(f"{url}/metrics", headers={"X-Forwarded-For": "203.0.113.9"}).status_code == 200
    with unfinished_upload(server) as finish:
        server.process.send_signal(signal.SIGTERM)
        poll(lambda: requests.get(f"{url}/health").status_code == 503)
        assert requests.get(f"{url}/health").json()["status"] == "draining"
        assert value(parse_metrics(requests.get(f"{url}/metrics").text), "uvimg_processes", state="draining") == 1
        assert b" 201 " in finish()
    assert server.process.wait(20) == 0
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{url}/health")
