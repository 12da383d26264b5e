"""The echo tables: what the client counts, what is made of it, and that a server which lies is found out."""

import os
import shutil
import socket
import threading
from pathlib import Path

import pytest

from bench import echoes, report
from bench.__main__ import main
from bench.charts import draw_bars
from bench.messages import Counted, find_percentile, summarise
from bench.result import Goal, Result
from bench.serving import BenchError, Launch, Server, share_cores
from bench.site import Content, Site, Variant
from bench.variants import Case, Suite

needs_compiler = pytest.mark.skipif(not shutil.which("cc") and "CI" not in os.environ, reason="cc is not installed")


def test_the_columns_are_those_of_a_sample_by_hand() -> None:
    # Latencies of 100, 200, 200 and 500 us: mean 250, deviation sqrt((150² + 50² + 50² + 250²) / 4) = 150.
    latencies = [100_000, 200_000, 200_000, 500_000]
    counted = Counted(
        *(4, 2.0, 0.5, sum(latencies), sum(each * each for each in latencies), 100_000, 500_000, 10_000),
        [(10, 1), (20, 2), (50, 1)],
    )
    columns = summarise(counted, 1 << 20)
    assert columns == pytest.approx(
        {
            "rate": 2.0,
            "mib_s": 2.0,
            "least_ms": 0.1,
            "mean_ms": 0.25,
            "max_ms": 0.5,
            "deviation_ms": 0.15,
            "deviation_percent": 60.0,
            "p50_ms": 0.205,
            # Half a step beyond the greatest there was, so that one.
            "p99_ms": 0.5,
            "client": 25.0,
        }
    )
    assert find_percentile(counted, 0.75) == 205_000
    assert find_percentile(counted, 0.76) == 500_000


def _serve(answer: bytes) -> socket.socket:
    """A server that gives back as many bytes as come, but others."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                while data := connection.recv(1 << 16):
                    connection.sendall(answer[: len(data)] if answer else data[:-1])

    threading.Thread(target=serve, daemon=True).start()
    return listener


@needs_compiler
@pytest.mark.parametrize(("answer", "said"), [(bytes(1 << 16), "comparing"), (b"", "last messages")])
def test_a_server_that_gives_back_other_bytes_fails(answer: bytes, said: str, tmp_path: Path) -> None:
    with _serve(answer) as listener:
        launch = Launch((), (listener.getsockname(),))
        server = Server("liar", launch, share_cores(1), tmp_path / "log")
        with pytest.raises(BenchError, match=said):
            echoes.Messages(1024).run(server, [], share_cores(1), 0.2)


@needs_compiler
def test_a_run_ends_with_tables_a_page_and_its_charts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = Variant("nobody's", False, lambda site, content, processes: Launch((), ()), program="no-such-program")
    goals = (Goal("uvloop", "cpu_us", "at most", None, "uvloop streams"),)
    variants = (echoes.UVLOOP, echoes.UVLOOP_STREAMS, missing)
    published = {"uvloop": {"rate": 105_458.6}, "nobody's": {"rate": 1234.0}}
    case = Case("1 KiB", Content.MESSAGES, echoes.Messages(1024), variants, goals, 1, "2016", published)
    suites = {"echo": Suite("echo", "A <test>", ((case,),))}
    out = tmp_path / "out"
    arguments = ["echo", "--seconds=0.3", "--rounds=2", f"--json={tmp_path / 'now.json'}", f"--report={out}"]
    assert main(arguments, suites, lambda folder: Site(folder, {}, {}, "")) == 0
    told = capsys.readouterr().out
    assert "nobody's: SKIPPED, no-such-program is not installed" in told
    first = report.read_json(tmp_path / "now.json")[0]
    assert set(first.measures) >= {"cpu_us", "rate", "mib_s", "least_ms", "mean_ms", "deviation_percent", "p99_ms"}
    assert first.published == {"rate": 105_458.6}
    page, text = (out / "index.html").read_text(), (out / "report.md").read_text()
    for form in (page, text):
        assert "105,459" in form
        assert "published: 1,234 requests/s" in form.replace("&#x27;", "'")
    assert "A &lt;test&gt;" in page
    assert (out / "echo-1-kib.svg").read_text() in page
    assert "![1 KiB](echo-1-kib.svg)" in text


def test_a_chart_shows_every_median_and_nothing_where_nothing_was_measured() -> None:
    rows = [Result("s", "c", name, name == "a", "measured", {"cpu_us": values}) for name, values in
            (("a", (1.0, 2.0, 3.0)), ("b", (4.0, 4.0, 4.0)))]  # fmt: skip
    chart = draw_bars("s", "c", rows)
    assert chart.count("<rect") == 2
    assert 'class="ours" x="230" y="28" width="205.0"' in chart
    assert draw_bars("s", "c", [Result("s", "c", "a", True, "failed", note="why")]) == ""
