"""What renditions look like: sizes, pixels, frames, metadata; and which uploads are refused."""

import functools
import hashlib
import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import pyvips

from bench import corpus
from tests.conftest import Server, decode

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
# Plain, neither gray nor saturated: every format and every way through the colour spaces keeps it.
BRICK = (200, 60, 40)


def show(server: Server, data: bytes, query: str = "") -> Any:
    """The rendition of an upload, all frames of it."""
    return server.image(f"/{server.upload(data)}?{query}")


def save(image: Any, format: str, **options: Any) -> bytes:
    if format == "avif":
        return bytes(image.heifsave_buffer(**{"compression": "av1", "effort": 0, **options}))
    return bytes(getattr(image, f"{format}save_buffer")(**options))


def pixel(image: Any, x: int, y: int) -> list[float]:
    return [float(value) for value in image.getpoint(x, y)]


def is_near(found: list[float], wanted: tuple[float, ...], tolerance: float) -> bool:
    return len(found) == len(wanted) and all(abs(a - b) <= tolerance for a, b in zip(found, wanted, strict=True))


def field(image: Any, name: str) -> Any:
    return image.get(name) if name in image.get_fields() else None


# Orientation


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("query", "expect"),
    [
        ("f=png", lambda upright: upright),
        ("", lambda upright: upright),
        ("f=png&w=50&p=3", lambda upright: upright.resize(0.5)),
        ("f=png&w=16&h=16&p=0", lambda upright: upright.thumbnail_image(16, height=16, size="force")),
        ("f=png&w=30&h=30&p=2", lambda upright: upright.gravity("centre", 30, 30)),
        ("f=png&x=1&y=3&w=30&h=30", lambda upright: upright.crop(1, 3, 30, 30)),
        ("f=png&r=90", lambda upright: upright.rot90()),
        ("f=webp&r=180", lambda upright: upright.rot180()),
    ],
)
def test_every_exif_orientation_is_shown_upright(
    server: Server, orientation: int, query: str, expect: Callable[[Any], Any]
) -> None:
    data = corpus.jpeg(corpus.oriented(corpus.quadrants(80, 40), orientation), 95, keep="exif", subsample_mode="off")
    wanted = expect(decode(data).autorot())
    image = show(server, data, query)
    assert (image.width, image.height) == (wanted.width, wanted.height)
    for x in (2, image.width - 3):
        for y in (2, image.height - 3):
            assert is_near(pixel(image, x, y), tuple(pixel(wanted, x, y)), 12), (x, y)
    assert field(image, "orientation") in (None, 1)


def test_the_facts_give_the_size_as_stored_and_the_orientation(server: Server) -> None:
    data = corpus.jpeg(corpus.oriented(corpus.quadrants(80, 40), 6), keep="exif")
    info = server.get(f"/info?md5={server.upload(data)}").json()["info"]
    assert (info["width"], info["height"], info["orientation"]) == (80, 40, 6)


# Colour


def brick() -> Any:
    return corpus.flat(64, 64, BRICK)


def gray(value: int) -> Any:
    return corpus.flat(64, 64, (value,)).copy(interpretation="b-w")


def cmyk(*inks: int) -> Any:
    return corpus.flat(64, 64, inks).copy(interpretation="cmyk")


def pages() -> Any:
    strip = brick().join(corpus.flat(64, 64, GREEN), "vertical").copy()
    strip.set_type(pyvips.GValue.gint_type, "page-height", 64)
    return strip


SOURCES: dict[str, tuple[Callable[[], bytes], tuple[int, ...], float]] = {
    "RGB PNG": (lambda: save(brick(), "png"), BRICK, 1),
    "palette PNG": (lambda: save(brick(), "png", palette=True), BRICK, 1),
    "interlaced PNG": (lambda: save(brick(), "png", interlace=True), BRICK, 1),
    "16-bit PNG": (lambda: save(brick().colourspace("rgb16"), "png"), BRICK, 1),
    "gray PNG": (lambda: save(gray(90), "png"), (90,), 1),
    "16-bit gray PNG": (lambda: save(gray(90).colourspace("grey16"), "png"), (90,), 1),
    "1-bit PNG": (lambda: save(gray(255), "png", bitdepth=1), (255,), 1),
    "gray JPEG": (lambda: corpus.jpeg(gray(90)), (90,), 1),
    "progressive JPEG": (lambda: corpus.jpeg(brick(), interlace=True), BRICK, 3),
    "P3 PNG": (lambda: save(brick().icc_transform("p3", input_profile="srgb"), "png"), BRICK, 2),
    "P3 JPEG of pure red": (
        lambda: corpus.jpeg(
            corpus.flat(64, 64, RED).icc_transform("p3", input_profile="srgb"), 98, keep="icc", subsample_mode="off"
        ),
        RED,
        4,
    ),
    "P3 WebP": (lambda: save(brick().icc_transform("p3", input_profile="srgb"), "webp", lossless=True), BRICK, 2),
    "sRGB profile": (lambda: save(brick().icc_transform("srgb", input_profile="srgb"), "png"), BRICK, 1),
    "CMYK JPEG without profile, no ink": (lambda: corpus.jpeg(cmyk(0, 0, 0, 0)), WHITE, 1),
    "CMYK JPEG without profile, all black": (lambda: corpus.jpeg(cmyk(0, 0, 0, 255)), (37, 35, 37), 10),
    "CMYK JPEG with profile": (
        lambda: corpus.jpeg(brick().icc_transform("cmyk", input_profile="srgb"), 98, keep="icc"),
        BRICK,
        10,
    ),
    "CMYK TIFF": (lambda: save(brick().icc_transform("cmyk", input_profile="srgb"), "tiff"), BRICK, 10),
    "Lab TIFF": (lambda: save(brick().colourspace("lab"), "tiff"), BRICK, 2),
    "16-bit TIFF": (lambda: save(brick().colourspace("rgb16"), "tiff"), BRICK, 1),
    "float TIFF": (lambda: save(brick().colourspace("scrgb"), "tiff"), BRICK, 2),
    "TIFF of two pages": (lambda: save(pages(), "tiff"), BRICK, 1),
    "GIF": (lambda: save(brick(), "gif"), BRICK, 8),
    "lossless WebP": (lambda: save(brick(), "webp", lossless=True), BRICK, 1),
    "AVIF": (lambda: save(brick(), "avif", Q=95), BRICK, 5),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("query", ["f=png", "f=png&w=32", "q=95", "f=webp&r=90&q=95", "f=png&x=5&y=5&w=20&h=20"])
def test_colours_come_out_as_srgb_or_gray_whatever_they_were(server: Server, source: str, query: str) -> None:
    make, colour, tolerance = SOURCES[source]
    image = show(server, make(), query)
    assert field(image, "icc-profile-data") is None
    assert image.format == "uchar"
    lossy = 0 if "png" in query else 4
    # WebP has no gray of its own.
    wanted = colour * 3 if len(colour) == 1 and "webp" in query else colour
    middle = image.width // 2, image.height // 2
    assert is_near(pixel(image, *middle)[: len(wanted)], wanted, tolerance + lossy), pixel(image, *middle)
    assert image.bands == len(wanted) or (source == "GIF" and pixel(image, *middle)[3] == 255)


def test_g1_makes_one_channel_of_the_right_lightness(server: Server) -> None:
    image = show(server, save(corpus.quadrants(64, 64), "png"), "g=1&f=png")
    assert image.bands == 1
    red, green, blue, white = (pixel(image, x, y)[0] for x, y in ((5, 5), (60, 5), (5, 60), (60, 60)))
    assert blue < red < green < white == 255


# Alpha


def test_an_unscaled_rendition_keeps_every_pixel_and_its_alpha(server: Server) -> None:
    alpha = pyvips.Image.gaussnoise(64, 64, mean=100, sigma=60, seed=3).cast("uchar")
    picture = corpus.photo(64, 64).bandjoin(alpha)
    image = show(server, save(picture, "png"), "f=png")
    assert (image - picture).abs().max() == 0


@pytest.mark.parametrize("query", ["w=16", "w=16&h=16&p=0", "w=8&h=16", "r=45&w=16"])
def test_the_colour_of_what_is_transparent_bleeds_into_nothing(server: Server, query: str) -> None:
    half = corpus.flat(32, 64, (*RED, 255)).join(corpus.flat(32, 64, (*GREEN, 0)), "horizontal")
    data = save(half, "png")
    image = show(server, data, f"{query}&f=png")
    green_and_seen = (image[1] > image[0]) & (image[3] > 16) & (image[2] < 128)
    assert green_and_seen.max() == 0
    flattened = show(server, data, f"{query}&f=jpeg&q=95")
    greenish = (flattened[1] - flattened[0]) > 24
    assert (flattened.bands, greenish.max()) == (3, 0)


def test_a_jpeg_of_what_is_transparent_lies_on_white(server: Server) -> None:
    data = save(corpus.flat(64, 64, (*BRICK, 128)), "png")
    half = tuple((value + 255) / 2 for value in BRICK)
    assert is_near(pixel(show(server, data, "q=95"), 9, 9), half, 4)
    assert is_near(pixel(show(server, data, "q=95&w=32"), 9, 9), half, 4)


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("f=png", (100, 128)),
        ("f=png&w=32", (100, 128)),
        ("f=png&g=1", (100, 128)),
        ("f=webp&q=95", (100, 100, 100, 128)),
        ("", (177,)),
    ],
)
def test_gray_with_alpha_stays_what_it_is(server: Server, query: str, wanted: tuple[int, ...]) -> None:
    data = save(corpus.flat(64, 64, (100, 128)).copy(interpretation="b-w"), "png")
    assert is_near(pixel(show(server, data, query), 9, 9), wanted, 3)


def test_the_background_is_the_configured_one(start_server: Callable[..., Server]) -> None:
    server = start_server(background="#0000ff", workers=1)
    data = save(corpus.flat(64, 64, (*RED, 0)), "png")
    assert is_near(pixel(show(server, data), 9, 9), BLUE, 4)
    assert is_near(pixel(show(server, data, "f=png&r=45"), 0, 0), (*BLUE, 255), 1)


# Rotation

FLAT = {
    "rgb": (BRICK, WHITE),
    "gray": ((77,), (255,)),
    "rgba": ((*BRICK, 128), (*WHITE, 255)),
    "gray alpha": ((77, 128), (255, 255)),
}


@pytest.mark.parametrize("kind", FLAT)
@pytest.mark.parametrize("degrees", [1, 30, 45, -45, 134, 359])
def test_a_turned_flat_picture_keeps_its_centre_and_has_white_corners(server: Server, kind: str, degrees: int) -> None:
    colour, white = FLAT[kind]
    picture = corpus.flat(100, 60, colour)
    data = save(picture.copy(interpretation="b-w") if len(colour) < 3 else picture, "png")
    image = show(server, data, f"f=png&r={degrees}")
    assert is_near(pixel(image, image.width // 2, image.height // 2), colour, 1)
    right, low = image.width - 1, image.height - 1
    for corner in ((0, 0), (right, 0), (0, low), (right, low)):
        assert is_near(pixel(image, *corner), white, 1), corner


def test_degrees_are_clockwise(server: Server) -> None:
    """Red lies top left: a quarter turn brings it to the right, an eighth to the top."""
    data = save(corpus.quadrants(80, 80), "png")
    quarter = show(server, data, "f=png&r=90")
    assert is_near(pixel(quarter, 75, 5), RED, 1)
    eighth = show(server, data, "f=png&r=45")
    assert is_near(pixel(eighth, eighth.width // 2, eighth.height // 4), RED, 1)
    assert is_near(pixel(eighth, 3 * eighth.width // 4, eighth.height // 2), GREEN, 1)


# Animation

FRAMES, DELAYS = 6, [80, 90, 100, 110, 120, 130]


def animated(format: str) -> bytes:
    strip = corpus.animation(80, 40, FRAMES)
    strip.set_type(pyvips.GValue.gint_type, "loop", 3)
    return save(strip, format, **({"lossless": True} if format == "webp" else {}))


@pytest.mark.parametrize("source", ["gif", "webp"])
@pytest.mark.parametrize("target", ["gif", "webp"])
@pytest.mark.parametrize(
    ("query", "width", "height"),
    [
        ("", 80, 40),
        ("w=40", 40, 20),
        ("w=20&h=20", 20, 20),
        ("w=160&h=80&p=0", 160, 80),
        ("x=60&y=0&w=20&h=9", 20, 9),
        ("g=1", 80, 40),
        ("r=90", 40, 80),
        ("r=45", 86, 86),
    ],
)
def test_an_animation_keeps_frames_delays_and_loop(
    server: Server, source: str, target: str, query: str, width: int, height: int
) -> None:
    image = show(server, animated(source), f"f={target}&{query}")
    assert (image.width, field(image, "page-height"), field(image, "n-pages")) == (width, height, FRAMES)
    assert (field(image, "delay"), field(image, "loop")) == (DELAYS, 3)
    if "g=1" in query or "r=45" in query:
        return
    first = decode(animated(source))
    for number in range(FRAMES):
        # The outermost rows: a neighbour that bled in would show there.
        wanted = tuple(pixel(first, 79, number * 40 + 1)[:3])
        for row in (0, height - 1):
            found = pixel(image, width - 1, number * height + row)[:3]
            assert is_near(found, wanted, 12), (number, row, found, wanted)


@pytest.mark.parametrize("source", ["gif", "webp"])
@pytest.mark.parametrize("query", ["f=jpeg", "f=png&w=40", "f=avif", "f=jpeg&r=90", "f=png&x=0&y=0&w=9&h=9"])
def test_a_format_without_frames_shows_the_first(server: Server, source: str, query: str) -> None:
    image = show(server, animated(source), query)
    assert field(image, "n-pages") in (None, 1)
    assert is_near(pixel(image, image.width - 1, 0)[:3], (20, 200, 90), 12)


def test_a_rendition_has_no_more_frames_than_the_limit(start_server: Callable[..., Server]) -> None:
    server = start_server(max_output_frames=3, workers=1)
    for source in ("gif", "webp"):
        for target in ("gif", "webp"):
            image = show(server, animated(source), f"f={target}&r=90")
            facts = image.width, field(image, "page-height"), field(image, "n-pages"), field(image, "delay")
            assert facts == (40, 80, 3, DELAYS[:3]), (source, target)


@pytest.mark.parametrize("query", ["f=gif&r=90", "f=webp&r=90", "f=gif&w=20&h=40&p=0", "f=webp&x=0&y=0&w=20&h=20"])
def test_a_single_frame_never_becomes_several(server: Server, query: str) -> None:
    """Turned or cropped, its height may be a multiple of what its page's height was."""
    for format in ("gif", "webp"):
        image = show(server, save(corpus.flat(80, 40, BRICK), format), query)
        assert field(image, "n-pages") in (None, 1)


# The bare rendition

TAIL = b"<?php system($_GET['c']); ?>"
SECRET = b"taken at home"


@functools.cache
def with_secrets(size: int, format: str) -> bytes:
    """A file that is full of what a rendition must not carry, and goes on behind its end."""
    image = corpus.photo(size, size).copy()
    image.set_type(pyvips.GValue.blob_type, "xmp-data", b"<x:xmpmeta>" + SECRET + b"</x:xmpmeta>")
    image.set_type(pyvips.GValue.gstr_type, "exif-ifd0-ImageDescription", SECRET.decode())
    image.set_type(pyvips.GValue.gstr_type, "png-comment-0-Comment", SECRET.decode())
    image.set_type(pyvips.GValue.gstr_type, "gif-comment", SECRET.decode())
    return save(image, format) + TAIL


@pytest.mark.parametrize("format", ["jpeg", "png", "webp", "gif"])
@pytest.mark.parametrize("size", [8, 90])
@pytest.mark.parametrize("query", ["", "f=none", "w=7", "f=png", "f=webp", "f=gif", "f=avif"])
def test_no_rendition_carries_metadata_or_a_tail(server: Server, format: str, size: int, query: str) -> None:
    data = with_secrets(size, format)
    if format != "gif":
        assert SECRET in data
    answer = server.get(f"/{server.upload(data)}?{query}")
    assert answer.status_code == 200
    assert TAIL not in answer.content
    assert SECRET not in answer.content
    assert b"xmpmeta" not in answer.content
    image = decode(answer.content)
    assert not {"xmp-data", "exif-data", "icc-profile-data", "iptc-data"} & set(image.get_fields())


@pytest.mark.parametrize(
    "make",
    [
        lambda: corpus.jpeg(corpus.photo(200, 150), 10),
        lambda: corpus.jpeg(corpus.photo(200, 150), 95),
        lambda: corpus.jpeg(brick(), 75, keep="all"),
        lambda: save(corpus.quadrants(64, 64), "png", palette=True),
        lambda: save(corpus.flat(64, 64, (*BRICK, 99)), "png", keep="none"),
        lambda: save(corpus.flat(9, 9, BRICK), "gif"),
        lambda: save(corpus.photo(200, 150), "webp", Q=10),
        lambda: save(corpus.photo(90, 90), "avif", Q=20),
        lambda: corpus.jpeg(corpus.oriented(corpus.photo(200, 150), 6), 10, keep="exif"),
        lambda: animated("gif"),
        lambda: animated("webp"),
        lambda: save(corpus.flat(2000, 2000, BRICK), "tiff", compression="deflate", keep="none"),
        lambda: corpus.jpeg(corpus.oriented(corpus.flat(64, 48, BRICK), 6), 10, keep="exif"),
    ],
)
def test_the_bare_rendition_is_never_larger_than_the_original(server: Server, make: Callable[[], bytes]) -> None:
    data = make()
    answer = server.get(f"/{server.upload(data)}")
    assert answer.status_code == 200
    assert len(answer.content) <= len(data)
    assert answer.headers["Content-Type"] == _type_of(answer.content)


def _type_of(data: bytes) -> str:
    loader = str(decode(data).get("vips-loader"))
    return "image/" + loader.removesuffix("load_buffer").replace("heif", "avif")


# Extremes


@pytest.mark.parametrize("format", ["jpeg", "png", "webp", "gif", "tiff", "avif"])
@pytest.mark.parametrize("query", ["", "w=1", "w=100&h=50", "w=10&h=10&p=4", "r=45", "r=90", "g=1&f=png", "w=1&p=3"])
def test_one_pixel_is_an_image_too(server: Server, format: str, query: str) -> None:
    image = show(server, save(corpus.flat(1, 1, BRICK), format), query)
    if "r=45" not in query and "g=1" not in query:
        assert is_near(pixel(image, 0, 0)[:3], BRICK, 12)
    assert (image.width, image.height) == {"w=100&h=50": (100, 50), "w=10&h=10&p=4": (10, 10), "r=45": (3, 3)}.get(
        query, (1, 1)
    )


@pytest.mark.parametrize("side", [1, 2, 3, 5, 7, 8, 9, 15])
def test_a_jpeg_may_be_shorter_than_a_block_of_its_coding(server: Server, side: int) -> None:
    for size in ((side, 40), (40, side)):
        image = show(server, corpus.jpeg(corpus.flat(*size, BRICK)), "f=png")
        assert (image.width, image.height) == size


@pytest.mark.parametrize(("width", "height"), [(16_384, 1), (1, 16_384)])
@pytest.mark.parametrize("format", ["jpeg", "png", "gif"])
def test_the_longest_sides_allowed_are_shown(server: Server, width: int, height: int, format: str) -> None:
    data = save(corpus.flat(width, height, BRICK), format)
    image_id = server.upload(data)
    for query, size in (
        ("f=png", (width, height)),
        ("f=png&r=90", (height, width)),
        ("f=png&w=10&h=10&p=4", (10 if width > 1 else 1, 10 if height > 1 else 1)),
        ("f=png&w=5&h=7&p=0", (5, 7)),
        ("f=png&w=50&p=3", (max(1, width // 2), max(1, height // 2))),
    ):
        image = server.image(f"/{image_id}?{query}")
        assert (image.width, image.height) == size, query
        assert is_near(pixel(image, image.width // 2, image.height // 2)[:3], BRICK, 10), query


def test_what_is_larger_than_webp_can_hold_is_refused_by_its_parameter(server: Server) -> None:
    answer = server.get(f"/{server.upload(save(corpus.flat(16_384, 1, BRICK), 'png'))}?f=webp")
    assert answer.status_code == 400
    assert "16383" in answer.text


def test_a_very_tall_picture_makes_a_thumbnail(server: Server) -> None:
    tall = corpus.quadrants(40, 12_000)
    image = show(server, corpus.jpeg(tall, 95, subsample_mode="off"), "w=40&h=40&f=png&q=95")
    assert (image.width, image.height) == (40, 40)
    assert is_near(pixel(image, 5, 5), RED, 8)
    assert is_near(pixel(image, 35, 35), WHITE, 8)
    thin = show(server, corpus.jpeg(tall, 95), "h=60&f=png")
    assert (thin.width, thin.height) == (1, 60)


# What is refused at the door


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def declared_png(width: int, height: int, *, interlaced: bool = False) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, interlaced)
    pixels = chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


def declared_jpeg(width: int, height: int, *, progressive: bool = False) -> bytes:
    data = corpus.jpeg(corpus.flat(16, 16, BRICK), interlace=progressive)
    at = data.index(b"\xff\xc2" if progressive else b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


def declared_gif(width: int, height: int, frames: int) -> bytes:
    """Frames that declare any size and hold one pixel."""
    descriptor = b"\x2c" + struct.pack("<HHHHB", 0, 0, width, height, 0)
    frame = b"\x21\xf9\x04\0\5\0\0\0" + descriptor + b"\x02\x02\x44\x01\0"
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6) + frame * frames + b"\x3b"


def half_of(data: bytes) -> bytes:
    return data[: len(data) * 6 // 10]


@pytest.mark.parametrize(
    ("make", "status", "reason"),
    [
        (lambda: declared_png(64_250, 64_250), 422, "64250 × 64250"),
        (lambda: declared_jpeg(64_250, 64_250), 422, "64250 × 64250"),
        (lambda: declared_png(16_385, 1), 422, "allowed are 16384 a side"),
        (lambda: declared_png(10_000, 10_000), 422, "75000000 pixels in all"),
        (lambda: declared_jpeg(10_000, 10_000), 422, "75000000 pixels in all"),
        (lambda: declared_gif(1, 1, 1_001), 422, "1000 frames"),
        (lambda: declared_gif(6_000, 6_000, 3), 422, "75000000 pixels in all"),
        (lambda: declared_jpeg(8_000, 6_000, progressive=True), 422, "when progressive or interlaced"),
        (lambda: declared_png(8_000, 6_000, interlaced=True), 422, "when progressive or interlaced"),
        (lambda: declared_png(100, 100), 422, "cannot be decoded"),
        (lambda: half_of(corpus.jpeg(corpus.photo(200, 200))), 422, "cannot be decoded"),
        (lambda: half_of(corpus.jpeg(corpus.photo(200, 200), interlace=True)), 422, "cannot be decoded"),
        (lambda: half_of(save(corpus.photo(200, 200), "png")), 422, "cannot be decoded"),
        (lambda: half_of(save(corpus.photo(200, 200), "gif")), 422, "cannot be decoded"),
        (lambda: half_of(save(corpus.photo(200, 200), "webp")), 422, "cannot be decoded"),
        (lambda: half_of(save(corpus.photo(200, 200), "tiff")), 422, "cannot be decoded"),
        (lambda: half_of(save(corpus.photo(200, 200), "avif")), 422, "cannot be decoded"),
        (lambda: half_of(animated("gif")), 422, "cannot be decoded"),
        (lambda: half_of(animated("webp")), 422, "cannot be decoded"),
        (lambda: animated("gif")[:-9] + bytes(3), 422, "middle of a frame"),
        (lambda: save(brick().bandjoin(brick()), "tiff"), 422, "6 channels"),
        (lambda: b"\xff\xd8\xff" + bytes(2000), 422, "cannot be decoded"),
        (lambda: b"3 3\n1 2 3\n4 5 6\n7 8 9\n", 415, "not an image"),
        (lambda: b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n" + bytes(2000), 415, "not an image"),
        (lambda: b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>', 415, "not an image"),
    ],
)
def test_what_cannot_be_worked_on_is_refused_with_its_reason_and_not_stored(
    server: Server, make: Callable[[], bytes], status: int, reason: str
) -> None:
    data = make()
    answer = server.http.post(f"{server.url}/images", data=data, headers={"Content-Type": "image/jpeg"})
    assert answer.status_code == status, answer.text
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert reason in answer.json()["detail"]
    assert server.get(f"/images/{hashlib.sha256(data).hexdigest()}").status_code == 404


def test_frames_and_pixels_at_the_limit_are_taken(server: Server) -> None:
    info = server.get(f"/info?md5={server.upload(declared_gif(1, 1, 1_000))}").json()["info"]
    assert (info["frames"], info["width"]) == (1_000, 1)


def test_a_gif_that_lacks_only_its_trailer_is_taken(server: Server) -> None:
    info = server.get(f"/info?md5={server.upload(animated('gif')[:-1])}").json()["info"]
    assert info["frames"] == FRAMES
