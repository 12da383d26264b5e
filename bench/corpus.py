"""Pictures to test and measure with: made here, the same every time, so that none has to be shipped.

`photo` has what a photograph has: large soft shapes, texture and sensor noise in every channel, so it
compresses and scales like one. `text` and `line_art` have what a photograph has not: edges, which show
what a resampler does. Each function gives a pyvips image or the bytes of a file.
"""

import random
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


def text(width: int, height: int, seed: int = 1) -> Image:
    """Something like a page: lines of strange letters in several sizes, dark on light. No font is needed."""
    dice = random.Random(seed)
    alphabet = [_letter(dice) for _ in range(40)]
    parts, top = [], 6.0
    while top < height:
        size = dice.choice((9, 11, 14, 20, 36))
        ink = dice.choice(("#111", "#111", "#111", "#203a8f", "#a01818"))
        left = 6.0 + dice.random() * 20
        shapes = []
        while left < width - size:
            if dice.random() < 0.85:
                shapes.append(
                    f'<path transform="translate({left:.1f} {top:.1f}) scale({size})" d="{dice.choice(alphabet)}"/>'
                )
            left += size * 0.62
        parts.append(f'<g stroke="{ink}" stroke-width="0.11" fill="none">{"".join(shapes)}</g>')
        top += size * 1.35
    return _draw(width, height, "#fbfaf4", "".join(parts))


def _letter(dice: random.Random) -> str:
    """Two to four strokes in a square of one, straight and round, like those of a letter."""
    grid = [(x / 2 * 0.5, y / 2 * 0.9 + 0.05) for x in range(3) for y in range(3)]
    strokes = []
    for _ in range(dice.randint(2, 4)):
        (ax, ay), (bx, by) = dice.sample(grid, 2)
        bend = f"Q{by * 0.5:.2f} {bx:.2f} " if dice.random() < 0.4 else "L"
        strokes.append(f"M{ax:.2f} {ay:.2f}{bend}{bx:.2f} {by:.2f}")
    return "".join(strokes)


def line_art(width: int, height: int, seed: int = 1) -> Image:
    """Thin lines, rings, rays, a fine grid and flat strong colours: what suffers most from being made smaller."""
    dice = random.Random(seed)
    parts = []
    for number in range(60):
        colour = f"hsl({dice.randrange(360)},{dice.randrange(40, 100)}%,{dice.randrange(15, 75)}%)"
        x, y, r = dice.random() * width, dice.random() * height, dice.random() * min(width, height) / 3
        thin = dice.choice((0.6, 1, 1.5, 2.5))
        match number % 4:
            case 0:
                parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}" fill="{colour}" fill-opacity="0.9"/>')
            case 1:
                place = f'cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}"'
                parts.append(f'<circle {place} fill="none" stroke="{colour}" stroke-width="{thin}"/>')
            case 2:
                ends = [(dice.random() * width, dice.random() * height) for _ in range(6)]
                rays = "".join(f"M{x:.1f} {y:.1f}L{end[0]:.1f} {end[1]:.1f}" for end in ends)
                parts.append(f'<path d="{rays}" stroke="{colour}" stroke-width="{thin}"/>')
            case _:
                grid = "".join(
                    f"M{x:.1f} {y + 4 * row:.1f}h{r:.1f}M{x + 4 * row:.1f} {y:.1f}v{r:.1f}" for row in range(20)
                )
                parts.append(f'<path d="{grid}" stroke="{colour}" stroke-width="{thin}"/>')
    return _draw(width, height, "white", "".join(parts))


def _draw(width: int, height: int, paper: str, shapes: str) -> Image:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">'
    drawing = f'{head}<rect width="100%" height="100%" fill="{paper}"/>{shapes}</svg>'
    return pyvips.Image.svgload_buffer(drawing.encode()).flatten().copy(interpretation="srgb").copy_memory()


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
