"""Query + facts about the source → Plan: an ordered list of steps.

Everything about a rendition is decided here; a worker only executes. The order is zimg's: upright by
EXIF → crop or scale → rotate → gray → quality → format; metadata never comes along.
Surprise: two queries that mean the same make equal plans, and `Plan.key` names the rendition, so each
is made and kept once.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from uvimg.core.errors import BadParameter
from uvimg.core.formats import Format, OutputFormat, parse_output_format
from uvimg.core.params import Params


class Source(msgspec.Struct, frozen=True, array_like=True):
    """Facts about an original, read from its header once, at upload.

    width and height in pixels as stored, before EXIF orientation (1..8); `quality` is 100 when unknown;
    `managed` says that its colours are not plain sRGB or gray (ICC profile, CMYK, 16 bit …).
    """

    format: Format
    width: int
    height: int
    frames: int = 1
    orientation: int = 1
    quality: int = 100
    has_alpha: bool = False
    gray: bool = False
    managed: bool = False
    progressive: bool = False

    @property
    def upright_size(self) -> tuple[int, int]:
        """Width and height as people see it."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)


@dataclass(frozen=True, slots=True)
class Rules:
    """What the configuration says of renditions. Sizes in pixels, `background` as red, green, blue."""

    quality: int = 75
    format: OutputFormat | None = "jpeg"
    background: tuple[int, int, int] = (255, 255, 255)
    zoom_up: bool = True
    max_side: int = 10_000
    max_pixels: int = 50_000_000
    max_frames: int = 100
    webp_effort: int = 2
    avif_effort: int = 1
    gif_effort: int = 3
    png_compression: int = 6
    # Of a JPEG original.
    fast_shrink: bool = False


class Load(msgspec.Struct, frozen=True, tag=True):
    """Decode `frames` frames, turn them upright, bring them to sRGB (or gray), scaled to width × height.

    `fast` leaves as much of the scaling as can be to the decoder of a JPEG.
    """

    width: int
    height: int
    frames: int
    managed: bool
    gray: bool
    fast: bool = False


class Scale(msgspec.Struct, frozen=True, tag=True):
    """Stretch to width × height in the middle of a plan; at its beginning Load does it, which costs less."""

    width: int
    height: int


class Crop(msgspec.Struct, frozen=True, tag=True):
    left: int
    top: int
    width: int
    height: int


class Rotate(msgspec.Struct, frozen=True, tag=True):
    """Turn clockwise by 1..359 degrees about the centre, onto a canvas of width × height."""

    degrees: int
    width: int
    height: int
    background: tuple[int, int, int]


class Gray(msgspec.Struct, frozen=True, tag=True):
    """To one channel (beside alpha): the luma of ITU-R BT.601, which is what a JPEG keeps apart from its colours."""


class Flatten(msgspec.Struct, frozen=True, tag=True):
    """Lay a picture with alpha on this colour."""

    background: tuple[int, int, int]


class Encode(msgspec.Struct, frozen=True, tag=True):
    """Write the format. With `max_bytes` > 0 the result should not be larger.

    Then the original's own picture is taken where `or_original` allows it, and less quality elsewhere.
    """

    format: OutputFormat
    quality: int
    effort: int
    max_bytes: int = 0
    or_original: bool = False


Step = Load | Scale | Crop | Rotate | Gray | Flatten | Encode


class Plan(msgspec.Struct, frozen=True):
    """The steps from an original to a rendition, Load first, Encode last."""

    steps: tuple[Step, ...]

    @property
    def key(self) -> str:
        """The rendition's name among those of its original: at most 160 ASCII characters.

        A script's plan may need more, and is kept under the type's name.
        """
        return "-".join(_spell(step) for step in self.steps)


def _spell(step: Step) -> str:
    match step:
        case Load():
            frames = f"x{step.frames}" if step.frames > 1 else ""
            return f"{step.width}x{step.height}{frames}" + (".fast" if step.fast else "")
        case Scale():
            return f"s{step.width}x{step.height}"
        case Crop():
            return f"c{step.left}.{step.top}.{step.width}.{step.height}"
        case Rotate():
            return f"r{step.degrees}.{bytes(step.background).hex()}"
        case Gray():
            return "g"
        case Flatten():
            return f"b{bytes(step.background).hex()}"
        case Encode():
            bound = "" if not step.max_bytes else ".bare" if step.or_original else ".bound"
            return f"{step.format}{step.quality}.{step.effort}{bound}"


_LOAD = re.compile(r"(\d+)x(\d+)(?:x(\d+))?(\.fast)?")
_SCALE = re.compile(r"s(\d+)x(\d+)")
_CROP = re.compile(r"c(\d+)\.(\d+)\.(\d+)\.(\d+)")
_ROTATE = re.compile(r"r(\d+)\.([0-9a-f]{6})")
_FLATTEN = re.compile(r"b([0-9a-f]{6})")
_ENCODE = re.compile(r"(jpeg|png|webp|gif|avif)(\d+)\.(\d+)(\.bare|\.bound)?")


def parse_key(key: str, source: Source, size: int) -> Plan | None:
    """The plan of this key for a source of `size` bytes, None for what is not the key of one."""
    first, *middle, last = key.split("-") if "-" in key else ("", "")
    load, encode = _LOAD.fullmatch(first), _ENCODE.fullmatch(last)
    if not load or not encode:
        return None
    width, height = int(load[1]), int(load[2])
    frames, fast = int(load[3] or 1), bool(load[4])
    steps: list[Step] = [Load(width, height, frames, managed=source.managed, gray=source.gray, fast=fast)]
    for part in middle:
        if crop := _CROP.fullmatch(part):
            left, top, width, height = map(int, crop.groups())
            steps.append(Crop(left, top, width, height))
        elif scale := _SCALE.fullmatch(part):
            width, height = int(scale[1]), int(scale[2])
            steps.append(Scale(width, height))
        elif rotate := _ROTATE.fullmatch(part):
            width, height = rotated_size(width, height, int(rotate[1]))
            steps.append(Rotate(int(rotate[1]), width, height, _parse_colour(rotate[2])))
        elif flatten := _FLATTEN.fullmatch(part):
            steps.append(Flatten(_parse_colour(flatten[1])))
        elif part == "g":
            steps.append(Gray())
        else:
            return None
    format = parse_output_format(encode[1])
    assert format is not None
    bound = encode[4]
    steps.append(Encode(format, int(encode[2]), int(encode[3]), size if bound else 0, bound == ".bare"))
    plan = Plan(tuple(steps))
    # Leading zeros, say: one key, one plan.
    return plan if plan.key == key else None


def _parse_colour(text: str) -> tuple[int, int, int]:
    red, green, blue = bytes.fromhex(text)
    return red, green, blue


# The container's own limit: 14 bits.
_WEBP_MAX_SIDE = 16_383


def make_plan(params: Params, source: Source, size: int, rules: Rules) -> Plan:
    """The plan for what `params` ask of a source of `size` bytes. BadParameter where they cannot be met."""
    assert not params.original, "the original needs no plan"
    load, crop = _place(params, source, rules)
    width, height = (crop.width, crop.height) if crop else load
    steps: list[Step] = [crop] if crop and (width, height) != load else []
    if params.r:
        width, height = rotated_size(width, height, params.r)
        steps.append(Rotate(params.r, width, height, rules.background))
        _check_size((width, height), params, source, rules)
    largest = max(load[0] * load[1], width * height)
    return finish_plan(load, steps, (width, height), largest, params, source, size, rules)


def finish_plan(
    load: tuple[int, int],
    steps: Sequence[Step],
    size: tuple[int, int],
    largest: int,
    params: Params,
    source: Source,
    source_bytes: int,
    rules: Rules,
) -> Plan:
    """The plan that scales to `load`, goes these steps to `size`, and does the rest of what `params` ask for.

    `largest` is the most pixels that one frame has on the way.
    """
    rest: list[Step] = []
    if params.g and not source.gray:
        rest.append(Gray())
    format = _choose_format(params, source, rules)
    if format == "webp" and max(size) > _WEBP_MAX_SIDE:
        raise BadParameter("f", f"f=webp holds at most {_WEBP_MAX_SIDE} pixels a side.")
    if source.has_alpha and format == "jpeg":
        rest.append(Flatten(rules.background))
    rest.append(_encode(params, source, source_bytes, format, rules))
    frames = _count_frames(source, format, largest, rules)
    fast = rules.fast_shrink and _is_faster(load, source)
    first = Load(*load, frames=frames, managed=source.managed, gray=source.gray, fast=fast)
    return Plan((first, *steps, *rest))


def _place(params: Params, source: Source, rules: Rules) -> tuple[tuple[int, int], Crop | None]:
    """To which size the whole image is scaled, and what is cut out of that."""
    full = source.upright_size
    w, h = params.w, params.h
    if not rules.zoom_up:
        top = (100, 100) if params.p == 3 else full
        w, h = min(w, top[0]), min(h, top[1])
    if params.x != -1 or params.y != -1:
        left, top_edge = max(0, params.x), max(0, params.y)
        for name, start, side in (("x", left, full[0]), ("y", top_edge, full[1])):
            if start >= side:
                raise BadParameter(name, f"{name} must be below {side}, where the image ends.")
        if w or h:
            room = full[0] - left, full[1] - top_edge
            return full, Crop(left, top_edge, min(w or room[0], room[0]), min(h or room[1], room[1]))
    if not w and not h:
        return full, None
    match params.p:
        case 0:
            if not w or not h:
                missing = "h" if w else "w"
                raise BadParameter(missing, f"{missing} is missing: p=0 stretches to w and h, so it needs both.")
            return _checked((w, h), params, source, rules), None
        case 2:
            width, height = min(w or full[0], full[0]), min(h or full[1], full[1])
            return full, _centre(full, width, height)
        case 3:
            scaled = _scale(full[0], w or h, 100), _scale(full[1], h or w, 100)
            return _checked(scaled, params, source, rules), None
        case _:
            # Proportional to w, to h or, where both are given, to the one that covers (p=1) or fits (p=4).
            wider = w * full[1] > h * full[0]
            by_width = not h or (bool(w) and wider == (params.p == 1))
            wanted, whole = (w, full[0]) if by_width else (h, full[1])
            scaled = _scale(full[0], wanted, whole), _scale(full[1], wanted, whole)
            _check_size(scaled, params, source, rules)
            return scaled, _centre(scaled, w, h) if params.p == 1 and w and h else None


def _is_faster(load: tuple[int, int], source: Source) -> bool:
    """Whether to be fast makes a difference, so that there is no second name for the same rendition."""
    full = source.upright_size
    return source.format == "jpeg" and choose_divisor(full, load, fast=True) != choose_divisor(full, load, fast=False)


def _scale(side: int, wanted: int, whole: int) -> int:
    """side · wanted / whole, rounded half up, at least 1. In whole numbers: floats miss the wanted side by one."""
    return max(1, (2 * side * wanted + whole) // (2 * whole))


def _centre(full: tuple[int, int], width: int, height: int) -> Crop:
    return Crop((full[0] - width) // 2, (full[1] - height) // 2, width, height)


def _checked(size: tuple[int, int], params: Params, source: Source, rules: Rules) -> tuple[int, int]:
    _check_size(size, params, source, rules)
    return size


def _check_size(size: tuple[int, int], params: Params, source: Source, rules: Rules) -> None:
    """Refuse to enlarge beyond what the configuration allows, naming the parameter that asks for it."""
    max_side, max_pixels = find_limits(source, rules)
    if max(size) <= max_side and size[0] * size[1] <= max_pixels:
        return
    # The side that enlarges more is the one to blame.
    full = source.upright_size
    name = "r" if not params.w and not params.h else "w" if params.w * full[1] >= params.h * full[0] else "h"
    raise BadParameter(
        name,
        f"{name} asks for {size[0]} × {size[1]} pixels; allowed are {max_side} a side and {max_pixels} in all.",
    )


def find_limits(source: Source, rules: Rules) -> tuple[int, int]:
    """The longest side and the most pixels of what is made of a source.

    What is no larger than the image itself was allowed when that was uploaded.
    """
    return max(rules.max_side, source.width, source.height), max(rules.max_pixels, source.width * source.height)


def rotated_size(width: int, height: int, degrees: int) -> tuple[int, int]:
    """The canvas that holds a turned picture: ImageMagick's, hence zimg's, with a margin of a pixel or two."""
    if degrees % 180 == 0:
        return width, height
    if degrees % 90 == 0:
        return height, width
    sine, cosine = abs(math.sin(math.radians(degrees))), abs(math.cos(math.radians(degrees)))
    return (
        _canvas(width, width * cosine + height * sine),
        _canvas(height, width * sine + height * cosine),
    )


def _canvas(side: int, extent: float) -> int:
    """From half a pixel outside the first edge, rounded down, to half a pixel outside the last, rounded up."""
    first = math.floor((side - extent) / 2 - 0.5)
    return math.ceil((side + extent) / 2 - first + 0.5)


def _choose_format(params: Params, source: Source, rules: Rules) -> OutputFormat:
    wanted = params.f or rules.format or "none"
    if wanted != "none":
        return wanted
    # tiff and svg are not written: the nearest thing that a browser shows.
    return parse_output_format(source.format) or ("png" if source.has_alpha else "jpeg")


def _count_frames(source: Source, format: OutputFormat, pixels: int, rules: Rules) -> int:
    """How many frames of so many pixels the rendition keeps: what the format and the limits allow, at least one."""
    if source.format not in ("gif", "webp") or format not in ("gif", "webp"):
        return 1
    return max(1, min(source.frames, rules.max_frames, rules.max_pixels // pixels))


def _encode(params: Params, source: Source, size: int, format: OutputFormat, rules: Rules) -> Encode:
    """Formats without loss ignore quality, so that q makes no second rendition of the same bytes."""
    quality = params.q or rules.quality
    if source.format == "jpeg":
        # More than the source had would only be bytes.
        quality = min(quality, source.quality)
    effort = {
        "jpeg": 0,
        "png": rules.png_compression,
        "webp": rules.webp_effort,
        "gif": rules.gif_effort,
        "avif": rules.avif_effort,
    }[format]
    may_be_original = source.orientation == 1 and not source.managed and source.frames <= rules.max_frames
    return Encode(
        format,
        0 if format in ("png", "gif") else quality,
        effort,
        size if params.bare else 0,
        params.bare and may_be_original,
    )


# Who carries out a plan: "jpeg" is faster, "libvips" can do everything.
Engine = Literal["jpeg", "libvips"]

# The engine "jpeg" holds what it decodes in memory, four bytes a pixel of colour, where libvips works by lines. Memory
# that a worker is to give back comes anew for each picture: 24 MB of it took half as long as decoding them.
JPEG_MAX_DECODED_BYTES = 8 << 20

# Beyond the edges libvips takes the outermost pixel for granted, the engine "jpeg" nothing. Where the edges are most of
# the picture they would not agree.
_JPEG_LEAST_SIDE = 16


_LEAST_DECODED_SIDE = 16


def choose_divisor(full: tuple[int, int], scaled: tuple[int, int], *, fast: bool) -> int:
    """At which part of its size, 1, 1/2, 1/4 or 1/8, a JPEG of the size `full` is decoded on the way to `scaled`.

    What the decoder leaves out comes in blocks, which shows: a factor of two is left to the resampler, unless
    it has to be fast. Of a short side some pixels are left, for the last of them is only in part one of the picture.
    """
    factor = min(full[0] / scaled[0], full[1] / scaled[1], min(full) / _LEAST_DECODED_SIDE)
    return next((divisor for divisor in (8, 4, 2) if factor >= divisor * (1 if fast else 2)), 1)


def choose_engine(plan: Plan, source: Source) -> Engine:
    """Who carries out a plan. The result is as good, and the same but for the last bits of a pixel.

    The engine "jpeg" converts no colours, has no alpha, does not enlarge and tries no second quality. It rounds once
    more than libvips, which only shows in what is encoded without much loss, and in gray as WebP codes it.
    """
    load, *rest, encode = plan.steps
    assert isinstance(load, Load)
    assert isinstance(encode, Encode)
    if source.format != "jpeg" or source.managed or source.has_alpha or encode.max_bytes:
        return "libvips"
    # A script may crop what it has turned, or again; the engine "jpeg" scales no more than one crop.
    gray = source.gray
    for index, step in enumerate(rest):
        if isinstance(step, Gray):
            gray = True
        elif not (step.degrees % 90 == 0 if isinstance(step, Rotate) else index == 0 and isinstance(step, Crop)):
            return "libvips"
    # Only libvips' libjpeg knows what more effort is.
    if not ((encode.format == "jpeg" and not encode.effort) or (encode.format == "webp" and not gray)):
        return "libvips"
    full = source.upright_size
    if load.width > full[0] or load.height > full[1] or min(load.width, load.height) < _JPEG_LEAST_SIDE:
        return "libvips"
    divisor = choose_divisor(full, (load.width, load.height), fast=load.fast)
    decoded_bytes = -(-full[0] // divisor) * -(-full[1] // divisor) * (1 if gray else 4)
    return "jpeg" if decoded_bytes <= JPEG_MAX_DECODED_BYTES else "libvips"
