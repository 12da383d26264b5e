"""Pictures to test and measure with: made here, the same every time, so that none has to be shipped.

`photo` has what a photograph has: large soft shapes, texture and sensor noise in every channel, so it
compresses and scales like one. Each function gives a pyvips image or the bytes of a file.
"""

from typing import Any

import pyvips

Image = Any


def photo(width: int, height: int, seed: int = 1) -> Image:
    """A photo-like picture, sRGB, 8 bit."""
    bands = [_photo_band(width, height, seed * 100 + number * 10) for number in range(3)]
    return bands[0].bandjoin(bands[1:]).cast("uchar").copy(interpretation="srgb")


def _photo_band(width: int, height: int, seed: int) -> Image:
    shapes = pyvips.Image.perlin(width, height, cell_size=max(16, width // 3), seed=seed) * 90
    texture = pyvips.Image.perlin(width, height, cell_size=24, seed=seed + 1) * 25
    noise = pyvips.Image.gaussnoise(width, height, mean=128, sigma=3, seed=seed + 2)
    return shapes + texture + noise


def flat(width: int, height: int, colour: tuple[int, ...]) -> Image:
    """One colour; with four values the last is alpha."""
    return (
        (pyvips.Image.black(width, height, bands=len(colour)) + list(colour)).cast("uchar").copy(interpretation="srgb")
    )


def quadrants(width: int, height: int) -> Image:
    """Red, green over blue, white: tells which way a picture was turned."""
    half = width // 2, height // 2
    top = flat(half[0], half[1], (255, 0, 0)).join(flat(width - half[0], half[1], (0, 255, 0)), "horizontal")
    low = flat(half[0], height - half[1], (0, 0, 255)).join(
        flat(width - half[0], height - half[1], (255, 255, 255)), "horizontal"
    )
    return top.join(low, "vertical")


def animation(width: int, height: int, frames: int, delay_ms: int = 80) -> Image:
    """A tall strip of frames, each with a square further along, ready for gifsave and webpsave."""
    pictures = [
        flat(width, height, (20 + 30 * number % 200, 200 - 25 * number % 200, 90)).draw_rect(
            [255, 255, 255], number * 5 % width, height // 4, width // 6, height // 6, fill=True
        )
        for number in range(frames)
    ]
    strip = pyvips.Image.arrayjoin(pictures, across=1).copy()
    strip.set_type(pyvips.GValue.gint_type, "page-height", height)
    strip.set_type(pyvips.GValue.array_int_type, "delay", [delay_ms + 10 * number for number in range(frames)])
    strip.set_type(pyvips.GValue.gint_type, "loop", 0)
    return strip


def oriented(image: Image, orientation: int) -> Image:
    """The same pixels with an EXIF orientation of 1..8."""
    turned = image.copy()
    turned.set_type(pyvips.GValue.gint_type, "orientation", orientation)
    return turned


def jpeg(image: Image, quality: int = 90, **options: Any) -> bytes:
    """As JPEG, without metadata unless `keep` says otherwise."""
    return bytes(image.jpegsave_buffer(Q=quality, **{"keep": "none", **options}))


def number_jpeg(data: bytes, number: int) -> bytes:
    """The same picture under another hash: with a comment of ten digits, unless the number is 0."""
    return data if not number else data[:2] + b"\xff\xfe\x00\x0c%010d" % number + data[2:]


def zimg_photo() -> bytes:
    """The shape of the picture in zimg's tables: 640 × 856 pixels and about 30 kB of JPEG."""
    return jpeg(photo(640, 856, seed=7).gaussblur(1.2), quality=80)


def large_photo() -> bytes:
    """As a camera leaves it, 6 megapixels in about 830 kB of JPEG: decoding is nearly all the work there is."""
    return jpeg(photo(2725, 2225, seed=9).gaussblur(1.2), quality=91)
