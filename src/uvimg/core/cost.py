"""What a job will cost in CPU time, and so which lane of the pool it stands in.

Predicted from what is known before anything is decoded: the plan, the facts about the source, the size of an upload.
Measured in November 2026 with libvips 8.18 and one thread, photographs of 0.5 to 5 megapixels; milliseconds of a
machine of that time, right within a factor of two. That is enough: fast and slow jobs are a factor of ten apart.
Surprise: AVIF is not slow by its name. One of 100 × 100 pixels takes as long as the decoding before it.
"""

from typing import Literal

from uvimg.core.formats import Format, OutputFormat
from uvimg.core.plan import Crop, Encode, Load, Plan, Rotate, Scale, Source

# An ordinary thumbnail takes 2 to 20 ms; whoever waits for one shall not wait for ten others.
SLOW_MS = 50.0

# What every job takes, whatever its size.
_BASE_MS = 2.0

# Per megapixel and frame of the source, decoded whole. Scaled decoding saves much of that in JPEG, which is reckoned
# with below, and half of it in WebP, which is not. SVG was not measured.
_DECODE_MS: dict[Format, float] = {
    "jpeg": 5.5,
    "png": 11.0,
    "webp": 15.0,
    "gif": 9.0,
    "avif": 25.0,
    "tiff": 4.0,
    "svg": 25.0,
}
# Beyond that, per megapixel: a progressive JPEG is decoded into memory first, an interlaced PNG in seven passes.
_PROGRESSIVE_MS: dict[Format, float] = {"jpeg": 6.0, "png": 10.0}

# Per megapixel and frame of the rendition, by effort from 0; what is beyond the end costs at least as much.
_ENCODE_MS: dict[OutputFormat, tuple[float, ...]] = {
    "jpeg": (5,),
    # zlib's levels; in between they were not measured.
    "png": (20, 26, 30, 35, 40, 47, 54, 59, 64, 68),
    "webp": (27, 36, 46, 70, 100, 110, 150),
    # 3 and 5 are guesses between their neighbours.
    "avif": (67, 190, 500, 1200, 3000, 5000),
    # The palette is what takes the time: from effort 7 on ten times as much. Flat pictures take a tenth of this.
    "gif": (450, 450, 450, 550, 550, 550, 550, 4000),
}
# Per megapixel of the canvas; a quarter turn only moves pixels.
_TURN_MS = 25.0
_QUARTER_TURN_MS = 8.0
# Per megapixel of the scaled picture, for profiles, CMYK and 16 bit.
_MANAGED_MS = 60.0
# Per megapixel of the result and, in the middle of a plan, of what is made smaller.
_ENLARGE_MS, _SHRINK_MS = 30.0, 5.0
# A result that should not be larger than the original is mostly written twice, unless that one may stand in.
_BOUNDED_FACTOR = 2.0
# The JPEG engine against libvips, over all sizes of photograph.
_JPEG_ENGINE_FACTOR = 0.75

# Per megabyte of a file that is decoded to its end, which is all that is known of an upload.
_INSPECT_MS: dict[Format, float] = {
    "jpeg": 12.0,
    "png": 6.0,
    "webp": 150.0,
    "gif": 50.0,
    "avif": 500.0,
    "tiff": 1.5,
    "svg": 50.0,
}


def predict_ms(plan: Plan, source: Source, engine: Literal["jpeg", "libvips"]) -> float:
    """The CPU time that a rendition will take."""
    milliseconds = _BASE_MS
    megapixels, frames = 0.0, 1
    for step in plan.steps:
        match step:
            case Load():
                frames = step.frames
                megapixels = step.width * step.height / 1e6
                milliseconds += _predict_decode_ms(source, step)
                if step.width * step.height > source.width * source.height:
                    milliseconds += _ENLARGE_MS * megapixels * frames
                if step.managed:
                    milliseconds += _MANAGED_MS * megapixels * frames
            case Rotate():
                megapixels = step.width * step.height / 1e6
                milliseconds += (_TURN_MS if step.degrees % 90 else _QUARTER_TURN_MS) * megapixels * frames
            case Encode():
                by_effort = _ENCODE_MS[step.format]
                factor = _BOUNDED_FACTOR if step.max_bytes and not step.or_original else 1.0
                milliseconds += factor * by_effort[min(step.effort, len(by_effort) - 1)] * megapixels * frames
            case Scale():
                before, megapixels = megapixels, step.width * step.height / 1e6
                by_scaling = _ENLARGE_MS * megapixels if megapixels > before else _SHRINK_MS * before
                milliseconds += by_scaling * frames
            case Crop():
                megapixels = step.width * step.height / 1e6
    return milliseconds * (_JPEG_ENGINE_FACTOR if engine == "jpeg" else 1.0)


def choose_lane(plan: Plan, source: Source, engine: Literal["jpeg", "libvips"]) -> Literal["fast", "slow"]:
    """The lane of a rendition that somebody waits for."""
    return "slow" if predict_ms(plan, source, engine) > SLOW_MS else "fast"


def takes_long_to_inspect(format: Format, size: int) -> bool:
    """Whether an upload of so many bytes is likely to be a slow job. Its header may say more than it holds."""
    return _INSPECT_MS[format] * size / 1e6 > SLOW_MS


def _predict_decode_ms(source: Source, load: Load) -> float:
    megapixels = source.width * source.height / 1e6
    by_pixel = _DECODE_MS[source.format]
    if source.format == "jpeg":
        # Reading the coefficients takes 1.6, turning them into pixels the rest, of which scaled decoding leaves a
        # part: libvips keeps a factor of two for its own scaling.
        scale = max(1, min(source.upright_size[0] // max(1, load.width), source.upright_size[1] // max(1, load.height)))
        divisor = next(divisor for divisor in (8, 4, 2, 1) if divisor <= max(1, scale // 2))
        by_pixel = 1.6 + (by_pixel - 1.6) / divisor**2
    if source.progressive:
        by_pixel += _PROGRESSIVE_MS.get(source.format, 0.0)
    return by_pixel * megapixels * load.frames
