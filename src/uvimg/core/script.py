"""What a type's script asks for, call by call → a plan.

zimg's script works on pixels; ours is asked with an image's facts alone, and its calls become steps of a plan,
which is carried out like any other. So each call says what the size would be, and what cannot be is told at once.
Surprise: steps are put where they cost least. A scale that only shrinks becomes a part of loading, also
behind a crop (which moves by less than a pixel of the result then), and gray comes last.
"""

import math

from uvimg.core.formats import OutputFormat, parse_output_format
from uvimg.core.params import Params
from uvimg.core.plan import Crop, Plan, Rotate, Rules, Scale, Source, Step, find_limits, finish_plan, rotated_size

# What scripts see, as zimg has it: it worked; it makes no sense; it is more than is allowed here.
DONE, FAILED, REFUSED = 1, 0, -1

# Far more than a picture needs: each holds a picture in memory.
_MOST_STEPS = 16


class Recording:
    """One run of a script on an image of these facts. What it would be so far is in the attributes."""

    def __init__(self, source: Source, rules: Rules) -> None:
        self._source, self._rules = source, rules
        self._limits = find_limits(source, rules)
        self._load = self.size = source.upright_size
        self._steps: list[Step] = []
        self._gray = False
        self._wanted_quality = 0
        self._wanted_format: OutputFormat | None = None

    @property
    def quality(self) -> int:
        return self._wanted_quality or self._source.quality

    @property
    def format(self) -> str:
        return (self._wanted_format or self._source.format).upper()

    def scale(self, cols: float, rows: float) -> int:
        """Stretch to exactly this size."""
        width, height = _whole(cols), _whole(rows)
        if width < 1 or height < 1:
            return FAILED
        if not self._is_allowed((width, height)):
            return REFUSED
        match self._steps:
            case [] if self._load == self._source.upright_size or (width <= self._load[0] and height <= self._load[1]):
                self._load = self.size = width, height
                return DONE
            case [Crop() as crop] if width <= crop.width and height <= crop.height:
                # Scaled first and cropped then, nothing but what is needed is decoded.
                whole_width, left = _shrink(self._load[0], crop.left, crop.width, width)
                whole_height, top = _shrink(self._load[1], crop.top, crop.height, height)
                self._load = whole_width, whole_height
                self.size = width, height
                self._steps = [Crop(left, top, width, height)] if self._load != self.size else []
                return DONE
        return self._add(Scale(width, height))

    def crop(self, x: float, y: float, cols: float, rows: float) -> int:
        """Keep what of this rectangle lies in the picture; without a size up to its edges."""
        left, top, width, height = _whole(x), _whole(y), _whole(cols), _whole(rows)
        if width < 0 or height < 0:
            return FAILED
        right = min(self.size[0], left + width) if width else self.size[0]
        bottom = min(self.size[1], top + height) if height else self.size[1]
        left, top = max(0, left), max(0, top)
        if right <= left or bottom <= top:
            return FAILED
        if (right - left, bottom - top) == self.size:
            return DONE
        if self._steps and isinstance(before := self._steps[-1], Crop):
            self._steps.pop()
            left, right = left + before.left, right + before.left
            top, bottom = top + before.top, bottom + before.top
        return self._add(Crop(left, top, right - left, bottom - top))

    def rotate(self, degrees: float) -> int:
        """Turn clockwise by whole degrees; corners get the background."""
        turn = round(degrees) % 360 if math.isfinite(degrees) else 0
        if not turn:
            return DONE if math.isfinite(degrees) else FAILED
        return self._add(Rotate(turn, *rotated_size(*self.size, turn), self._rules.background))

    def gray(self) -> int:
        self._gray = True
        return DONE

    def set_quality(self, quality: float) -> int:
        wanted = _whole(quality)
        if not 1 <= wanted <= 100:
            return FAILED
        self._wanted_quality = wanted
        return DONE

    def set_format(self, name: str) -> int:
        format = parse_output_format(name)
        if format is None:
            return FAILED
        self._wanted_format = format
        return DONE

    def plan(self) -> Plan:
        """All of it. BadParameter where the format cannot hold it."""
        quality = self._wanted_quality
        if not quality and self._source.format == "jpeg" and self._source.quality < 100:
            # As in zimg a rendition keeps what it had, where it is known.
            quality = self._source.quality
        sizes = [self._load, *((step.width, step.height) for step in self._steps if isinstance(step, Rotate | Scale))]
        return finish_plan(
            self._load,
            self._steps,
            self.size,
            max(width * height for width, height in sizes),
            Params(g=int(self._gray), q=quality, f=self._wanted_format or "none"),
            self._source,
            0,
            self._rules,
        )

    def _add(self, step: Scale | Crop | Rotate) -> int:
        if len(self._steps) >= _MOST_STEPS or not self._is_allowed((step.width, step.height)):
            return REFUSED
        self._steps.append(step)
        self.size = step.width, step.height
        return DONE

    def _is_allowed(self, size: tuple[int, int]) -> bool:
        max_side, max_pixels = self._limits
        return max(size) <= max_side and size[0] * size[1] <= max_pixels


def _whole(number: float) -> int:
    """A number as C would cut it, within what any size can be; 0 for what is none."""
    return int(max(-1e9, min(1e9, number))) if not math.isnan(number) else 0


def _shrink(whole: int, start: int, length: int, wanted: int) -> tuple[int, int]:
    """How long the whole side has to be for a part of it to be as long as wanted, and where that begins then."""
    scaled = max(wanted, (2 * whole * wanted + length) // (2 * length))
    return scaled, min((2 * start * wanted + length) // (2 * length), scaled - wanted)
