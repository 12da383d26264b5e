"""A run as a folder to read: index.html with all of it, the same as report.md, and its charts as files.

The page needs nothing but itself, follows the reader's light or dark and fits a narrow window. A chart shows what
decides, CPU time where there is any; the tables beside it have the rest.
"""

import html
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.report import tabulate, tell_goals, tell_missing
from bench.result import MEASURES, Result
from bench.serving import BenchError
from bench.variants import Case, Suite

# What a chart shows: the first of these that was measured.
_CHARTED = ("cpu_us", "rate", "connection_kib", "p99_ms", "growth", "rss_growth")


@dataclass(frozen=True, slots=True)
class Chapter:
    """A suite, and the cases of it that were measured."""

    suite: Suite
    cases: Sequence[Case]


def make_folder(folder: Path) -> None:
    """BenchError when it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index.html").open("a").close()
    except OSError as exc:
        raise BenchError(f"{folder}: {exc.strerror}") from exc


def write(
    folder: Path, machine: dict[str, str], how: str, chapters: Sequence[Chapter], results: Sequence[Result]
) -> None:
    """The three forms of one report."""
    for chapter in chapters:
        for case in chapter.cases:
            if chart := draw_chart(chapter.suite.name, case.name, results):
                (folder / _name_chart(chapter.suite.name, case.name)).write_text(chart)
    (folder / "report.md").write_text(_write_markdown(machine, how, chapters, results))
    (folder / "index.html").write_text(_write_page(machine, how, chapters, results))


def _name_chart(suite: str, case: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{suite} {case}".lower()).strip("-") + ".svg"


# Charts

_BAR, _GAP, _LABEL, _PLOT, _VALUE = 18, 8, 210, 430, 90
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1c2330}.rival{fill:#a9b4c6}.ours{fill:#2b59c3}"
    ".range{stroke:#1c2330;stroke-width:1.5}"
    "@media(prefers-color-scheme:dark){text{fill:#e4e8f0}.rival{fill:#56617a}.ours{fill:#6f96f5}.range{stroke:#e4e8f0}}"
)


def draw_chart(suite: str, case: str, results: Sequence[Result]) -> str:
    """An SVG: a bar for each median, a line from the least to the most. "" where nothing was measured."""
    rows = [row for row in results if (row.suite, row.case, row.outcome) == (suite, case, "measured")]
    measure = next((name for name in _CHARTED if any(name in row.measures for row in rows)), None)
    if measure is None:
        return ""
    rows = [row for row in rows if measure in row.measures]
    most = max(max(row.measures[measure]) for row in rows)
    if most <= 0:
        return ""
    title = f"{MEASURES[measure].title}, {MEASURES[measure].better} is better"
    height = 30 + len(rows) * (_BAR + _GAP)
    width = _LABEL + _PLOT + _VALUE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{html.escape(f"{case}: {title}")}"><style>{_STYLE}</style>',
        f'<text x="{_LABEL}" y="16">{html.escape(title)}</text>',
    ]
    for number, row in enumerate(rows):
        values = row.measures[measure]
        middle, top = statistics.median(values), 28 + number * (_BAR + _GAP)
        left, right, end = (_LABEL + max(0.0, value) / most * _PLOT for value in (min(values), max(values), middle))
        parts += [
            f'<text x="{_LABEL - 8}" y="{top + 14}" text-anchor="end">{html.escape(row.variant)}</text>',
            f'<rect class="{"ours" if row.ours else "rival"}" x="{_LABEL}" y="{top}" width="{end - _LABEL:.1f}" '
            f'height="{_BAR}" rx="2"/>',
            f'<line class="range" x1="{left:.1f}" x2="{right:.1f}" y1="{top + _BAR / 2}" y2="{top + _BAR / 2}"/>',
            f'<text x="{max(right, end) + 6:.1f}" y="{top + 14}">{middle:,.{MEASURES[measure].digits}f}</text>',
        ]
    return "".join([*parts, "</svg>\n"])


# Markdown


def _write_markdown(machine: dict[str, str], how: str, chapters: Sequence[Chapter], results: Sequence[Result]) -> str:
    lines = ["# uvimg beside its rivals", "", _describe(machine, how), ""]
    for chapter in chapters:
        lines += [f"## {chapter.suite.name}", "", f"{chapter.suite.title}.", ""]
        for case in chapter.cases:
            suite = chapter.suite.name
            titles, *rows = tabulate(suite, case.name, results)
            lines += [f"### {case.name}", ""]
            if rows:
                lines += [f"![{case.name}]({_name_chart(suite, case.name)})", ""]
                lines += [_join(titles), _join(["---", *["---:"] * (len(titles) - 1)]), *map(_join, rows), ""]
            told = [*tell_missing(suite, case.name, results), *tell_goals(suite, case.name, results, case.goals)]
            told += [f"published: {case.published}"] if case.published else []
            lines += [*(f"- {line}" for line in told), ""]
    return "\n".join(lines)


def _join(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _describe(machine: dict[str, str], how: str) -> str:
    return f"{' · '.join(f'{name} {value}' for name, value in machine.items())} · {how}"


# The page

_PAGE_STYLE = """
:root{color-scheme:light dark;--ink:#1c2330;--dim:#5b667a;--paper:#fbfcfe;--line:#d9dfe9;--good:#1a7f45;--bad:#c0392b}
@media(prefers-color-scheme:dark){:root{--ink:#e4e8f0;--dim:#98a3b8;--paper:#151a23;--line:#2e3748;--good:#5fc98b;
--bad:#ff8073}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:80rem;margin:0 auto;
padding:1.5rem}
h1{margin:0}h2{margin:3rem 0 .2rem;border-top:1px solid var(--line);padding-top:1.5rem}h3{margin:2rem 0 .5rem}
p{margin:.3rem 0 1rem;color:var(--dim)}nav a{margin-right:1rem}a{color:inherit}
svg{max-width:46rem;width:100%;height:auto;display:block;margin:.5rem 0 1rem}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .7rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:var(--paper)}
th{color:var(--dim);font-weight:500}tr.ours td:first-child{font-weight:600}
ul{list-style:none;padding:0;margin:.7rem 0;font-size:.92rem}.met::before{content:"✓ ";color:var(--good)}
.missed::before{content:"✗ ";color:var(--bad)}.told::before{content:"· "}.missing{color:var(--bad)}
.published{color:var(--dim)}
"""
_MARKS = {"✓": "met", "✗": "missed", "·": "told", "?": "told"}


def _write_page(machine: dict[str, str], how: str, chapters: Sequence[Chapter], results: Sequence[Result]) -> str:
    links = "".join(f'<a href="#{chapter.suite.name}">{chapter.suite.name}</a>' for chapter in chapters)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>uvimg beside its rivals</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_PAGE_STYLE}</style></head><body>",
        f"<h1>uvimg beside its rivals</h1><p>{html.escape(_describe(machine, how))}</p>",
        "<p>All of a case are measured in turn, in one run, on one machine: what counts is the ratio of one to another "
        "here. Figures are medians with the least and the most of all rounds. Published figures were measured by "
        "others, on machines of theirs.</p>",
        f"<nav>{links}</nav>",
    ]
    ours = {result.variant for result in results if result.ours}
    for chapter in chapters:
        suite = chapter.suite.name
        parts.append(f'<section id="{suite}"><h2>{suite}</h2><p>{html.escape(chapter.suite.title)}.</p>')
        for case in chapter.cases:
            parts.append(f"<h3>{html.escape(case.name)}</h3>{draw_chart(suite, case.name, results)}")
            parts.append(_write_table(tabulate(suite, case.name, results), ours))
            items = [("missing", line) for line in tell_missing(suite, case.name, results)]
            items += [(_MARKS[line[0]], line[2:]) for line in tell_goals(suite, case.name, results, case.goals)]
            items += [("published", f"published: {case.published}")] if case.published else []
            parts.append(f"<ul>{''.join(f'<li class={kind}>{html.escape(line)}</li>' for kind, line in items)}</ul>")
        parts.append("</section>")
    return "".join([*parts, "</body></html>\n"])


def _write_table(table: list[list[str]], ours: set[str]) -> str:
    titles, *rows = table
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    body = "".join(
        f"<tr{' class=ours' if row[0] in ours else ''}>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
