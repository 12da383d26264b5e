"""Rounds in turn, A B C, A B C, so that a bad minute of the machine hits all alike.

Whatever cannot be measured has a result that says so: skipped where a program is missing, failed where a server or
an answer is wrong. Nothing is left out silently.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.exchange import Ask
from bench.programs import find_missing
from bench.result import Outcome, Result
from bench.serving import BenchError, Cores, Server, share_cores
from bench.site import Site, Variant
from bench.variants import Case


@dataclass(frozen=True, slots=True)
class Subject:
    """One variant in one case of a suite."""

    suite: str
    case: Case
    variant: Variant

    @property
    def name(self) -> str:
        return f"{self.suite} · {self.case.name} · {self.variant.name}"


def measure(
    subjects: Sequence[Subject], site: Site, seconds: float, rounds: int, watch: Callable[[str], object]
) -> list[Result]:
    """Each subject in a fresh process, all under load in turn. `watch` is told the name of each round's subject."""
    trials = [_Trial(subject, site) for subject in subjects]
    try:
        for trial in trials:
            trial.attempt(trial.start)
        for number in range(rounds):
            for trial in trials:
                if number >= count_rounds(trial.subject, rounds, quick=site.quick):
                    continue
                watch(trial.subject.name)
                trial.attempt(partial(trial.run, seconds))
                # Some have a queue of what was asked to the end of a load; all would be behind in what comes next.
                trial.rest(is_over=number + 1 == count_rounds(trial.subject, rounds, quick=site.quick))
    finally:
        for trial in trials:
            trial.stop()
    return [trial.result() for trial in trials]


def count_rounds(subject: Subject, rounds: int, *, quick: bool) -> int:
    """How many of so many rounds it is worth to be in."""
    case = subject.case
    return min(rounds, case.load.most_rounds, *([case.quick_rounds] if quick else []))


class _Trial:
    """A subject with its server, and what came of it so far."""

    def __init__(self, subject: Subject, site: Site) -> None:
        self.subject, self._site = subject, site
        self._cores: Cores = share_cores(subject.case.processes)
        self._server: Server | None = None
        self._asks: list[Ask] = []
        self._figures: list[dict[str, float]] = []
        self._outcome: Outcome = "measured"
        self._note = ""

    def attempt(self, step: Callable[[], None]) -> None:
        if self._outcome != "measured":
            return
        try:
            step()
        except BenchError as exc:
            self._outcome, self._note = "failed", str(exc)

    def start(self) -> None:
        case, variant = self.subject.case, self.subject.variant
        if missing := find_missing(variant.program, *case.load.programs) or variant.lacks():
            self._outcome, self._note = "skipped", missing
            return
        launch = variant.launch(self._site, case.content, case.processes)
        self._server = Server(variant.name, launch, self._cores, _find_log(self._site.folder))
        if case.load.walks:
            address = self._server.addresses[0]
            self._asks = [ask for walk in case.load.walks for ask in variant.ask_for(self._site, walk, address)]
        else:
            self._asks = [variant.ask(self._site, case.content, address) for address in self._server.addresses]

    def run(self, seconds: float) -> None:
        assert self._server is not None, self.subject
        self._figures.append(self.subject.case.load.run(self._server, self._asks, self._cores, seconds))

    def rest(self, *, is_over: bool) -> None:
        """After a round; after the last one nobody has to wait for it."""
        if is_over:
            self.stop()
        elif self._server is not None and self.subject.case.load.walks:
            self._server.await_rest()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def result(self) -> Result:
        measures = {}
        if self._outcome == "measured":
            measures = {name: tuple(figure[name] for figure in self._figures) for name in self._figures[0]}
        suite, case, variant = self.subject.suite, self.subject.case.name, self.subject.variant
        published = self.subject.case.published_figures.get(variant.name, {})
        return Result(suite, case, variant.name, variant.ours, self._outcome, measures, self._note, published)


def _find_log(folder: Path) -> Path:
    """A log of its own for each server: its last line says why it ended."""
    number = 0
    while (log := folder / f"server-{number}.log").exists():
        number += 1
    return log
