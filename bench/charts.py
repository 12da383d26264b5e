"""Charts as SVG, each whole in itself: bars for one case, lines for cases that differ in a number.

They follow the reader's light or dark. Colours are ours and theirs: blue is always uvimg.
"""

import html
import math
import statistics
from collections.abc import Mapping, Sequence

from bench.result import MEASURES, Result

# What bars show: the first of these that was measured.
_CHARTED = ("cpu_us", "cpu_ms", "rate", "connection_kib", "p99_ms", "growth", "rss_growth")
_BAR, _GAP, _LABEL, _PLOT, _VALUE = 18, 8, 230, 410, 100
_LEFT, _TOP, _WIDE, _HIGH, _NAMES = 70, 34, 470, 220, 200
_GRID = 4
# Numbers under the lines: not more than can be read.
_MOST_NUMBERS = 8
_OURS, _RIVALS = ("ours1", "ours2", "ours3"), ("rival1", "rival2", "rival3", "rival4")
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1c2330}.rival{fill:#a9b4c6}.ours{fill:#2b59c3}"
    ".range{stroke:#1c2330;stroke-width:1.5}.grid{stroke:#1c2330;stroke-opacity:.13}"
    "polyline{fill:none;stroke-width:2.5;stroke-linejoin:round}"
    "polyline.ours1{stroke:#2b59c3}text.ours1{fill:#2b59c3}polyline.ours2{stroke:#6f96f5}text.ours2{fill:#4a76dd}"
    "polyline.ours3{stroke:#12307a}text.ours3{fill:#12307a}polyline.rival1{stroke:#8a5a00}text.rival1{fill:#8a5a00}"
    "polyline.rival2{stroke:#b0447f}text.rival2{fill:#b0447f}polyline.rival3{stroke:#5b667a}text.rival3{fill:#5b667a}"
    "polyline.rival4{stroke:#2c8a6b}text.rival4{fill:#2c8a6b}"
    "@media(prefers-color-scheme:dark){text{fill:#e4e8f0}.rival{fill:#56617a}.ours{fill:#6f96f5}.range{stroke:#e4e8f0}"
    ".grid{stroke:#e4e8f0}polyline.ours1{stroke:#6f96f5}text.ours1{fill:#6f96f5}polyline.ours2{stroke:#a9c1ff}"
    "text.ours2{fill:#a9c1ff}polyline.ours3{stroke:#3f6fe0}text.ours3{fill:#6f96f5}polyline.rival1{stroke:#d9a441}"
    "text.rival1{fill:#d9a441}polyline.rival2{stroke:#e07fb3}text.rival2{fill:#e07fb3}polyline.rival3{stroke:#98a3b8}"
    "text.rival3{fill:#98a3b8}polyline.rival4{stroke:#5fc9a4}text.rival4{fill:#5fc9a4}}"
)


def draw_bars(suite: str, case: str, results: Sequence[Result]) -> str:
    """A bar for each median, a line from the least to the most. "" where nothing was measured."""
    rows = [row for row in results if (row.suite, row.case, row.outcome) == (suite, case, "measured")]
    measure = next((name for name in _CHARTED if any(name in row.measures for row in rows)), None)
    if measure is None:
        return ""
    rows = [row for row in rows if measure in row.measures]
    most = max(max(row.measures[measure]) for row in rows)
    if most <= 0:
        return ""
    title = _title(measure)
    height = 30 + len(rows) * (_BAR + _GAP)
    width = _LABEL + _PLOT + _VALUE
    parts = [_open(width, height, f"{case}: {title}"), f'<text x="{_LABEL}" y="16">{html.escape(title)}</text>']
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


def draw_lines(
    title: str, levels: Sequence[int], lines: Mapping[str, Sequence[float | None]], ours: set[str], measure: str
) -> str:
    """A line for each server, with a place for each level. "" where nobody has two points of one."""
    points = {
        name: [(place, figure) for place, figure in enumerate(figures) if figure is not None]
        for name, figures in lines.items()
    }
    points = {name: line for name, line in points.items() if len(line) > 1}
    greatest = max((figure for line in points.values() for _, figure in line), default=0.0)
    if greatest <= 0:
        return ""
    most = _round_up(greatest)
    right, low = _LEFT + _WIDE, _TOP + _HIGH
    parts = [_open(right + _NAMES, low + 46, f"{title}: {_title(measure)}")]
    parts.append(f'<text x="{_LEFT}" y="16">{html.escape(_title(measure))}</text>')
    for part in range(_GRID + 1):
        y = low - _HIGH * part / _GRID
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        figure = f"{most * part / _GRID:,.10g}"
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{figure}</text>')

    def find_x(place: int) -> float:
        return _LEFT + place * _WIDE / (len(levels) - 1)

    step = math.ceil(len(levels) / _MOST_NUMBERS)
    # From the last back, which matters most.
    for place in range(len(levels) - 1, -1, -step):
        x = find_x(place)
        parts.append(f'<text x="{x:.1f}" y="{low + 18}" text-anchor="middle">{levels[place]:,}</text>')
    parts.append(f'<text x="{_LEFT + _WIDE / 2}" y="{low + 38}" text-anchor="middle">{html.escape(title)}</text>')
    colours = _choose_colours(list(points), ours)
    below = 0.0
    # From the top down: names that would cover each other make room.
    for name in sorted(points, key=lambda name: -points[name][-1][1]):
        path = " ".join(f"{find_x(place):.1f},{low - figure / most * _HIGH:.1f}" for place, figure in points[name])
        y = max(low - points[name][-1][1] / most * _HIGH + 4, below)
        below = y + 16
        parts.append(f'<polyline class="{colours[name]}" points="{path}"/>')
        parts.append(f'<text class="{colours[name]}" x="{right + 8}" y="{y:.1f}">{html.escape(name)}</text>')
    return "".join([*parts, "</svg>\n"])


def _round_up(figure: float) -> float:
    """To what divides by four into numbers that are easily read."""
    whole: float = 10 ** math.floor(math.log10(figure))
    return next(part * whole for part in (1, 2, 3, 4, 6, 8, 10) if part * whole >= figure)


def _choose_colours(names: Sequence[str], ours: set[str]) -> dict[str, str]:
    colours = {}
    for palette, among in (
        (_OURS, [name for name in names if name in ours]),
        (_RIVALS, [name for name in names if name not in ours]),
    ):
        colours |= {name: palette[number % len(palette)] for number, name in enumerate(among)}
    return colours


def _title(measure: str) -> str:
    return f"{MEASURES[measure].title}, {MEASURES[measure].better} is better"


def _open(width: int, height: int, label: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{html.escape(label)}"><style>{_STYLE}</style>'
    )
