"""How answers are counted, and how the counts of several processes become one and never go down."""

import concurrent.futures
import contextlib
import os
import random
import re
import signal
import socket
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path

import requests
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import Server, make_photo
from uvimg.core.tally import BOUNDS_S, Snapshot, Tally, Times, merge
from uvimg.metrics import Metrics, Reading, _Folder

Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse_metrics(text: str) -> Values:
    """Every sample by its name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(values: Values, name: str, **labels: str) -> float:
    """The sum of the samples with these labels, whatever others they have; 0 for none."""
    return sum(each for (found, has), each in values.items() if found == name and set(labels.items()) <= has)


# Counting


@given(st.lists(st.floats(0, 100) | st.sampled_from(BOUNDS_S), max_size=50), st.integers(0, 9))
def test_an_answer_is_in_the_bucket_of_its_time_and_a_repeated_one_in_the_first(
    seconds: list[float], repeated: int
) -> None:
    tally = Tally()
    for each in seconds:
        tally.count(each)
    tally.repeated = repeated
    expected = [0] * (len(BOUNDS_S) + 1)
    expected[0] = repeated
    for each in seconds:
        expected[bisect_left(BOUNDS_S, each)] += 1
    assert tally.rest() == Times(expected, sum(seconds), repeated)


async def test_a_tally_that_is_held_is_the_one_that_is_told() -> None:
    metrics = Metrics()
    held = metrics.tallies["images", "image", 200, "cache"]
    held.count(0.3)
    held.repeated += 2
    values = parse_metrics((await metrics.expose(""))[1].decode())
    assert value(values, "uvimg_requests_total", app="images", route="image", status="200") == 3
    assert value(values, "uvimg_requests_repeated_total", app="images") == 2
    assert value(values, "uvimg_hits_total", app="images", kind="cache") == 3
    buckets = {bound: value(values, "uvimg_request_seconds_bucket", le=bound) for bound in ("0.0005", "0.25", "0.5")}
    assert buckets == {"0.0005": 2, "0.25": 2, "0.5": 3}
    assert value(values, "uvimg_request_seconds_sum") == 0.3


NAMES = st.sampled_from("abc")
SNAPSHOTS = st.builds(
    Snapshot,
    times=st.dictionaries(
        st.tuples(NAMES, NAMES, st.sampled_from((200, 404)), NAMES),
        st.integers(0, 9).map(lambda number: Times([*range(number, number + len(BOUNDS_S) + 1)], number, number)),
        max_size=3,
    ),
    counters=st.dictionaries(st.tuples(NAMES, st.tuples(NAMES)), st.integers(0, 9), max_size=3),
    gauges=st.dictionaries(st.tuples(NAMES, st.tuples()), st.integers(0, 9), max_size=3),
)


@settings(max_examples=25)
@given(st.lists(SNAPSHOTS, max_size=4), st.lists(SNAPSHOTS, max_size=4), SNAPSHOTS)
def test_a_process_that_ends_keeps_its_counts_and_loses_its_gauges(
    living: list[Snapshot], ended: list[Snapshot], one: Snapshot
) -> None:
    before, after = merge([*living, one], ended), merge(living, [*ended, one])
    assert (before.times, before.counters) == (after.times, after.counters)
    assert after.gauges == merge(living, []).gauges
    # Folded into one is the same as one by one.
    assert merge(living, [merge([], [*ended, one])]) == after


@settings(max_examples=25)
@given(st.lists(SNAPSHOTS, max_size=4))
def test_the_sum_does_not_depend_on_the_order_and_leaves_its_parts_alone(snapshots: list[Snapshot]) -> None:
    kept = [repr(each) for each in snapshots]
    assert merge(snapshots, []) == merge(snapshots[::-1], [])
    assert [repr(each) for each in snapshots] == kept


# A folder of several processes


def counted(number: float) -> Snapshot:
    return Snapshot({}, {("uvimg_jobs", ("uploads",)): number}, {("uvimg_processes", ("serving",)): 1})


def end_process(path: Path, number: float) -> None:
    """What a process leaves behind."""
    folder = _Folder(path)
    folder.open()
    folder.write(counted(number))
    folder.close()


def total(folder: _Folder) -> tuple[float, float]:
    """What all others counted, and how many of them live."""
    merged = merge(*folder.read())
    return merged.counters.get(("uvimg_jobs", ("uploads",)), 0), merged.gauges.get(("uvimg_processes", ("serving",)), 0)


def test_those_that_ended_become_one_file_and_keep_counting(tmp_path: Path) -> None:
    folder, other = _Folder(tmp_path), _Folder(tmp_path)
    folder.open()
    other.open()
    other.write(counted(1000))
    for number in range(20):
        end_process(tmp_path, number)
    assert total(folder) == (1000 + sum(range(20)), 1)
    assert total(folder) == (1000 + sum(range(20)), 1)
    # The living one's, the common one and its lock.
    assert len(list(tmp_path.iterdir())) == 3
    other.write(counted(1001))
    assert total(folder) == (1001 + sum(range(20)), 1)


def test_one_that_was_folded_counts_once_though_its_file_is_still_there(tmp_path: Path) -> None:
    end_process(tmp_path, 5)
    left = next(tmp_path.glob("*.live"))
    data = left.read_bytes()
    folder = _Folder(tmp_path)
    folder.open()
    assert not left.exists()
    # As a kill between the two steps would leave it.
    left.write_bytes(data)
    assert total(folder) == (5, 0)
    end_process(tmp_path, 6)
    folder.open()
    assert total(folder) == (11, 0)
    assert not left.exists()


def test_what_is_no_snapshot_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "x.live").write_bytes(b"\xc1 nothing of ours")
    (tmp_path / "empty.live").touch()
    end_process(tmp_path, 5)
    folder = _Folder(tmp_path)
    assert total(folder) == (5, 0)


def test_whoever_reads_while_others_end_sees_each_of_them_once(tmp_path: Path) -> None:
    """Readers fold too, so the folder changes under all of them."""
    seen: set[float] = set()
    for round_number in range(10):
        path = tmp_path / str(round_number)
        path.mkdir()
        alive = _Folder(path)
        alive.open()
        alive.write(counted(0.5))
        ended = [_Folder(path) for _ in range(8)]
        for number, folder in enumerate(ended):
            folder.write(counted(2**number))
        readers = [_Folder(path) for _ in range(3)]

        def read(reader: _Folder) -> None:
            seen.update(total(reader)[0] for _ in range(8))

        threads = [threading.Thread(target=read, args=(reader,)) for reader in readers]
        for thread in threads:
            thread.start()
        random.Random(round_number).shuffle(ended)
        for folder in ended:
            folder.close()
            alive.write(counted(0.5))
        for thread in threads:
            thread.join()
    assert seen == {255.5}


def test_one_that_writes_all_the_time_is_never_taken_for_dead(tmp_path: Path) -> None:
    writing, reading = _Folder(tmp_path), _Folder(tmp_path)
    writing.open()
    writing.write(counted(1))
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            writing.write(counted(1))

    thread = threading.Thread(target=write)
    thread.start()
    seen = {total(reading) for _ in range(3000)}
    stop.set()
    thread.join()
    assert seen == {(1, 1)}


async def test_a_process_publishes_what_it_has_at_its_end(tmp_path: Path) -> None:
    ending, reading = Metrics(str(tmp_path / "new")), Metrics(str(tmp_path / "new"))
    ending.watch(lambda: [Reading("uvimg_processes", ("serving",), 1)])
    async with reading.publishing():
        async with ending.publishing():
            ending.tallies["images", "echo", 200, ""].count(0.1)
            assert reading.others_serve()
        assert not reading.others_serve()
        values = parse_metrics((await reading.expose(""))[1].decode())
    assert value(values, "uvimg_requests_total", route="echo") == 1
    assert value(values, "uvimg_processes") == 0


def scrape(server: Server) -> Values:
    return parse_metrics(server.get("/metrics").text)


def poll(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_totals_of_two_processes_are_summed_and_outlive_one_of_them(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    shared = {"metrics_dir": str(tmp_path / "metrics"), "front_end": "transport", "workers": 1}
    one, two = start_server(**shared), start_server(**shared)
    md5 = one.upload(make_photo(7))
    for server, count in ((one, 3), (two, 4)):
        for _ in range(count):
            server.get("/echo")
    two.get(f"/{md5}?w=9")

    def echoes(server: Server) -> float:
        return value(scrape(server), "uvimg_requests_total", route="echo", status="200")

    poll(lambda: echoes(one) == 7 and echoes(two) == 7)
    values = scrape(one)
    assert value(values, "uvimg_processes", state="serving") == 2
    assert value(values, "uvimg_workers") == value(values, "uvimg_workers_wanted") == 2
    assert value(values, "uvimg_queue_limit_jobs", lane="uploads") == 2000
    assert value(values, "uvimg_jobs_total", lane="fast") == 1
    # Of one store, whoever tells it: an original and its rendition.
    poll(lambda: value(scrape(two), "uvimg_store_blobs") == 2)
    assert value(scrape(two), "uvimg_store_names") == 3
    before = scrape(one)
    two.get("/echo")
    # What was told once has been told for good, also where its process is killed in the next moment.
    assert echoes(two) == 8
    two.kill()
    after = scrape(one)
    assert value(after, "uvimg_processes") == 1
    assert echoes(one) == 8
    assert not [place for place in before if place[0].endswith("_total") and after.get(place, 0) < before[place]]
    assert value(after, "uvimg_workers_wanted") == 1
    three = start_server(**shared)
    three.get("/echo")
    assert echoes(three) == 9
    assert value(scrape(three), "uvimg_process_starts_total") == 3
    assert one.stop() == 0
    assert echoes(three) == 9
    assert len(list((tmp_path / "metrics").iterdir())) == 3


def operations_port(server: Server) -> int:
    return int(re.findall(r"health and metrics at http://[^ ]*:(\d+)/", server.log)[-1])


@contextlib.contextmanager
def unfinished_upload(server: Server) -> Iterator[Callable[[], bytes]]:
    """An upload whose body is waited for; call what it gives to finish it and have the answer."""
    photo = make_photo(11)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        head = f"POST /images HTTP/1.1\r\nHost: x\r\nContent-Length: {len(photo)}\r\nExpect: 100-continue\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 100 ")

        def finish() -> bytes:
            connection.sendall(photo)
            return connection.recv(65_536)

        yield finish


def test_one_process_of_several_that_drains_leaves_the_service_healthy(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    shared = {"metrics_dir": str(tmp_path / "metrics"), "front_end": "transport", "workers": 1}
    one = start_server(**shared, operations_listen="127.0.0.1:0")
    place = f"127.0.0.1:{operations_port(one)}"
    two = start_server(**shared, operations_listen=place)

    def answers() -> set[int]:
        """Of either, as the kernel chooses."""
        return {requests.get(f"http://{place}/health", timeout=10).status_code for _ in range(10)}

    with unfinished_upload(one) as finish_one, unfinished_upload(two) as finish_two:
        one.process.send_signal(signal.SIGTERM)
        poll(lambda: "stopping" in one.log)
        assert answers() == {200}
        two.process.send_signal(signal.SIGTERM)
        poll(lambda: answers() == {503})
        assert b" 201 " in finish_one()
        assert b" 201 " in finish_two()
    assert (one.process.wait(20), two.process.wait(20)) == (0, 0)


# The pool


def children_of(server: Server) -> list[int]:
    return [*map(int, Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split())]


def test_health_and_metrics_stand_in_no_queue_and_tell_of_it(start_server: Callable[..., Server]) -> None:
    server = start_server(workers=1, queue_limit=1, front_end="transport")
    (worker,) = children_of(server)

    def upload(number: int) -> requests.Response:
        return requests.post(f"{server.url}/images", data=make_photo(number), timeout=30)

    with concurrent.futures.ThreadPoolExecutor(3) as clients:
        os.kill(worker, signal.SIGSTOP)
        try:
            first = clients.submit(upload, 1)
            poll(lambda: value(scrape(server), "uvimg_workers", state="busy") == 1)
            second = clients.submit(upload, 2)
            poll(lambda: value(scrape(server), "uvimg_queue_jobs", lane="uploads") == 1)
            assert upload(3).status_code == 503
            values = scrape(server)
            assert value(values, "uvimg_queue_limit_jobs", lane="uploads") == 1
            assert value(values, "uvimg_jobs_refused_total", lane="uploads") == 1
            assert value(values, "uvimg_requests_total", route="upload", status="503") == 1
            assert server.get("/health").status_code == 200
        finally:
            os.kill(worker, signal.SIGCONT)
        assert [first.result().status_code, second.result().status_code] == [201, 201]
    values = scrape(server)
    assert value(values, "uvimg_queue_jobs") == value(values, "uvimg_workers", state="busy") == 0
    os.kill(worker, signal.SIGKILL)
    poll(lambda: value(scrape(server), "uvimg_worker_restarts_total", reason="died") == 1)
    # The CPU time of the one that died is kept.
    assert value(scrape(server), "uvimg_cpu_seconds_total", part="workers") >= value(
        values, "uvimg_cpu_seconds_total", part="workers"
    )


def test_a_full_slow_lane_answers_503_and_the_fast_one_goes_on(start_server: Callable[..., Server]) -> None:
    server = start_server(workers=1, slow_queue_limit=0, avif_effort=7)
    md5 = server.upload(make_photo(3, 1200, 900))
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as slow:
        slow.sendall(f"GET /{md5}?w=1200&f=avif HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        poll(lambda: value(scrape(server), "uvimg_slow_workers", state="busy") == 1)
        refused = server.get(f"/{md5}?w=1199&f=avif")
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) > 0
        for width in range(20, 30):
            assert server.get(f"/{md5}?w={width}").status_code == 200
        values = scrape(server)
        assert value(values, "uvimg_jobs_total", lane="slow") == 1
        assert value(values, "uvimg_jobs_refused_total", lane="slow") == 1
        assert value(values, "uvimg_jobs_total", lane="fast") == 10
        assert value(values, "uvimg_queue_jobs", lane="slow") == 0
