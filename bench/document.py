"""A run as a folder to read: index.html with all of it, the same as report.md, and its charts as files.

The page needs nothing but itself, follows the reader's light or dark and fits a narrow window. A chart shows what
decides, CPU time where there is any; the tables beside it have the rest. Cases that differ in a number alone have one
table together, a line for each, and behind it all of each case, folded away.
"""

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.charts import draw_bars, draw_lines
from bench.report import PUBLISHED, format_figure, tabulate, tell_goals, tell_missing
from bench.result import Goal, Result, Section, judge
from bench.serving import BenchError

# What the one table of a series shows, and what its ratios are of.
_SERIAL, _DECIDING = "rate", "cpu_us"
_TITLE = "uvimg beside its rivals"
_READING = (
    "All of a case are measured in turn, in one run, on one machine: what counts is the ratio of one to another here. "
    "Figures are medians with the least and the most of all rounds. Published figures were measured by others, on "
    "machines of theirs: zimg's stand beside what is uvimg's here."
)


@dataclass(frozen=True, slots=True)
class Chapter:
    """A suite, whether or not its sections were measured."""

    name: str
    title: str
    sections: Sequence[Section]

    def find_told(self, results: Sequence[Result]) -> list[Section]:
        told = {result.case for result in results if result.suite == self.name}
        return [section for section in self.sections if section.name in told]


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
        for part in _arrange(chapter, results):
            sections = part.sections if isinstance(part, _Series) else (part,)
            for section in sections:
                if chart := draw_bars(chapter.name, section.name, results):
                    (folder / _name_chart(chapter.name, section.name)).write_text(chart)
            if isinstance(part, _Series) and (chart := part.draw()):
                (folder / _name_chart(chapter.name, part.name)).write_text(chart)
    (folder / "report.md").write_text(_write_markdown(machine, how, chapters, results))
    (folder / "index.html").write_text(_write_page(machine, how, chapters, results))


def _name_chart(suite: str, case: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{suite} {case}".lower()).strip("-") + ".svg"


def _tell_left(chapters: Sequence[Chapter], results: Sequence[Result]) -> str:
    """What of these suites was not measured."""
    left = []
    for chapter in chapters:
        told = chapter.find_told(results)
        if not told:
            left.append(f"all of {chapter.name}")
        elif names := [section.name for section in chapter.sections if section not in told]:
            left.append(f"of {chapter.name} {', '.join(f'“{name}”' for name in names)}")
    return f"Not in this run: {'; '.join(left)}." if left else ""


def _tell_missed(chapters: Sequence[Chapter], results: Sequence[Result]) -> list[tuple[str, str, str]]:
    """Suite, case and line of each goal that was not met."""
    return [
        (chapter.name, section.name, line[2:])
        for chapter in chapters
        for section in chapter.find_told(results)
        for line in tell_goals(chapter.name, section, results)
        if line.startswith("✗")
    ]


def _describe(machine: dict[str, str], how: str) -> str:
    return f"{' · '.join(f'{name} {value}' for name, value in machine.items())} · {how}"


# Series


@dataclass(frozen=True, slots=True)
class _Series:
    """Sections that differ in a number alone, and their results."""

    name: str
    sections: Sequence[Section]
    results: Sequence[Result]

    def tabulate(self) -> list[list[str]]:
        """A line for each number: requests/s of each server, beside what was published."""
        table = [[self.name], *([f"{section.level:,}"] for section in self.sections)]
        for variant in self._variants():
            rows = [self._find(section, variant) for section in self.sections]
            has_published = any(row and row.published for row in rows)
            table[0] += [variant, *([PUBLISHED] if has_published else [])]
            for line, row in zip(table[1:], rows, strict=True):
                line.append(format_figure(_SERIAL, row.median(_SERIAL) if row else None))
                if has_published:
                    line.append(format_figure(_SERIAL, row.published.get(_SERIAL) if row else None))
        for variant, rival in self._pairs():
            table[0].append(f"CPU, {variant} ÷ {rival}")
            for line, section in zip(table[1:], self.sections, strict=True):
                line.append(self._tell_ratio(section, variant, rival))
        return table

    def _pairs(self) -> list[tuple[str, str]]:
        """Whose CPU time is held against whose in several of them."""
        pairs = [
            (goal.variant, goal.rival)
            for section in self.sections
            for goal in section.goals
            if goal.measure == _DECIDING and goal.by == "ratio" and goal.rival and not goal.case
            if self._tell_ratio(section, goal.variant, goal.rival) != "–"
        ]
        return [pair for pair in dict.fromkeys(pairs) if pairs.count(pair) > 1]

    def _tell_ratio(self, section: Section, variant: str, rival: str) -> str:
        row = self._find(section, variant)
        verdict = judge(Goal(variant, _DECIDING, "at most", None, rival), row, self.results) if row else None
        return "–" if verdict is None or verdict.figure is None else f"{verdict.figure:.2f}"

    def draw(self) -> str:
        """What decides, as in all other charts."""
        measure = _DECIDING if any(_DECIDING in row.measures for row in self.results) else _SERIAL
        lines = {
            variant: [
                row.median(measure) if (row := self._find(section, variant)) else None for section in self.sections
            ]
            for variant in self._variants()
        }
        ours = {row.variant for row in self.results if row.ours}
        return draw_lines(self.name, [section.level for section in self.sections], lines, ours, measure)

    def tell_published(self) -> list[str]:
        """Where and when: what is told behind it is each section's own."""
        texts = (section.published.partition(": ")[0] for section in self.sections)
        return list(dict.fromkeys(filter(None, texts)))

    def _variants(self) -> list[str]:
        """Who was measured in several of them, or was not but has published figures."""
        names = [row.variant for row in self.results if row.measures or row.published]
        return [name for name in dict.fromkeys(names) if names.count(name) > 1]

    def _find(self, section: Section, variant: str) -> Result | None:
        return next((row for row in self.results if (row.case, row.variant) == (section.name, variant)), None)


def _arrange(chapter: Chapter, results: Sequence[Result]) -> Iterator[_Series | Section]:
    """A chapter's content in its order; a series stands where the first of its sections would."""
    told = chapter.find_told(results)
    done: set[str] = set()
    for section in told:
        alike = [each for each in told if each.series == section.series]
        if not section.series or len(alike) == 1:
            yield section
        elif section.series not in done:
            done.add(section.series)
            names = {each.name for each in alike}
            rows = [row for row in results if row.suite == chapter.name and row.case in names]
            yield _Series(section.series, sorted(alike, key=lambda each: each.level), rows)


# Markdown


def _write_markdown(machine: dict[str, str], how: str, chapters: Sequence[Chapter], results: Sequence[Result]) -> str:
    lines = [f"# {_TITLE}", "", _describe(machine, how), "", _READING, ""]
    if left := _tell_left(chapters, results):
        lines += [left, ""]
    for chapter in chapters:
        if not chapter.find_told(results):
            continue
        lines += [f"## {chapter.name}", "", f"{chapter.title}.", ""]
        for part in _arrange(chapter, results):
            lines += [f"### {part.name}", "", f"![{part.name}]({_name_chart(chapter.name, part.name)})", ""]
            if isinstance(part, _Series):
                lines += [*_lay_table(part.tabulate()), ""]
                for section in part.sections:
                    lines += [f"#### {section.name}", "", *_write_section(chapter.name, section, results)]
            else:
                lines += _write_section(chapter.name, part, results)
    return "\n".join(lines)


def _write_section(suite: str, section: Section, results: Sequence[Result]) -> list[str]:
    table = tabulate(suite, section.name, results)
    told = [*tell_missing(suite, section.name, results), *tell_goals(suite, section, results)]
    told += [f"published: {section.published}"] if section.published else []
    return [*([*_lay_table(table), ""] if table[1:] else []), *(f"- {line}" for line in told), ""]


def _lay_table(table: Sequence[Sequence[str]]) -> list[str]:
    titles, *rows = table
    return [_join(titles), _join(["---", *["---:"] * (len(titles) - 1)]), *map(_join, rows)]


def _join(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


# The page

_STYLE = """
:root{color-scheme:light dark;--ink:#1c2330;--dim:#5b667a;--paper:#fbfcfe;--line:#d9dfe9;--good:#1a7f45;--bad:#c0392b}
@media(prefers-color-scheme:dark){:root{--ink:#e4e8f0;--dim:#98a3b8;--paper:#151a23;--line:#2e3748;--good:#5fc98b;
--bad:#ff8073}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:80rem;margin:0 auto;
padding:1.5rem}
h1{margin:0}h2{margin:3rem 0 .2rem;border-top:1px solid var(--line);padding-top:1.5rem}h3{margin:2rem 0 .5rem}
h4{margin:1.2rem 0 .4rem}p{margin:.3rem 0 1rem;color:var(--dim);max-width:60rem}nav a{margin-right:1rem}a{color:inherit}
svg{max-width:46rem;width:100%;height:auto;display:block;margin:.5rem 0 1rem}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .7rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap;vertical-align:top}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:var(--paper)}
th{color:var(--dim);font-weight:500;white-space:normal;max-width:11rem;vertical-align:bottom}
tr.ours td:first-child{font-weight:600}
td small{display:block;color:var(--dim);line-height:1.2}
ul{list-style:none;padding:0;margin:.7rem 0;font-size:.92rem}.met::before{content:"✓ ";color:var(--good)}
.missed::before{content:"✗ ";color:var(--bad)}.told::before{content:"· "}.missing{color:var(--dim)}
.failed{color:var(--bad)}.published{color:var(--dim)}
details{margin:.8rem 0;border-left:3px solid var(--line);padding-left:1rem}summary{cursor:pointer;color:var(--dim)}
"""
_MARKS = {"✓": "met", "✗": "missed", "·": "told", "?": "told"}


def _write_page(machine: dict[str, str], how: str, chapters: Sequence[Chapter], results: Sequence[Result]) -> str:
    told = [chapter for chapter in chapters if chapter.find_told(results)]
    links = "".join(f'<a href="#{chapter.name}">{chapter.name}</a>' for chapter in told)
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_TITLE}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{_TITLE}</h1><p>{html.escape(_describe(machine, how))}</p>",
        f"<p>{html.escape(_READING)} In the tables they are the small figures below the others.</p>",
        f"<nav>{links}</nav>",
    ]
    if missed := _tell_missed(chapters, results):
        items = "".join(
            f'<li class=missed><a href="#{suite}">{suite}</a>, {html.escape(f"{case}: {line}")}</li>'
            for suite, case, line in missed
        )
        parts.append(
            f"<details><summary>{len(missed)} of what is aimed at was not met</summary><ul>{items}</ul></details>"
        )
    if left := _tell_left(chapters, results):
        parts.append(f"<p>{html.escape(left)}</p>")
    ours = {result.variant for result in results if result.ours}
    for chapter in told:
        parts.append(f'<section id="{chapter.name}"><h2>{chapter.name}</h2><p>{html.escape(chapter.title)}.</p>')
        for part in _arrange(chapter, results):
            parts.append(f"<h3>{html.escape(part.name[0].upper() + part.name[1:])}</h3>")
            if isinstance(part, _Series):
                parts += [part.draw(), _fill_table(part.tabulate(), set()), _list_published(part.tell_published())]
                for section in part.sections:
                    parts.append(f"<details><summary>{html.escape(section.name)}</summary>")
                    parts += [*_fill_section(chapter.name, section, results, ours), "</details>"]
            else:
                parts += _fill_section(chapter.name, part, results, ours)
        parts.append("</section>")
    return "".join([*parts, "</body></html>\n"])


def _fill_section(suite: str, section: Section, results: Sequence[Result], ours: set[str]) -> Iterator[str]:
    yield draw_bars(suite, section.name, results)
    yield _fill_table(tabulate(suite, section.name, results), ours)
    items = [
        ("failed" if ": FAILED" in line else "missing", line) for line in tell_missing(suite, section.name, results)
    ]
    items += [(_MARKS[line[0]], line[2:]) for line in tell_goals(suite, section, results)]
    items += [("published", f"published: {section.published}")] if section.published else []
    yield f"<ul>{''.join(f'<li class={kind}>{html.escape(line)}</li>' for kind, line in items)}</ul>"


def _list_published(texts: Sequence[str]) -> str:
    return "".join(f"<p>published: {html.escape(text)}</p>" for text in texts)


def _fill_table(table: Sequence[Sequence[str]], ours: set[str]) -> str:
    """Published figures go into the cells before them, small."""
    titles, *rows = table
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles if title != PUBLISHED)
    body = []
    for row in rows:
        cells: list[str] = []
        for title, cell in zip(titles, row, strict=True):
            if title == PUBLISHED:
                cells[-1] += "" if cell == "–" else f"<small>{html.escape(cell)}</small>"
            else:
                cells.append(html.escape(cell))
        body.append(
            f"<tr{' class=ours' if row[0] in ours else ''}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
