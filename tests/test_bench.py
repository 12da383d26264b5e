"""The measurements: what they count, how they judge, and that a wrong answer is never a fast one."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from bench import report, serving, variants
from bench.__main__ import main
from bench.exchange import Ask
from bench.generators import parse_ab, parse_wrk
from bench.load import KeepAlive, Variety, write_script
from bench.result import Goal, Result, compare, judge, spread
from bench.serving import BenchError, Launch
from bench.site import Content, Site, Variant, find_missing
from bench.variants import Case, Suite

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


def make_result(
    variant: str, cpu_us: tuple[float, ...], *, ours: bool, case: str = "tiny", rate: float = 1.0
) -> Result:
    return Result("hello", case, variant, ours, "measured", {"cpu_us": cpu_us, "rate": (rate,)})


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

# Answers as told, but every N-th time otherwise.
SERVER = """
import asyncio, sys
port, every, good, bad = int(sys.argv[1]), int(sys.argv[2]), *(text.encode() for text in sys.argv[3:])
class Server(asyncio.Protocol):
    count = 0
    def connection_made(self, transport):
        self.transport = transport
    def data_received(self, data):
        Server.count += 1
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


def make_variant(name: str, every: int = 0, bad: str = "", program: str = "") -> Variant:
    def launch(site: Site, content: Content, processes: int) -> Launch:
        port = serving.find_port()
        return Launch(((sys.executable, "-c", SERVER, str(port), str(every), GOOD, bad),), (("127.0.0.1", port),))

    return Variant(name, True, launch, program)


def run(*servers: Variant, variety: Variety = "same", arguments: tuple[str, ...] = ()) -> int:
    case = Case(
        "a case", Content.TINY, KeepAlive(4, variety), servers, (Goal("right", "cpu_us", "at most", 1.0, "right"),)
    )
    suites = {"planted": Suite("planted", "A test", ((case,),))}

    def make_site(folder: Path) -> Site:
        return Site(folder, {Content.TINY: "/"}, {Content.TINY: b"yes"}, "")

    return main(["planted", "--seconds=0.3", "--rounds=1", *arguments], suites, make_site)


# In CI they have to be there.
needs_wrk = pytest.mark.skipif(
    not (shutil.which("wrk") and shutil.which("ss")) and "CI" not in os.environ, reason="wrk or ss is not installed"
)


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
def test_a_slow_down_since_an_older_run_is_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs: list[tuple[Variety, float, int]] = [("10,000", 0.1, 1), ("never the same", 10_000.0, 0)]
    for variety, then_us, status in runs:
        then = Result("planted", "a case", "right", True, "measured", {"cpu_us": (then_us,)})
        report.write_json(tmp_path / "then.json", {}, 0.3, [then])
        assert run(make_variant("right"), variety=variety, arguments=(f"--compare={tmp_path / 'then.json'}",)) == status
        assert ("SLOWER" in capsys.readouterr().out) is bool(status)


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
