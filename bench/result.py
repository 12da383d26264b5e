"""What a measurement gave: one frozen type for every suite, its statistics, and the judgement on it.

Every measure has one value per round, so that the spread is kept; what is shown is the median. A result without
measures says why in `note`.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Measure:
    """What is measured: how it is called and whether less of it is better."""

    name: str
    title: str
    digits: int
    better: Literal["less", "more"] = "less"


MEASURES = {
    measure.name: measure
    for measure in (
        Measure("cpu_us", "CPU µs/request", 2),
        Measure("rate", "requests/s", 0, "more"),
        Measure("mib_s", "MiB/s", 1, "more"),
        Measure("least_ms", "min ms", 3),
        Measure("mean_ms", "mean ms", 3),
        Measure("deviation_ms", "± ms", 3),
        Measure("deviation_percent", "± %", 1),
        Measure("p50_ms", "p50 ms", 3),
        Measure("p99_ms", "p99 ms", 3),
        Measure("max_ms", "max ms", 2),
        Measure("sync_rate", "fsyncs/s", 0, "more"),
        Measure("per_sync", "× one fsync each", 1, "more"),
        Measure("start_ms", "start ms", 0),
        Measure("load", "server busy %", 0, "more"),
        Measure("client", "client busy %", 0),
        Measure("rss_mib", "RSS MiB", 1),
        Measure("coded_bytes", "bytes", 0),
        Measure("hundred_s", "s for 100", 2),
        Measure("cpu_ms", "CPU ms/request", 2),
        Measure("to_library", "bytes ÷ library's", 4),
        Measure("to_published", "bytes ÷ published", 3),
        Measure("connection_kib", "KiB/connection", 2),
        Measure("jobs", "jobs", 0, "more"),
        Measure("growth", "growth %", 1),
        Measure("rss_growth", "RSS growth %", 1),
    )
}

Outcome = Literal["measured", "skipped", "failed"]


@dataclass(frozen=True, slots=True)
class Result:
    """One variant in one case: measure → its value in each round."""

    suite: str
    case: str
    variant: str
    ours: bool
    outcome: Outcome
    measures: dict[str, tuple[float, ...]] = field(default_factory=dict)
    # Why it was skipped or how it failed.
    note: str = ""
    # Measure → what others have measured of it, on a machine of theirs.
    published: dict[str, float] = field(default_factory=dict)

    def median(self, measure: str) -> float | None:
        values = self.measures.get(measure)
        return statistics.median(values) if values else None


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on a variant's measure: beside that of `rival` (in `case`, where that is another), or on itself."""

    variant: str
    measure: str
    bound: Literal["at most", "at least"]
    # None: the figure is told, and nothing aimed at.
    value: float | None
    rival: str = ""
    case: str = ""
    # How the two are compared: by what one is of the other, or by what it has more.
    by: Literal["ratio", "difference"] = "ratio"

    @property
    def is_relative(self) -> bool:
        return bool(self.rival or self.case)


@dataclass(frozen=True, slots=True)
class Section:
    """What a report says of a case beside its results: goals, and what was published, where and how.

    Cases that differ in a number alone, their `level`, have the name of their `series`.
    """

    name: str
    goals: tuple[Goal, ...] = ()
    published: str = ""
    series: str = ""
    level: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """A goal and what came of it; `figure` is None where one of the two was not measured.

    The figure is that of the medians; `rounds` has that of each round with its like, to show how sure it is.
    """

    goal: Goal
    figure: float | None = None
    is_met: bool | None = None
    rounds: tuple[float, ...] = ()


def judge(goal: Goal, result: Result, results: Iterable[Result]) -> Verdict:
    """Hold a goal against the medians of the same run."""
    figure, rounds = result.median(goal.measure), result.measures.get(goal.measure, ())
    if goal.is_relative:
        case, variant = goal.case or result.case, goal.rival or result.variant
        rival = find(results, result.suite, case, variant)
        base = rival.median(goal.measure) if rival else None
        if figure is None or rival is None or not base:
            return Verdict(goal)
        pairs = zip(rounds, rival.measures[goal.measure], strict=False)
        if goal.by == "ratio":
            figure, rounds = figure / base, tuple(ours / theirs for ours, theirs in pairs)
        else:
            figure, rounds = figure - base, tuple(ours - theirs for ours, theirs in pairs)
    if figure is None:
        return Verdict(goal)
    met = None
    if goal.value is not None:
        met = figure <= goal.value if goal.bound == "at most" else figure >= goal.value
    return Verdict(goal, figure, met, rounds)


def find(results: Iterable[Result], suite: str, case: str, variant: str) -> Result | None:
    for result in results:
        if (result.suite, result.case, result.variant) == (suite, case, variant):
            return result
    return None


def spread(values: Sequence[float]) -> float:
    """Half the distance from the worst round to the best, as a part of the median."""
    middle = statistics.median(values)
    return (max(values) - min(values)) / 2 / middle if middle else 0.0


# What a comparison looks at, the first of them that both runs have. Latencies and memory are shown, not judged.
_JUDGED = ("cpu_us", "cpu_ms", "rate", "connection_kib")
# Two runs of the same program differ by this much even where the rounds of each agree.
_LEAST_NOISE = 0.03


@dataclass(frozen=True, slots=True)
class Change:
    """One of our variants then and now. `ratio` > 1 is slower; both with the rivals' own change taken out."""

    result: Result
    measure: str
    then: float
    now: float
    ratio: float
    noise: float

    @property
    def is_slower(self) -> bool:
        return self.ratio > 1 + self.noise


def compare(old: Sequence[Result], new: Sequence[Result]) -> list[Change]:
    """How our variants changed between two runs.

    The machine is another one every day: by how much the rivals of a case changed is taken for its doing. The noise
    is what the rounds of both runs spread.
    """
    changes = []
    for result in new:
        if not result.ours:
            continue
        then = find(old, result.suite, result.case, result.variant)
        measure = next((name for name in _JUDGED if then and name in result.measures and name in then.measures), None)
        if then is None or measure is None:
            continue
        rivals = [
            _worsening(before, rival, measure)
            for rival in new
            if not rival.ours and (rival.suite, rival.case) == (result.suite, result.case)
            if (before := find(old, rival.suite, rival.case, rival.variant))
            and measure in rival.measures
            and measure in before.measures
        ]
        drift = statistics.median(rivals) if rivals else 1.0
        values = then.measures[measure], result.measures[measure]
        noise = max(_LEAST_NOISE, spread(values[0]) + spread(values[1]))
        ratio = _worsening(then, result, measure) / drift
        changes.append(
            Change(result, measure, statistics.median(values[0]), statistics.median(values[1]), ratio, noise)
        )
    return changes


def _worsening(then: Result, now: Result, measure: str) -> float:
    before, after = then.median(measure), now.median(measure)
    assert before is not None
    assert after is not None
    return after / before if MEASURES[measure].better == "less" else before / after
