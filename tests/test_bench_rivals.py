"""The rivals of the published tables: that they do the same job, that they are told of, and what stands beside them."""

import os
import sys
import time
from pathlib import Path

import pytest

from bench import caches, compression, document, php, programs, published, report, thumbor, variants
from bench.__main__ import main
from bench.charts import draw_lines
from bench.exchange import check
from bench.load import KeepAlive
from bench.making import Making
from bench.result import Goal, Result, Section
from bench.rounds import Subject, count_rounds
from bench.serving import Launch, Server, share_cores
from bench.site import Content, Site, Variant, absent
from bench.variants import Case, Suite
from bench.work import Picture, draw, make_walk


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    # Where Debian has them; only root's PATH has it.
    monkeypatch.setenv("PATH", os.environ["PATH"] + ":/usr/sbin")
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "original.jpg").write_bytes(draw(Picture.SMALL))
    bodies = {Content.ORIGINAL: draw(Picture.SMALL), Content.RENDITION: b"\xff\xd8\xff" + bytes(1000)}
    return Site(tmp_path, {}, bodies, "")


def skip_without(reason: str) -> None:
    """In CI it has to be there."""
    if reason and "CI" not in os.environ:
        pytest.skip(reason)


def start(variant: Variant, site: Site, content: Content) -> Server:
    return Server(variant.name, variant.launch(site, content, 1), share_cores(1), site.folder / "log")


def test_php_gives_originals_and_makes_the_rendition_of_the_published_table(site: Site) -> None:
    skip_without(programs.find_missing("nginx") or php.GD.lacks())
    for variant in (php.GD, php.KEEPING):
        server = start(variant, site, Content.RENDITION)
        try:
            for content in (Content.ORIGINAL, Content.RENDITION, Content.RENDITION):
                check(server.addresses[0], variant.ask(site, content, server.addresses[0]))
        finally:
            server.stop()
    assert len(list(site.folder.glob("php-*/*.jpg"))) == 1


def test_php_makes_all_that_the_others_make(site: Site) -> None:
    skip_without(programs.find_missing("nginx") or php.GD.lacks())
    rivals = [variant for variant in (php.GD, php.IMAGEMAGICK, thumbor.MAKING) if not variant.lacks()]
    for rival in rivals:
        server = start(rival, site, Content.MADE)
        try:
            for walk in (make_walk(Picture.SMALL, 100, 0, gray=True), make_walk(Picture.SMALL, 200, 0, "inside")):
                check(server.addresses[0], rival.ask_for(site, walk, server.addresses[0])[0])
        finally:
            server.stop()


def test_nginx_answers_from_memcached_what_was_put_there(site: Site) -> None:
    skip_without(programs.find_missing("nginx", "memcached"))
    server = start(caches.NGINX, site, Content.RENDITION)
    try:
        for content in (Content.ORIGINAL, Content.RENDITION):
            check(server.addresses[0], caches.NGINX.ask(site, content, server.addresses[0]))
    finally:
        server.stop()


def test_a_rival_that_cannot_be_installed_is_named_with_the_words_of_who_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "_RIVALS", tmp_path)
    monkeypatch.setattr(programs, "THUMBOR", tmp_path / "no")
    assert thumbor.MAKING.lacks() == "thumbor is not installed: scripts/bench-rivals"
    (tmp_path / "thumbor.failed").write_text("ERROR: it needs an older Python\n")
    assert thumbor.MAKING.lacks() == "thumbor could not be installed: ERROR: it needs an older Python"


def test_a_server_that_still_works_for_nobody_is_waited_for(tmp_path: Path) -> None:
    busy = "import time\nwhile time.process_time() < 0.4: pass\ntime.sleep(60)"
    server = Server("busy", Launch(((sys.executable, "-c", busy),), ()), share_cores(1), tmp_path / "log")
    try:
        deadline = time.monotonic() + 20
        while sum(server.cpu_s().values()) < 0.1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        server.await_rest()
        assert sum(server.cpu_s().values()) >= 0.4
    finally:
        server.stop()


# What was published


def test_every_published_figure_stands_beside_a_server_that_is_measured_or_named() -> None:
    def find(suite: str) -> list[tuple[str, str, float]]:
        """Case, server and rate of each published row that has its place."""
        return [
            (case.name, variant.name, case.published_figures[variant.name]["rate"])
            for case in variants.SUITES[suite].cases
            for variant in case.variants
            if variant.name in case.published_figures
        ]

    echo = [rate for _, _, rate in find("echo")]
    assert sorted(echo) == sorted(each["rate"] for kib in (1, 10, 100) for each in published.tell_echo(kib).values())
    assert len(echo) == 33
    kept = [(name, rate) for name, _, rate in find("connections") if "keep-alive" in name]
    assert sorted(rate for _, rate in kept) == sorted(rate for pair in published.IT_WORKS.values() for rate in pair)
    assert len({name for name, _ in kept}) == len(published.IT_WORKS) == 23
    assert sorted(rate for _, _, rate in find("static")) == sorted(published.STATIC + published.PROCESSING)
    made = {rate for suite in ("resize", "script") for _, _, rate in find(suite)}
    assert made == {rate for level in published.MADE.values() for rate, _ in level}
    assert [rate for _, _, rate in find("kv")] == [published.KYOTO["rate"], published.OLEG["rate"]]
    rows = {row.name for row in compression._list_rows()}
    assert published.TEXT.keys() <= rows
    assert len(published.TEXT) == 25


def test_whoever_cannot_be_measured_is_told_of_with_what_was_published(capsys: pytest.CaptureFixture[str]) -> None:
    old = absent("zimg 2.2", "nobody has it")
    figures = {"zimg 2.2": {"rate": 73.85, "mean_ms": 109.0}}
    case = Case("made", Content.TINY, KeepAlive(1), (old,), (), 1, "then", published_figures=figures)
    assert main(["a", "--quick"], {"a": Suite("a", "A", ((case,),))}, lambda folder: Site(folder, {}, {}, "")) == 0
    told = capsys.readouterr().out
    assert "zimg 2.2: SKIPPED, nobody has it (published: 74 requests/s, 109.000 mean ms)" in told


def test_a_quick_run_of_all_keeps_to_what_was_published_and_names_what_it_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nobody = (absent("nobody", "is there"),)
    published_case = Case("kept", Content.TINY, KeepAlive(1), nobody, (), 1, "2013, a machine", quick_rounds=1)
    own_case = Case("our own", Content.TINY, KeepAlive(1), nobody)
    suites = {
        "a": Suite("a", "A", ((published_case,), (own_case,))),
        "b": Suite("b", "B", ((own_case,),)),
    }
    arguments = ["all", "--quick", "--only=nobody", f"--report={tmp_path / 'out'}"]
    assert main(arguments, suites, lambda folder: Site(folder, {}, {}, "")) == 0
    told = capsys.readouterr().out
    assert "a · kept" in told
    assert "our own" not in told
    for name in ("index.html", "report.md"):
        page = (tmp_path / "out" / name).read_text()
        assert "Not in this run: of a “our own”; all of b; all of zstd." in page
        assert "2013, a machine" in page
    assert count_rounds(Subject("a", published_case, nobody[0]), 3, quick=True) == 1
    assert count_rounds(Subject("a", published_case, nobody[0]), 3, quick=False) == 3
    making = Case("made", Content.MADE, Making(1, make_walk(Picture.SMALL, 100, 0)), nobody)
    assert count_rounds(Subject("a", making, nobody[0]), 3, quick=True) == 3


# The report


def test_cases_that_differ_in_a_number_have_one_table_in_the_order_of_that_number(tmp_path: Path) -> None:
    goals = (Goal("uvimg", "cpu_us", "at most", 1.0, "nginx"),)
    sections = [Section(f"{level} at once", goals, "2013: so", "connections", level) for level in (100, 1000, 20)]
    results = [
        Result(
            "s", section.name, name, ours, "measured", {"rate": (rate,), "cpu_us": (1e6 / rate,)}, "", published_figures
        )
        for section in sections
        for name, ours, rate, published_figures in (
            ("uvimg", True, 5000.0 + section.level, {"rate": 30.0}),
            ("nginx", False, 4000.0, {}),
        )
    ]
    results.append(Result("s", sections[0].name, "alone", False, "measured", {"rate": (1.0,)}))
    document.make_folder(tmp_path)
    document.write(tmp_path, {}, "", [document.Chapter("s", "S", sections)], results)
    text = (tmp_path / "report.md").read_text()
    assert (
        "| connections | uvimg | published | nginx | CPU, uvimg ÷ nginx |\n| --- | ---: | ---: | ---: | ---: |\n"
        "| 20 | 5,020 | 30 | 4,000 | 0.80 |\n| 100 | 5,100 | 30 | 4,000 | 0.78 |\n"
        "| 1,000 | 6,000 | 30 | 4,000 | 0.67 |\n" in text
    )
    page = (tmp_path / "index.html").read_text()
    assert "<td>5,020<small>30</small></td><td>4,000</td>" in page
    assert page.count("<details>") == 3
    assert page.count("<p>published: 2013</p>") == 1
    assert (tmp_path / "s-connections.svg").read_text() in page


def test_lines_end_where_their_figures_do_and_nobody_with_one_point_has_one() -> None:
    chart = draw_lines("n", [1, 2, 4], {"uvimg": [10.0, None, 20.0], "nginx": [5.0, 5.0, 5.0], "x": [None, 1.0, None]},
                       {"uvimg"}, "rate")  # fmt: skip
    assert chart.count("<polyline") == 2
    # The greatest is at the top, and the last of three numbers at the right end.
    assert '<polyline class="ours1" points="70.0,144.0 540.0,34.0"/>' in chart
    assert draw_lines("n", [1, 2], {"x": [None, 1.0]}, set(), "rate") == ""


def test_texts_are_measured_in_turn_and_told_of_beside_what_was_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = os.sched_getaffinity(0)
    text = tmp_path / "text.html"
    text.write_bytes(b"<p>A text that says the same again and again.</p>\n" * 2000)
    out = tmp_path / "out"
    arguments = [
        "zstd",
        "--seconds=0.05",
        "--rounds=2",
        f"--text={text}",
        "--case=none",
        "--case=gzip",
        "--case=zstd 3",
        "--case=ob_gz",
    ]
    assert main([*arguments, f"--report={out}", f"--json={tmp_path / 'now.json'}"]) == 0
    assert os.sched_getaffinity(0) == before
    rows = {row.variant: row for row in report.read_json(tmp_path / "now.json") if row.case == "the text, one client"}
    assert rows["zstd 3"].published == {"coded_bytes": 1_240_800.0, "hundred_s": 4.45}
    assert rows["none"].measures["coded_bytes"] == (100_000.0,)
    assert len(rows["gzip"].measures["cpu_ms"]) == 2
    assert rows["zstd 3"].measures["to_library"][0] == pytest.approx(1.0, abs=0.05)
    told = capsys.readouterr().out
    assert "zstd 3, bytes: " in told
    assert "Ryzen 7 5700G" in told
    assert "1,240,800" in (out / "index.html").read_text()
    # By the program or by a reason.
    assert "ob_gzhandler" in rows
