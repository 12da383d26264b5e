"""What a run found, for people and for the next run: tables on the terminal, JSON, ratios to an older run."""

import dataclasses
import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.programs import THUMBOR, find_fpm, read_versions
from bench.result import MEASURES, Change, Goal, Result, Section, judge
from bench.serving import BenchError

_VERSIONS = {
    "nginx": ["nginx", "-v"],
    "PHP": [find_fpm() or "php-fpm", "-v"],
    "memcached": ["memcached", "-V"],
    "redis": ["redis-server", "--version"],
    "thumbor": [str(THUMBOR), "--version"],
    "go": ["go", "version"],
    "node": ["node", "--version"],
    "wrk": ["wrk", "-v"],
    "ab": ["ab", "-V"],
}


def describe_machine() -> dict[str, str]:
    """What the figures depend on: the machine and every program in play."""
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "load average": f"{os.getloadavg()[0]:.2f}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("uvimg", "uvloop", "aiohttp")},
        **{name: _ask_version(command) for name, command in _VERSIONS.items()},
        "PHP": _ask_version([find_fpm() or "php-fpm", "-v"]),
        **read_versions(),
    }


def _ask_version(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "not installed"
    found = re.search(r"\d+\.\d+(\.\d+)*", done.stdout + done.stderr)
    return found[0] if found else "unknown"


def format_section(suite: str, section: Section, results: Sequence[Result]) -> str:
    """The table of one case: medians with the least and the most of all rounds, then what is aimed at."""
    lines = [f"\n{suite} · {section.name}", *_align(tabulate(suite, section.name, results))]
    lines += [f"  {line}" for line in tell_missing(suite, section.name, results)]
    lines += [f"  {line}" for line in tell_goals(suite, section, results)]
    if section.published:
        lines.append(f"  published: {section.published}")
    return "\n".join(lines)


# The title of a column with what others measured of what stands in the column before.
PUBLISHED = "published"


def tabulate(suite: str, case: str, results: Sequence[Result]) -> list[list[str]]:
    """What was measured in a case, a row each, below a row of titles."""
    rows = [row for row in results if (row.suite, row.case, row.outcome) == (suite, case, "measured")]
    table = [["server"], *([row.variant] for row in rows)]
    for name in MEASURES:
        if not any(name in row.measures for row in rows):
            continue
        table[0].append(MEASURES[name].title)
        for line, row in zip(table[1:], rows, strict=True):
            line.append(_format_values(name, row.measures.get(name, ())))
        if any(name in row.published for row in rows):
            table[0].append(PUBLISHED)
            for line, row in zip(table[1:], rows, strict=True):
                line.append(format_figure(name, row.published.get(name)))
    return table


def format_figure(measure: str, figure: float | None) -> str:
    return "–" if figure is None else f"{figure:,.{MEASURES[measure].digits}f}"


def tell_missing(suite: str, case: str, results: Sequence[Result]) -> list[str]:
    """A line for each that was not measured, with the reason and what others measured of it."""
    lines = []
    for row in results:
        if (row.suite, row.case) != (suite, case) or row.outcome == "measured":
            continue
        figures = ", ".join(
            f"{format_figure(name, figure)} {MEASURES[name].title}" for name, figure in row.published.items()
        )
        lines.append(
            f"{row.variant}: {row.outcome.upper()}, {row.note}" + (f" (published: {figures})" if figures else "")
        )
    return lines


def tell_goals(suite: str, section: Section, results: Sequence[Result]) -> list[str]:
    """A line for each goal of what was measured."""
    rows = [row for row in results if (row.suite, row.case, row.outcome) == (suite, section.name, "measured")]
    measured = {row.variant: row for row in rows}
    return [_format_goal(goal, measured[goal.variant], results) for goal in section.goals if goal.variant in measured]


def _format_values(name: str, values: Sequence[float]) -> str:
    if not values:
        return "–"
    digits = MEASURES[name].digits
    middle = f"{statistics.median(values):,.{digits}f}"
    # Whole distributions say enough of the others.
    if name not in ("cpu_us", "cpu_ms", "rate", "connection_kib") or len(values) < 2:
        return middle
    return f"{middle} [{min(values):,.{digits}f}–{max(values):,.{digits}f}]"


def _align(table: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  "
        + "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in table
    ]


def _format_goal(goal: Goal, result: Result, results: Sequence[Result]) -> str:
    verdict = judge(goal, result, results)
    sign = "≤" if goal.bound == "at most" else "≥"
    subject = f"{goal.variant}, {MEASURES[goal.measure].title}"
    than = " of ".join(filter(None, [goal.rival, f"“{goal.case}”" if goal.case else ""]))
    aim = "" if goal.value is None else f" (aim {sign} {goal.value:.4g})"
    if verdict.figure is None:
        return f"? {subject}: {than} was not measured{aim}"
    mark = {True: "✓", False: "✗", None: "·"}[verdict.is_met]
    digits = 2 if goal.by == "ratio" else MEASURES[goal.measure].digits
    figure = f"{verdict.figure:.{digits}f}"
    if len(verdict.rounds) > 1:
        figure += f" [{min(verdict.rounds):.{digits}f}–{max(verdict.rounds):.{digits}f}]"
    if goal.is_relative:
        figure += f" × {than}" if goal.by == "ratio" else f" more than {than}"
    return f"{mark} {subject}: {figure}{aim}"


def check_writable(file: Path) -> None:
    """BenchError when it is not."""
    try:
        file.open("a").close()
    except OSError as exc:
        raise BenchError(f"{file}: {exc.strerror}") from exc


def write_json(file: Path, machine: dict[str, str], seconds: float, results: Sequence[Result]) -> None:
    document = {"machine": machine, "seconds": seconds, "results": [dataclasses.asdict(result) for result in results]}
    file.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n")


def read_json(file: Path) -> list[Result]:
    """The results of an older run. BenchError when the file holds none."""
    try:
        entries = json.loads(file.read_text())["results"]
        return [_read_result(entry) for entry in entries]
    except OSError as exc:
        raise BenchError(f"{file}: {exc.strerror}") from exc
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise BenchError(f"{file} was not written by --json") from exc


def _read_result(entry: dict[str, Any]) -> Result:
    measures = {name: tuple(values) for name, values in entry["measures"].items()}
    # What was published does not depend on the run.
    return Result(**{**entry, "measures": measures, "published": dict(entry["published"] or {})})


def format_changes(changes: Sequence[Change]) -> str:
    """Then and now, line by line."""
    if not changes:
        return "\nThe older run measured none of this: there is nothing to compare"
    lines = ["\nBeside the older run (more than 1 is slower; the rivals' own change is taken out)"]
    table = [["case", "server", "measure", "then", "now", "ratio", "noise", ""]]
    for change in changes:
        digits = MEASURES[change.measure].digits
        table.append(
            [
                *(f"{change.result.suite} · {change.result.case}", change.result.variant),
                MEASURES[change.measure].title,
                *(f"{change.then:,.{digits}f}", f"{change.now:,.{digits}f}", f"{change.ratio:.3f}"),
                *(f"±{change.noise:.3f}", "SLOWER" if change.is_slower else "✓"),
            ]
        )
    return "\n".join([*lines, *_align(table)])
