"""The measurements: what they count, how they judge, and that a wrong answer is never a fast one."""

import json
import os
import shutil
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench import corpus, makers, report, serving, variants
from bench.__main__ import main
from bench.exchange import Ask
from bench.generators import Count, parse_ab, parse_wrk
from bench.load import KeepAlive, Variety, write_script
from bench.making import Making, Paced, check_made, count_answers
from bench.pace import pace
from bench.programs import find_missing
from bench.result import Goal, Result, Section, compare, judge, spread
from bench.serving import BenchError, Launch
from bench.site import Content, Site, Variant
from bench.soak import measure_growth
from bench.variants import Case, Suite
from bench.work import Picture, Task, check_picture, make_walk

WRK_TEXT = """Running 60m test @ http://127.0.0.1:4869/echo
  1 threads and 100 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency   812.44us  301.22us   9.31ms   93.10%
    Req/Sec   121.34k     4.11k  126.80k    85.00%
  241355 requests in 2.00s, 38.21MB read
  Non-2xx or 3xx responses: 7
COUNT {"requests":241355,"us":2001234,"bytes":40064930,"connect":1,"read":2,"write":3,"status":7,"timeout":4,\
"seen":5,"mean_us":812.4,"p99_us":2011.0,"max_us":9310.0}
"""
AB_TEXT = """This is ApacheBench, Version 2.3 <$Revision$>

Document Path:          /echo
Document Length:        92 bytes

Concurrency Level:      100
Time taken for tests:   1.337 seconds
Complete requests:      20000
Failed requests:        3
   (Connect: 0, Receive: 1, Length: 2, Exceptions: 0)
Non-2xx responses:      4
Total transferred:      5300000 bytes
Requests per second:    14958.86 [#/sec] (mean)

Connection Times (ms)
              min  mean[+/-sd] median   max
Connect:        0    3   0.8      3       6
Processing:     1    4   1.0      4      12
Waiting:        0    3   0.9      3      11
Total:          3    7   1.1      7      14

Percentage of the requests served within a certain time (ms)
  50%      7
  99%     11
 100%     14 (longest request)
"""


# In CI they have to be there.
needs_wrk = pytest.mark.skipif(
    not (shutil.which("wrk") and shutil.which("ss")) and "CI" not in os.environ, reason="wrk or ss is not installed"
)


def make_result(
    variant: str, cpu_us: tuple[float, ...], *, ours: bool, case: str = "tiny", rate: float = 1.0, suite: str = "hello"
) -> Result:
    return Result(suite, case, variant, ours, "measured", {"cpu_us": cpu_us, "rate": (rate,)})


# Counting


def test_every_error_that_wrk_counts_is_a_wrong_answer() -> None:
    count = parse_wrk(WRK_TEXT)
    assert (count.requests, count.seconds, count.bytes) == (241_355, 2.001234, 40_064_930)
    assert count.wrong == 1 + 2 + 3 + 7 + 4 + 5
    assert "7 statuses of 400 and more, 4 time-outs, 5 wrong answers" in count.errors
    assert (count.mean_ms, count.p99_ms, count.max_ms) == (0.8124, 2.011, 9.31)


def test_every_error_that_ab_counts_is_a_wrong_answer() -> None:
    count = parse_ab(AB_TEXT)
    assert (count.requests, count.seconds, count.bytes, count.length) == (20_000, 1.337, 5_300_000, 92)
    assert (count.wrong, count.errors) == (7, "3 failed requests, 4 other statuses")
    assert (count.mean_ms, count.p99_ms, count.max_ms) == (7.0, 11.0, 14.0)


@pytest.mark.parametrize("parse", [parse_wrk, parse_ab])
def test_a_load_generator_that_counted_nothing_is_an_error_that_repeats_its_words(parse: object) -> None:
    with pytest.raises(BenchError, match="unable to connect"):
        parse("unable to connect to 127.0.0.1:4869\n")  # type: ignore[operator]


def test_only_the_script_of_a_warm_up_looks_at_answers() -> None:
    ask = Ask("/a?w=1", 200, b"12345")
    assert "function response" not in write_script(ask, "same")
    assert "status ~= 200 or #body ~= 5" in write_script(ask, "10,000", 5)
    assert '"/a?w=1&n="' in write_script(ask, "never the same")


# Renditions


def test_of_every_walk_no_two_tasks_are_equal_and_more_than_can_be_in_flight() -> None:
    loads = [case.load for suite in variants.SUITES.values() for case in suite.cases]
    for load in loads:
        for walk in load.walks if isinstance(load, Making) else ():
            assert len(set(walk.tasks)) == len(walk.tasks)
            # Those that are measured with more have copies of the picture too.
            assert len(walk.tasks) > min(load.connections, 400)


def test_a_rendition_of_another_size_colour_or_format_is_none() -> None:
    cover = Task(Picture.SMALL, 101, 99, 75, gray=True)
    gray = corpus.photo(101, 99).colourspace("b-w")
    check_picture(corpus.jpeg(gray), cover)
    # As some write it.
    check_picture(corpus.jpeg(gray.colourspace("srgb")), cover)
    for wrong in (
        corpus.jpeg(corpus.photo(101, 99)),
        corpus.jpeg(gray.crop(0, 0, 100, 99)),
        bytes(gray.pngsave_buffer()),
        corpus.jpeg(gray)[:-1000],
        b"yes",
    ):
        with pytest.raises(BenchError, match="rendition"):
            check_picture(wrong, cover)
    # 640 × 856 fits 300 × 300 as 224.3 × 300: what rounds otherwise is right too.
    for width in (224, 225):
        check_picture(corpus.jpeg(corpus.photo(width, 300)), Task(Picture.SMALL, 300, 300, 75, "inside"))


def test_answers_of_many_lengths_are_counted_by_their_mean() -> None:
    whole = Count(1_000, 10.0, 3_000_000, 0)
    assert count_answers(whole, 600_000) == 200.0
    with pytest.raises(BenchError, match="no answer"):
        count_answers(whole, 0)


def test_answers_that_came_without_work_fail_the_round() -> None:
    before = {'{app="images",kind="made"}': 5.0, '{app="images",kind="shared"}': 3.0}
    check_made({}, {})
    check_made(before, {'{app="images",kind="made"}': 105.0, '{app="images",kind="shared"}': 4.0})
    with pytest.raises(BenchError, match="without work"):
        check_made(before, {'{app="images",kind="made"}': 105.0, '{app="images",kind="shared"}': 13.0})


def test_a_client_that_keeps_its_pace_counts_from_when_a_request_was_due() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(33) as threads:
        turn = threading.Lock()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                while connection.recv(4096):
                    with turn:
                        # A server that takes this long for each, one after the other.
                        time.sleep(0.02)
                    connection.sendall(GOOD.encode())

        for _ in range(32):
            threads.submit(answer)
        took_ms, wrong = pace(listener.getsockname(), ["/"], 100.0, 0.3)
    assert (len(took_ms), wrong) == (30, {})
    # Thirty at twice the rate that it can keep: the last waits for half of them.
    assert max(took_ms) > 200 > 20 <= min(took_ms)


@needs_wrk
def test_latency_beside_a_lane_that_turned_nobody_away_is_none(tmp_path: Path) -> None:
    walk = make_walk(Picture.SMALL, 100, 0)
    asks = [Ask("/", 200, None)] * 2 * len(walk.tasks)
    patient = serve(make_variant("patient"), tmp_path)
    try:
        with pytest.raises(BenchError, match="their lane was not full"):
            Paced(50.0, walk, walk, 4).run(patient, asks, serving.share_cores(1), 0.2)
    finally:
        patient.stop()


def test_a_client_that_keeps_its_pace_tells_what_was_not_answered_rightly(tmp_path: Path) -> None:
    full = serve(make_variant("full", 3, FAULT), tmp_path)
    try:
        took_ms, wrong = pace(full.addresses[0], ["/"], 200.0, 0.15)
    finally:
        full.stop()
    assert (len(took_ms), wrong) == (20, {"status 500": 10})


def test_what_a_child_spent_that_has_ended_counts_with_its_parent(tmp_path: Path) -> None:
    child = "import time\nwhile time.process_time() < 0.2: pass"
    run = f"subprocess.run([sys.executable, '-c', {child!r}])"
    parent = f"import subprocess, sys, time; {run}; print('done'); time.sleep(60)"
    log = tmp_path / "log"
    launch = Launch(((sys.executable, "-uc", parent),), ())
    server = serving.Server("a parent", launch, serving.share_cores(1), log)
    try:
        deadline = time.monotonic() + 20
        while "done" not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert sum(server.cpu_s().values()) >= 0.2
    finally:
        server.stop()


# Judging


def test_the_spread_is_half_the_distance_of_the_extremes_by_the_median() -> None:
    assert spread([9.0, 10.0, 12.0]) == pytest.approx(0.15)
    assert spread([7.0]) == 0.0


def test_a_goal_is_held_against_the_medians_of_the_same_run() -> None:
    ours = make_result("ours", (8.0, 9.0, 30.0), ours=True, rate=50.0)
    results = [
        ours,
        make_result("nginx", (6.0, 7.5, 7.0), ours=False),
        make_result("ours", (1.0,), ours=True, case="b", rate=100.0),
    ]
    verdict = judge(Goal("ours", "cpu_us", "at most", 1.3, "nginx"), ours, results)
    assert (verdict.figure, verdict.is_met) == (pytest.approx(9 / 7), True)
    assert verdict.rounds == pytest.approx((8 / 6, 9 / 7.5, 30 / 7))
    assert judge(Goal("ours", "cpu_us", "at most", 1.2, "nginx"), ours, results).is_met is False
    assert judge(Goal("ours", "rate", "at least", 0.6, case="b"), ours, results).is_met is False
    assert judge(Goal("ours", "rate", "at least", 0.5, case="b"), ours, results).is_met is True
    assert judge(Goal("ours", "cpu_us", "at most", 10.0), ours, results).figure == 9.0
    absent = judge(Goal("ours", "cpu_us", "at most", 1.3, "the limit"), ours, results)
    assert (absent.figure, absent.is_met) == (None, None)


def test_a_goal_may_bound_what_one_costs_more_than_the_other() -> None:
    ours = make_result("ours", (900.0, 1000.0, 1100.0), ours=True)
    results = [ours, make_result("the plans alone", (800.0, 700.0, 900.0), ours=False)]
    goal = Goal("ours", "cpu_us", "at most", 250.0, "the plans alone", by="difference")
    verdict = judge(goal, ours, results)
    assert (verdict.figure, verdict.is_met, verdict.rounds) == (200.0, True, (100.0, 300.0, 200.0))
    told = report.format_section("hello", Section("tiny", (goal,)), results)
    assert "✓ ours, CPU µs/request: 200.00 [100.00–300.00] more than the plans alone (aim ≤ 250)" in told


def test_growth_is_from_the_second_tenth_of_the_jobs_to_the_last() -> None:
    filling = [(float(jobs), 50 * min(jobs, 10)) for jobs in range(101)]
    assert measure_growth(filling) == 0.0
    leaking = [(float(jobs), 1000 + 10 * jobs) for jobs in range(101)]
    assert measure_growth(leaking) == pytest.approx((1950 / 1150 - 1) * 100)
    with pytest.raises(BenchError, match="too few jobs"):
        measure_growth([(0.0, 1000), (100.0, 1000)])


def test_a_comparison_takes_out_what_the_machine_did_and_knows_its_noise() -> None:
    old = [make_result("ours", (10.0, 10.2, 9.8), ours=True), make_result("nginx", (7.0, 7.0, 7.0), ours=False)]
    machine_slower = [make_result("ours", (15.0,), ours=True), make_result("nginx", (10.5,), ours=False)]
    (change,) = compare(old, machine_slower)
    assert (change.ratio, change.is_slower) == (pytest.approx(1.0), False)
    we_slower = [make_result("ours", (15.0,), ours=True), make_result("nginx", (7.0,), ours=False)]
    (change,) = compare(old, we_slower)
    assert (change.ratio, change.is_slower) == (pytest.approx(1.5), True)
    noisy = [make_result("ours", (8.0, 11.0, 14.0), ours=True), make_result("nginx", (7.0,), ours=False)]
    (change,) = compare(old, noisy)
    assert (change.ratio, change.is_slower) == (pytest.approx(1.1), False)


def test_results_survive_json(tmp_path: Path) -> None:
    results = [make_result("ours", (1.5, 2.5), ours=True), Result("a", "b", "c", False, "skipped", note="why")]
    report.write_json(tmp_path / "run.json", {}, 1.0, results)
    assert report.read_json(tmp_path / "run.json") == results
    for text in ("no json", "[]", '{"results": [{"suite": 1}]}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(BenchError, match=r"bad\.json was not written by --json"):
            report.read_json(tmp_path / "bad.json")


# Running

# Answers as told, but every N-th time otherwise; after so much work.
SERVER = """
import asyncio, sys
port, every, work, good, bad = *map(int, sys.argv[1:4]), *(text.encode() for text in sys.argv[4:])
class Server(asyncio.Protocol):
    count = 0
    def connection_made(self, transport):
        self.transport = transport
    def data_received(self, data):
        Server.count += 1
        sum(range(work))
        self.transport.write(bad if every and Server.count % every == 0 else good)
async def serve():
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", port)
    await server.serve_forever()
asyncio.run(serve())
"""
GOOD = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 3\r\n\r\nyes"
FAULT = "HTTP/1.1 500 Oh\r\nContent-Type: text/html\r\nContent-Length: 3\r\n\r\nyes"
LONGER = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 4\r\n\r\nyes!"
OTHER = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 3\r\n\r\nnot"


def make_variant(name: str, every: int = 0, bad: str = "", program: str = "", work: int = 0) -> Variant:
    def launch(site: Site, content: Content, processes: int) -> Launch:
        port = serving.find_port()
        numbers = map(str, (port, every, work))
        return Launch(((sys.executable, "-c", SERVER, *numbers, GOOD, bad),), (("127.0.0.1", port),))

    return Variant(name, True, launch, program)


def serve(variant: Variant, folder: Path) -> serving.Server:
    launch = variant.launch(Site(folder, {}, {}, ""), Content.TINY, 1)
    return serving.Server(variant.name, launch, serving.share_cores(1), folder / "log")


def run(*servers: Variant, variety: Variety = "same", arguments: tuple[str, ...] = ()) -> int:
    case = Case(
        "a case", Content.TINY, KeepAlive(4, variety), servers, (Goal("right", "cpu_us", "at most", 1.0, "right"),)
    )
    suites = {"planted": Suite("planted", "A test", ((case,),))}

    def make_site(folder: Path) -> Site:
        return Site(folder, {Content.TINY: "/"}, {Content.TINY: b"yes"}, "")

    return main(["planted", "--seconds=0.3", "--rounds=1", *arguments], suites, make_site)


@needs_wrk
def test_wrong_answers_fail_the_run_and_missing_rivals_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    status = run(
        make_variant("right"),
        make_variant("wrong at once", 1, OTHER),
        make_variant("sometimes 500", 50, FAULT),
        make_variant("sometimes longer", 50, LONGER),
        make_variant("not there", program="no-such-program"),
    )
    told = capsys.readouterr()
    assert status == 1
    assert "wrong at once: FAILED, GET / was answered with another body" in told.out
    assert "sometimes 500: FAILED" in told.out
    assert "sometimes longer: FAILED" in told.out
    assert "not there: SKIPPED, no-such-program is not installed" in told.out
    assert "✓ right, CPU µs/request: 1.00 × right (aim ≤ 1)" in told.out
    assert "FAILED: 3" in told.err


@needs_wrk
def test_a_server_that_has_become_slow_is_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    then = tmp_path / "then.json"
    assert run(make_variant("right"), arguments=(f"--json={then}",)) == 0
    # Some 50 µs more.
    slow = make_variant("right", work=3_000)
    assert run(slow, arguments=(f"--compare={then}",)) == 1
    assert "SLOWER" in capsys.readouterr().out
    report.write_json(then, {}, 0.3, [make_result("right", (10_000.0,), ours=True, suite="planted", case="a case")])
    assert run(slow, variety="never the same", arguments=(f"--compare={then}",)) == 0
    assert "SLOWER" not in capsys.readouterr().out


@needs_wrk
def test_renditions_are_made_by_servers_and_loops_and_whoever_makes_none_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    walk = make_walk(Picture.SMALL, 100, 2, gray=True)
    goals = (Goal("uvimg", "cpu_us", "at most", None, "the plans alone"),)
    made = Case("made", Content.MADE, Making(4, walk), (makers.PLAIN, makers.BARE, makers.PLANS), goals)
    paced = Case("paced", Content.MADE, Paced(50.0, walk), (makers.PLAIN,))
    suites = {"planted": Suite("planted", "A test", ((made, paced),))}
    lazy = serve(make_variant("lazy"), tmp_path)
    arguments = ["planted", "--seconds=0.5", "--rounds=1", f"--json={tmp_path / 'now.json'}"]
    arguments.append(f"--against=lazy=http://127.0.0.1:{lazy.addresses[0][1]}/?w={{w}}&h={{h}}")
    try:
        assert main(arguments, suites, lambda folder: Site(folder, {}, {}, "")) == 1
    finally:
        lazy.stop()
    told = capsys.readouterr()
    assert "lazy: FAILED, a rendition cannot be decoded" in told.out
    assert "FAILED: 2" in told.err
    assert "· uvimg, CPU µs/request: " in told.out
    measures = {
        (result.case, result.variant): set(result.measures) for result in report.read_json(tmp_path / "now.json")
    }
    assert measures["made", "uvimg"] >= {"cpu_us", "rate", "client", "p99_ms", "rss_mib"}
    assert measures["made", "bare libvips"] == measures["made", "the plans alone"] >= {"cpu_us", "rate", "rss_mib"}
    assert measures["paced", "uvimg"] == {"mean_ms", "p99_ms", "max_ms"}


def test_what_is_asked_wrongly_is_one_readable_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["hell"],
        ["hello", "--seconds=0"],
        ["hello", "--rounds=x"],
        ["hello", "--only=nobody"],
        ["hello", "--against=nginx"],
        ["hello", "--against=nginx=http://127.0.0.1:99999/"],
        ["hello", "--compare=/no/such/file"],
        ["hello", f"--json={tmp_path}"],
        ["hello", "--nonsense"],
    ):
        try:
            status = main(arguments)
        except SystemExit as exc:
            status = exc.code  # type: ignore[assignment]
        told = capsys.readouterr()
        assert status == 2, arguments
        assert told.err.startswith("bench: ")
        assert told.err.count("\n") == 1


def test_the_list_names_every_suite_and_what_is_missing_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--list"]) == 0
    told = capsys.readouterr().out
    assert all(f"{name}: " in told for name in variants.SUITES)
    monkeypatch.setenv("PATH", "")
    assert find_missing("ab").endswith("apt-get install apache2-utils")
    assert json.dumps(find_missing("")) == '""'
