"""python -m bench: every suite measured beside its rivals, in the same run, on the same machine."""

import argparse
import dataclasses
import os
import re
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from bench import compression, document, report, variants
from bench.programs import find_missing
from bench.result import Result, Section, compare
from bench.rounds import Subject, count_rounds, measure
from bench.serving import BenchError
from bench.site import Site, Variant
from bench.variants import SUITES, Suite


def main(
    argv: Sequence[str] | None = None,
    suites: dict[str, Suite] = SUITES,
    make_site: Callable[[Path], Site] = variants.make_site,
) -> int:
    """0: measured. 1: a server failed or has become slower. 2: asked wrongly."""
    parser = _make_parser(suites)
    arguments = parser.parse_args(argv)
    if arguments.list or not arguments.suites:
        if not arguments.list:
            parser.print_help()
        print(_list_suites(suites.values()))
        return 0
    try:
        return _run(arguments, suites, make_site)
    except BenchError as exc:
        print(f"bench: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


# Of a run that is only for a look.
_QUICK_S, _QUICK_ROUNDS = 0.4, 3
# Where the load average is above this, somebody else works here too.
_QUIET = 0.5


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"bench: {message}\n")


def _make_parser(suites: dict[str, Suite]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m bench",
        usage="python -m bench SUITE … [--quick] [--only WORD] [--case WORD] [--json FILE] [--compare OLD.json]",
        description="Measure uvimg beside its rivals: medians of interleaved rounds, CPU time from the kernel.",
        epilog="Only ratios within one run mean anything; absolute figures are the machine's.",
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=" · ".join([*suites, compression.NAME, "all"]))
    parser.add_argument("--list", action="store_true", help="what there is to measure")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{_QUICK_ROUNDS} rounds of {_QUICK_S:g} s, for a look, not for a claim; of all, what was published",
    )
    parser.add_argument("--seconds", type=_positive(float), metavar="S", help="length of a round; default 2")
    parser.add_argument("--rounds", type=_positive(int), metavar="N", help="rounds of each; default 5")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="servers whose names have WORD")
    parser.add_argument("--case", action="append", default=[], metavar="WORD", help="cases whose names have WORD")
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        type=_named_url,
        metavar="NAME=URL",
        help="a server that runs already: URL is asked of it in every case (requests/s only); {w}, {h} and {q} in it "
        "are filled in where renditions are made",
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="what zstd compresses instead of its own text of 4 MB"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument(
        "--report", type=Path, metavar="DIR", help="write what was found to read: a page, Markdown, charts"
    )
    parser.add_argument(
        "--compare", type=Path, metavar="OLD.json", help="ratios to that run; exit status 1 where we are slower"
    )
    return parser


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        number = kind(text)
        if not 0 < number < 3600:
            raise ValueError
        return number

    # argparse puts it into its complaint.
    parse.__name__ = "number"
    return parse


def _named_url(text: str) -> Variant:
    found = re.fullmatch(r"([^=]+)=http://([\w.-]+):(\d+)(/\S*)", text)
    if found is None or not 0 < int(found[3]) < 65_536:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=http://HOST:PORT/PATH")
    return variants.running_already(found[1], (found[2], int(found[3])), found[4])


def _list_suites(suites: Iterable[Suite]) -> str:
    lines = []
    for suite in suites:
        lines.append(f"\n{suite.name}: {suite.title}")
        lines += [f"  {case.name}: {', '.join(variant.name for variant in case.variants)}" for case in suite.cases]
    lines.append(f"\n{compression.NAME}: {compression.TITLE}")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Choice:
    """What of all that there is was asked for."""

    suites: dict[str, Suite]
    cases: tuple[str, ...]
    servers: tuple[str, ...]
    # `all --quick` keeps to this, to come to its end within minutes.
    published_only: bool

    def wants(self, section: Section) -> bool:
        return _matches(section.name, self.cases) and not self.leaves(section)

    def leaves(self, section: Section) -> bool:
        return self.published_only and not section.published

    def wants_text(self, section: Section, row: str) -> bool:
        """Of the suite zstd, where rows may be chosen as cases are elsewhere."""
        names = row or section.name
        return _matches(names, self.cases) and _matches(names, self.servers) and not self.leaves(section)

    def choose(self, against: Sequence[Variant]) -> list[list[Subject]]:
        """Those that are measured in the same rounds."""
        return [
            [
                Subject(name, case, variant)
                for case in group
                if self.wants(case.section)
                for variant in (*(each for each in case.variants if _matches(each.name, self.servers)), *against)
            ]
            for name, suite in self.suites.items()
            for group in suite.groups
        ]


def _run(arguments: argparse.Namespace, suites: dict[str, Suite], make_site: Callable[[Path], Site]) -> int:
    for name in arguments.suites:
        if name not in (*suites, compression.NAME, "all"):
            raise BenchError(f"there is no suite {name!r}; there are {', '.join(suites)}, {compression.NAME} and all")
    is_all = "all" in arguments.suites
    with_text = is_all or compression.NAME in arguments.suites
    names = suites if is_all else [name for name in dict.fromkeys(arguments.suites) if name in suites]
    choice = _Choice(
        {name: suites[name] for name in names},
        tuple(arguments.case),
        tuple(arguments.only),
        is_all and arguments.quick,
    )
    old = report.read_json(arguments.compare) if arguments.compare else None
    # Where Debian has nginx and php-fpm; only root's PATH has it.
    os.environ["PATH"] += ":/usr/sbin"
    if missing := find_missing("taskset"):
        raise BenchError(missing)
    seconds = arguments.seconds or (_QUICK_S if arguments.quick else 2.0)
    rounds = arguments.rounds or (_QUICK_ROUNDS if arguments.quick else 5)
    groups = choice.choose(arguments.against)
    # The highest levels take seconds for one request.
    text_rounds = 1 if arguments.quick else rounds
    text_steps = compression.count_steps(text_rounds, choice.wants_text) if with_text else 0
    if not any(groups) and not text_steps:
        raise BenchError("there is no such case or server; python -m bench --list shows all")
    if arguments.json:
        # Now, not after ten minutes of measuring.
        report.check_writable(arguments.json)
    if arguments.report:
        document.make_folder(arguments.report)
    # Thousands of connections, here and in every child.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    machine = report.describe_machine()
    print(" · ".join(f"{name} {value}" for name, value in machine.items()))
    how = f"{rounds} rounds of {seconds:g} s"
    print(how)
    if float(machine["load average"]) > _QUIET:
        print("The machine is not quiet: figures vary more, and requests/s are worth little.")
    results: list[Result] = []
    steps = text_steps + sum(
        count_rounds(subject, rounds, quick=arguments.quick) for subjects in groups for subject in subjects
    )
    # disable=None: only where somebody watches.
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        tqdm(total=steps, unit="round", disable=None, leave=False) as bar,
    ):

        def watch(name: str) -> None:
            bar.set_description(name)
            bar.update()

        def tell(suite: str, sections: Iterable[Section]) -> None:
            for section in sections:
                bar.write(report.format_section(suite, section, results))
            sys.stdout.flush()

        if any(groups):
            site = dataclasses.replace(make_site(Path(folder)), quick=arguments.quick)
            for subjects in filter(None, groups):
                results += measure(subjects, site, seconds, rounds, watch)
                tell(subjects[0].suite, dict.fromkeys(subject.case.section for subject in subjects))
        if text_steps:
            results += compression.run(arguments.text, seconds, text_rounds, Path(folder), watch, choice.wants_text)
            tell(compression.NAME, _find_told(compression.NAME, compression.SECTIONS, results))
    if arguments.json:
        report.write_json(arguments.json, machine, seconds, results)
    if arguments.report:
        chapters = [
            document.Chapter(name, suite.title, [case.section for case in suite.cases])
            for name, suite in choice.suites.items()
        ]
        if with_text:
            chapters.append(document.Chapter(compression.NAME, compression.TITLE, compression.SECTIONS))
        document.write(arguments.report, machine, how, chapters, results)
        print(f"\n{arguments.report / 'index.html'}")
    failed = [result for result in results if result.outcome == "failed"]
    if failed:
        print(f"\nFAILED: {len(failed)}, see above", file=sys.stderr)
    slower = False
    if old is not None:
        changes = compare(old, results)
        print(report.format_changes(changes))
        slower = any(change.is_slower for change in changes)
    return 1 if failed or slower else 0


def _find_told(suite: str, sections: Iterable[Section], results: Sequence[Result]) -> list[Section]:
    told = {result.case for result in results if result.suite == suite}
    return [section for section in sections if section.name in told]


def _matches(name: str, words: Sequence[str]) -> bool:
    return not words or any(word.lower() in name.lower() for word in words)


if __name__ == "__main__":
    # Who ends us ends what we started too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
