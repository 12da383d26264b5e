"""What files give away: their format, a JPEG's quality, and the picture without anything else."""

import time
from collections.abc import Callable

import pytest
import pyvips
from hypothesis import example, given
from hypothesis import strategies as st

from bench import corpus
from tests.conftest import decode
from uvimg.core.formats import (
    FORMATS,
    HEAD_BYTES,
    OUTPUT_FORMATS,
    Format,
    is_srgb_profile,
    jpeg_quality,
    keep_only_pixels,
    media_type,
    parse_output_format,
    recognise,
)

SECRET = b"SECRET, nobody's business"
PHOTO = corpus.photo(97, 61)
ANIMATION = corpus.animation(40, 30, 4)


def segment(marker: int, payload: bytes) -> bytes:
    return bytes([0xFF, marker]) + (len(payload) + 2).to_bytes(2, "big") + payload


def png_chunk(kind: bytes, payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + kind + payload + bytes(4)


def webp_chunk(kind: bytes, payload: bytes) -> bytes:
    return kind + len(payload).to_bytes(4, "little") + payload + bytes(len(payload) & 1)


def riff(body: bytes) -> bytes:
    return b"RIFF" + len(body).to_bytes(4, "little") + body


def talkative(image: object) -> pyvips.Image:
    """The same pixels with a secret in every place that libvips can write one to."""
    talking = image.copy()
    for name in ("exif-ifd0-ImageDescription", "gif-comment", "png-comment-0-Title"):
        talking.set_type(pyvips.GValue.gstr_type, name, SECRET.decode())
    talking.set_type(pyvips.GValue.blob_type, "xmp-data", b"<x:xmpmeta>" + SECRET + b"</x:xmpmeta>")
    talking.set_type(pyvips.GValue.blob_type, "iptc-data", SECRET)
    return talking


def written(save: str, image: object = PHOTO, **options: object) -> bytes:
    return bytes(getattr(talkative(image), f"{save}_buffer")(**options)) + SECRET


def behind_the_head(data: bytes, insert: bytes, at: int = 2) -> bytes:
    return data[:at] + insert + data[at:]


JPEG = corpus.jpeg(PHOTO)
JFIF = b"JFIF\0\1\2\0\0\1\0\1"
FILES: dict[str, tuple[Format, Callable[[], bytes]]] = {
    "jpeg": ("jpeg", lambda: written("jpegsave")),
    "jpeg with a profile": ("jpeg", lambda: written("jpegsave", profile="srgb")),
    "progressive jpeg": ("jpeg", lambda: written("jpegsave", interlace=True, optimize_scans=True)),
    "gray jpeg": ("jpeg", lambda: written("jpegsave", PHOTO.colourspace("b-w"))),
    "cmyk jpeg": ("jpeg", lambda: written("jpegsave", PHOTO.colourspace("cmyk"))),
    "jpeg with restarts": ("jpeg", lambda: written("jpegsave", restart_interval=3, subsample_mode="off")),
    "jpeg with comments": ("jpeg", lambda: behind_the_head(JPEG, segment(0xFE, SECRET) + segment(0xED, SECRET))),
    "jpeg with a thumbnail": ("jpeg", lambda: behind_the_head(JPEG, segment(0xE0, JFIF + b"\1\1SEC"))),
    "png": ("png", lambda: written("pngsave")),
    "png with a profile": ("png", lambda: written("pngsave", profile="srgb", interlace=True)),
    "png with a palette": ("png", lambda: written("pngsave", PHOTO.bandjoin(180).cast("uchar"), palette=True)),
    "16 bit png": ("png", lambda: written("pngsave", PHOTO.colourspace("rgb16"))),
    "gif": ("gif", lambda: written("gifsave")),
    "animated gif": ("gif", lambda: written("gifsave", ANIMATION)),
    "webp": ("webp", lambda: written("webpsave")),
    "lossless webp": ("webp", lambda: written("webpsave", lossless=True, profile="srgb")),
    "webp with alpha": ("webp", lambda: written("webpsave", PHOTO.bandjoin(PHOTO[0]))),
}


@pytest.mark.parametrize("name", FILES)
def test_the_pixels_stay_and_nothing_else_does(name: str) -> None:
    format, make = FILES[name]
    dirty = make()
    kept = keep_only_pixels(dirty, format)
    assert kept is not None
    before, after = decode(dirty), decode(kept)
    assert (before - after).abs().max() == 0
    assert [before.get(field) for field in ("width", "height", "bands", "interpretation")] == [
        after.get(field) for field in ("width", "height", "bands", "interpretation")
    ]
    for field in ("page-height", "delay", "loop"):
        assert (field in before.get_fields()) == (field in after.get_fields())
        assert field not in before.get_fields() or before.get(field) == after.get(field)
    assert b"SEC" in dirty
    assert b"SEC" not in kept
    for trace in (b"Exif", b"xmp", b"ICC_PROFILE", b"iCCP", b"ICCP", b"Photoshop"):
        assert trace not in kept
    assert not [
        field for field in after.get_fields() if field.startswith(("exif", "xmp", "icc", "iptc", "png-comment"))
    ]
    assert keep_only_pixels(kept, format) == kept


def gif_with_subblocks() -> bytes:
    data = bytes(PHOTO.gifsave_buffer(keep="none"))
    at = data.index(b"\x21\xf9\x04")
    return data[: at + 7] + bytes([len(SECRET)]) + SECRET + data[at + 7 :]


PNG, GIF = bytes(PHOTO.pngsave_buffer(keep="none")), bytes(PHOTO.gifsave_buffer(keep="none"))
WEBP = bytes(PHOTO.webpsave_buffer(keep="none"))
VP8X = webp_chunk(b"VP8X", bytes(4) + bytes([96, 0, 0, 60, 0, 0]))
SMUGGLED: dict[str, tuple[Format, bytes]] = {
    "application segments": (
        "jpeg",
        behind_the_head(JPEG, segment(0xE0, SECRET[:14]) * 9 + segment(0xEE, SECRET[:12])),
    ),
    "an Adobe segment's flags": ("jpeg", behind_the_head(JPEG, segment(0xEE, b"AdobeSECRET\1"))),
    "segments with fill bytes": ("jpeg", behind_the_head(JPEG, b"\xff" + segment(0xFE, SECRET))),
    "a reserved segment": ("jpeg", behind_the_head(JPEG, segment(0xF0, SECRET))),
    "a second image": ("jpeg", JPEG[:-2] + behind_the_head(JPEG, segment(0xFE, SECRET))),
    "a transparency chunk": ("png", behind_the_head(PNG, png_chunk(b"tRNS", SECRET * 20), 33)),
    "repeated chunks": ("png", behind_the_head(PNG, png_chunk(b"sRGB", b"S") + png_chunk(b"sRGB", b"SECRET"), 33)),
    "an end that goes on": ("png", PNG[:-12] + png_chunk(b"IEND", SECRET)),
    "a private chunk": ("png", behind_the_head(PNG, png_chunk(b"seCr", SECRET), 33)),
    "a long graphic control": ("gif", gif_with_subblocks()),
    "many graphic controls": ("gif", behind_the_head(GIF, b"\x21\xf9\x04SECR\0" * 9, GIF.index(b"\x21\xf9"))),
    "an application of gif": ("gif", behind_the_head(GIF, b"\x21\xff\x0bSECRET12345\0", GIF.index(b"\x21\xf9"))),
    "a second picture": ("webp", riff(b"WEBP" + WEBP[12:] + webp_chunk(b"VP8 ", SECRET))),
    "an unknown chunk": ("webp", riff(b"WEBP" + WEBP[12:] + webp_chunk(b"SECR", SECRET))),
    "reserved bytes": ("webp", riff(b"WEBP" + VP8X.replace(bytes(4) + b"\x60", b"\0SEC\x60") + WEBP[12:])),
}


@pytest.mark.parametrize("name", SMUGGLED)
def test_a_hiding_place_outside_the_picture_is_emptied_or_the_file_not_vouched_for(name: str) -> None:
    format, data = SMUGGLED[name]
    assert b"SEC" in data
    kept = keep_only_pixels(data, format)
    assert kept is None or (b"SEC" not in kept and (decode(kept) - decode(data)).abs().max() == 0)


@pytest.mark.parametrize(
    ("data", "format"),
    [
        (JPEG.replace(b"\xff\xc0", b"\xff\xc9"), "jpeg"),
        (behind_the_head(JPEG, segment(0xCC, b"\0\0")), "jpeg"),
        (behind_the_head(JPEG, b"\xff\x01"), "jpeg"),
        (JPEG[:-2], "jpeg"),
        (b"\xff\xd8\xff\xd9", "jpeg"),
        (b"\xff\xd8" + segment(0xFE, b"") + b"\xff\xd9", "jpeg"),
        (PNG[:-1], "png"),
        (GIF[:-1], "gif"),
        (WEBP[:-1], "webp"),
        (bytes(ANIMATION.webpsave_buffer()), "webp"),
        (b"<svg/>", "svg"),
        (b"II*\0", "tiff"),
    ],
)
def test_what_cannot_be_told_is_not_vouched_for(data: bytes, format: Format) -> None:
    assert keep_only_pixels(data, format) is None


def test_the_quality_of_a_jpeg_is_the_one_it_was_written_with() -> None:
    qualities = list(range(10, 101))
    assert [jpeg_quality(corpus.jpeg(PHOTO, quality)) for quality in qualities] == qualities
    assert [jpeg_quality(corpus.jpeg(PHOTO.colourspace("b-w"), quality)) for quality in qualities] == qualities


def test_the_luminance_table_is_found_among_several_of_one_segment() -> None:
    tables = [JPEG[at + 4 : at + 69] for at in range(len(JPEG)) if JPEG.startswith(b"\xff\xdb\0\x43", at)]
    assert [table[0] for table in tables] == [0, 1]
    wide = b"\x10" + b"".join(bytes([0, value]) for value in tables[0][1:])
    for payload in (tables[1] + tables[0], tables[1] + wide, b"\x12" + bytes(128) + tables[0]):
        assert jpeg_quality(b"\xff\xd8" + segment(0xDB, payload)) == 90
    assert jpeg_quality(b"\xff\xd8\xff\xff" + segment(0xDB, tables[0])) == 90
    for payload in (tables[1], tables[0][:-1], wide[:-1], b"\x20" + tables[0], b""):
        assert jpeg_quality(b"\xff\xd8" + segment(0xDB, payload)) == 100


def test_every_format_is_recognised_by_what_is_written_in_it() -> None:
    pictures = {
        "jpeg": JPEG,
        "png": PNG,
        "gif": GIF,
        "webp": WEBP,
        "tiff": bytes(PHOTO.tiffsave_buffer()),
        "avif": bytes(PHOTO.heifsave_buffer(compression="av1", effort=0)),
        "svg": b"\xef\xbb\xbf \n<?xml version='1.0'?><!-- a --><svg xmlns='http://www.w3.org/2000/svg'/>",
    }
    assert {format: recognise(data[:HEAD_BYTES]) for format, data in pictures.items()} == {f: f for f in FORMATS}
    assert all(media_type(format).startswith("image/") for format in FORMATS)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\xff\xd8",
        b"GIF88a",
        b"RIFF\0\0\0\0WAVE",
        b"1 2 3\n4 5 6\n",
        b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
        b"\0\0\0\x10ftypisom\0\0\0\0avif",
        b"\0\0\0\0ftypmif1\0\0\0\0avif",
        b"%PDF-1.4",
        b"<html><svg/></html>",
        b"<?xml version='1.0'?><html/>",
        b" " * HEAD_BYTES + b"<svg/>",
        b"id=ImageMagick",
        b"P6 1 1 255 abc",
        b"#!/bin/sh",
    ],
)
def test_what_is_none_of_our_formats_is_not_recognised(head: bytes) -> None:
    assert recognise(head) is None


@pytest.mark.parametrize("text", ["", ".", "jpeg ", "jpeg\n", "ＪＰＥＧ", "tiff", "tif", "svg", "heic", "none", "bmp"])
def test_a_format_is_written_under_its_own_name_only(text: str) -> None:
    assert parse_output_format(text) is None
    assert [parse_output_format(format.upper()) for format in OUTPUT_FORMATS] == list(OUTPUT_FORMATS)


MAGIC = {"jpeg": b"\xff\xd8\xff", "png": b"\x89PNG\r\n\x1a\n", "gif": b"GIF89a", "webp": b"RIFF\x40\0\0\0WEBP"}
tokens = st.sampled_from(
    [
        *(b"\xff\xda\0\2", b"\xff\xdb\0\x43\0", b"\xff\xe1", b"\xff\xd9", JPEG[:300]),
        *(b"\0\0\0\1IDAT", b"\0\0\0\0IEND\0\0\0\0", b"\x21\xf9\4", b"\x2c", b"\x3b"),
        *(b"VP8 \2\0\0\0", b"VP8X\x0a\0\0\0", b"<svg", b"<?xml ", b"\0\0\0\x20ftyp", b"avif"),
    ]
)
noise = st.lists(tokens | st.binary(max_size=20), max_size=12).map(b"".join)


@given(st.sampled_from(["", *MAGIC]), noise)
@example("", b"")
def test_no_bytes_make_a_reader_raise(magic: str, rest: bytes) -> None:
    data = MAGIC.get(magic, b"") + rest
    assert recognise(data) in (None, *FORMATS)
    assert 1 <= jpeg_quality(data) <= 100
    is_srgb_profile(data)
    for format in FORMATS:
        kept = keep_only_pixels(data, format)
        assert kept is None or keep_only_pixels(kept, format) == kept


MEGABYTE = 1 << 20


@pytest.mark.parametrize(
    "data",
    [
        b" " * 4 * MEGABYTE,
        b"\xef\xbb\xbf" + b" " * 4 * MEGABYTE,
        b"\0\0\0\0ftyp" + b"mif1" * MEGABYTE,
        b"\xff\xd8" + b"\xff\xe1\0\2" * MEGABYTE,
        b"\xff\xd8" + b"\xff\xda\0\2" * MEGABYTE + b"\xff\xd9",
        b"\xff\xd8" + b"\xff\xdb\0\2" * MEGABYTE,
        b"\xff\xd8" + b"\xff" * 4 * MEGABYTE,
        b"\xff\xd8\xff\xda\0\2" + b"\xff" * 4 * MEGABYTE,
        b"\xff\xd8\xff\xda\0\2" + b"\xff\0" * 2 * MEGABYTE,
        b"\x89PNG\r\n\x1a\n" + b"\0\0\0\0IDAT\0\0\0\0" * (MEGABYTE // 3),
        b"GIF89a" + bytes(7) + b"\x21\xf9\0" * MEGABYTE,
        b"GIF89a" + bytes(7) + b"\x2c" + bytes(10) + b"\1\1" * 2 * MEGABYTE,
        b"RIFF" + (4 * MEGABYTE - 8).to_bytes(4, "little") + b"WEBP" + b"JUNK\0\0\0\0" * (MEGABYTE // 2),
    ],
    ids=lambda data: repr(data[:16]),
)
def test_four_hostile_megabytes_are_walked_in_a_moment(data: bytes) -> None:
    started = time.process_time()
    recognise(data)
    jpeg_quality(data)
    for format in FORMATS:
        keep_only_pixels(data, format)
    assert time.process_time() - started < 3
