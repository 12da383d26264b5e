"""Which reduced versions of a large original are kept, and which of them a plan may start from.

Level n is a JPEG with each side divided by 2ⁿ: upright, sRGB or gray, without chroma subsampling, made from the
level above by the decoder's own halving. That is how libvips begins to make a thumbnail of the original, so a
rendition that starts from at least twice its size is as true as libvips' own: at most 0.1 dB less, measured behind
the rendition's coding on photos, text and line art.
Surprise: halves by Lanczos are worse. On text each clips what it overshoots, which cost 1.4 dB in three levels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from uvimg.core.plan import Encode, Load, Plan, Source

# From here up libjpeg's users, libvips among them, keep the chroma whole. 95 takes half as much again.
_QUALITY = 90
# What is coded better than this would show the level's own coding, and is made from the original.
_BEST_QUALITY = 85
# What their keys among the renditions begin with.
LEVELS = "pyramid-"
# Enough for twice the smallest thumbnails that people ask for; below this every job costs the same.
_LEAST_SIDE = 240
# Halving drops an odd line at the edge, which must be less than what anybody sees.
_LEAST_OTHER_SIDE = 16


@dataclass(frozen=True, slots=True)
class PyramidRules:
    """From how many pixels on an original has levels, 0 for none; `max_percent` of its bytes is what all may take."""

    min_pixels: int = 2_000_000
    max_percent: int = 100


class Level(msgspec.Struct, frozen=True):
    """A reduced version: 1 / 2**number of the original, upright."""

    number: int
    width: int
    height: int

    @property
    def key(self) -> str:
        """Its name among the renditions of its original."""
        return f"{LEVELS}{self.number}"


def list_levels(source: Source, rules: PyramidRules) -> tuple[Level, ...]:
    """The levels that an original is to have, the largest first."""
    if not rules.min_pixels or source.width * source.height < rules.min_pixels:
        return ()
    # What other decoders hand over whole (PNG, TIFF, AVIF) or reduce in their own way (WebP) makes truer thumbnails
    # than any level: those lost 2 dB on text.
    if source.format != "jpeg":
        return ()
    width, height = source.upright_size
    levels = []
    number = 1
    while max(width, height) >> number >= _LEAST_SIDE and min(width, height) >> number >= _LEAST_OTHER_SIDE:
        levels.append(Level(number, width >> number, height >> number))
        number += 1
    return tuple(levels)


def find_levels(plan: Plan, source: Source, rules: PyramidRules) -> tuple[Level, ...]:
    """The levels from which a plan may start, the best first: each has at least twice its size on both sides."""
    load, encode = plan.steps[0], plan.steps[-1]
    assert isinstance(load, Load)
    assert isinstance(encode, Encode)
    # Without loss (PNG, GIF) quality is 0 and nothing hides what the level has lost.
    if encode.max_bytes or not 0 < encode.quality <= _BEST_QUALITY:
        return ()
    enough = [
        level
        for level in list_levels(source, rules)
        if level.width >= 2 * load.width and level.height >= 2 * load.height
    ]
    return tuple(reversed(enough))


def describe_level(level: Level, source: Source) -> Source:
    """The facts of a level, as its JPEG's header would tell them."""
    return Source("jpeg", level.width, level.height, quality=_QUALITY, gray=source.gray)


def plan_level(level: Level, above: Source) -> Plan:
    """How a level is made of the one above it, or the first of its original."""
    # Half the size to a line is what the decoder gives by itself, so that `fast` leaves nothing to a resampler.
    load = Load(level.width, level.height, 1, managed=above.managed, gray=above.gray, fast=True)
    return Plan((load, Encode("jpeg", _QUALITY, 0)))


def start_from_level(plan: Plan) -> Plan:
    """The same plan for a level: its colours have been converted already. Sizes are absolute, so they stay."""
    load, *rest = plan.steps
    assert isinstance(load, Load)
    return Plan((msgspec.structs.replace(load, managed=False), *rest))


def choose_kept(sizes: Sequence[int], original_size: int, rules: PyramidRules) -> tuple[int, ...]:
    """Which of the levels of these sizes in bytes, the largest first, are kept: their indices, in that order.

    The smallest come first where not all have room: they save the most for each byte.
    """
    room = original_size * rules.max_percent // 100
    kept = []
    for index in reversed(range(len(sizes))):
        room -= sizes[index]
        if room < 0:
            break
        kept.append(index)
    return tuple(reversed(kept))
