"""What is known of the image formats: names, media types, and what their bytes give away.

The allow-list by magic bytes stands before libvips, whose own search would try a text file as a matrix.
The walkers below read hostile bytes: they only ever step forward, so they end after one pass, and they raise nothing.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

Format = Literal["jpeg", "png", "webp", "gif", "avif", "tiff", "svg"]
OutputFormat = Literal["jpeg", "png", "webp", "gif", "avif"]

FORMATS: tuple[Format, ...] = get_args(Format)
OUTPUT_FORMATS: tuple[OutputFormat, ...] = get_args(OutputFormat)

# Enough of a file's beginning to recognise it by (svg may have a long prologue).
HEAD_BYTES = 1024

_MEDIA_TYPES: dict[str, str] = {
    "jpeg": "image/jpeg",
    "png": "image/png",
    "webp": "image/webp",
    "gif": "image/gif",
    "avif": "image/avif",
    "tiff": "image/tiff",
    "svg": "image/svg+xml",
}
_OTHER_NAMES = {"jpg": "jpeg", "jpe": "jpeg", "tif": "tiff"}


def media_type(format: Format) -> str:
    return _MEDIA_TYPES[format]


def parse_output_format(text: str) -> OutputFormat | None:
    """The output format of this name or file extension, None when there is none."""
    name = _OTHER_NAMES.get(text.lower(), text.lower())
    return next((format for format in OUTPUT_FORMATS if format == name), None)


# One run of white space alone before and one behind the mark: two neighbours would try every split between them.
_SVG = re.compile(rb"\s*(?:\xef\xbb\xbf\s*)?(?:<\?xml|<!--|<!DOCTYPE svg|<svg)")


def recognise(head: bytes) -> Format | None:
    """The format that a file's first HEAD_BYTES bytes announce, None when it is none of ours."""
    head = head[:HEAD_BYTES]
    if head.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "webp"
    if head.startswith((b"II*\0", b"MM\0*")):
        return "tiff"
    if head[4:8] == b"ftyp":
        return "avif" if _has_avif_brand(head) else None
    if _SVG.match(head) and b"<svg" in head:
        return "svg"
    return None


def _has_avif_brand(head: bytes) -> bool:
    """Whether a file type box names AVIF, as its major or a compatible brand (ISO/IEC 14496-12 4.3)."""
    size = int.from_bytes(head[:4], "big")
    brands = head[8:12] + head[16:size]
    return any(brands[at : at + 4] in (b"avif", b"avis") for at in range(0, len(brands), 4))


# Luminance table K.1 of ITU-T T.81, which the IJG library scales by the quality; its sum is all that is needed.
_LUMINANCE = (
    *(16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55),
    *(14, 13, 16, 24, 40, 57, 69, 56, 14, 17, 22, 29, 51, 87, 80, 62),
    *(18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92),
    *(49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99),
)


def _scaled_sum(quality: int) -> int:
    """The sum of the luminance table as the IJG library scales it for this quality (jcparam.c's formula)."""
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    return sum(min(255, max(1, (value * scale + 50) // 100)) for value in _LUMINANCE)


_SUMS = tuple(_scaled_sum(quality) for quality in range(1, 101))


# A photograph has tens of segments, with a large colour profile and Exif hundreds.
_MAX_JPEG_SEGMENTS = 10_000


def jpeg_quality(data: bytes) -> int:
    """The IJG quality 1..100 whose luminance table is nearest to this JPEG's; 100 when it cannot be told."""
    for marker, start, stop in _jpeg_segments(data):
        # One segment may define several tables: precision and number, then 64 values of one or two bytes.
        at = start + 4
        while marker == 0xDB and at < stop:
            wide, number = data[at] >> 4, data[at] & 0x0F
            table = data[at + 1 : at + 65 + 64 * wide]
            at += 65 + 64 * wide
            if wide > 1 or at > stop:
                return 100
            if number == 0:
                total = sum(table) + (255 * sum(table[0::2]) if wide else 0)
                return 1 + min(range(100), key=lambda index: abs(_SUMS[index] - total))
    return 100


@dataclass(frozen=True, slots=True)
class JpegFrame:
    """What a JPEG's frame header declares. Only of the kinds that everybody decodes: see jpeg_frame."""

    width: int
    height: int
    components: int


def jpeg_frame(data: bytes) -> JpegFrame | None:
    """The frame of a JPEG with 8 bits a sample, Huffman-coded, baseline, extended or progressive; else None."""
    for marker, start, stop in _jpeg_segments(data):
        if marker in (0xC0, 0xC1, 0xC2) and stop - start >= 10:
            precision, components = data[start + 4], data[start + 9]
            height, width = (int.from_bytes(data[start + at : start + at + 2], "big") for at in (5, 7))
            is_plain = precision == 8 and width and height and stop - start == 10 + 3 * components
            return JpegFrame(width, height, components) if is_plain else None
        if marker == 0xDA:
            # Other kinds of frame are no needed part of a plain one, and a scan without any is none.
            return None
    return None


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(marker, start, stop) of each segment, a scan with its compressed data; ends where there is no whole one."""
    at = 2
    for _ in range(_MAX_JPEG_SEGMENTS):
        filled = _JPEG_FILL.match(data, at)
        if filled is None:
            return
        at = filled.end()
        if at + 4 > len(data) or not 0xC0 <= data[at + 1] <= 0xFE or 0xD0 <= data[at + 1] <= 0xD9:
            return
        stop = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if stop < at + 4 or stop > len(data):
            return
        if data[at + 1] == 0xDA:
            found = _JPEG_MARKER.search(data, stop)
            if found is None:
                return
            stop = found.start()
        yield data[at + 1], at, stop
        at = stop


# Any number of 0xff may stand before that of a marker (T.81 B.1.1.2).
_JPEG_FILL = re.compile(rb"\xff*(?=\xff)")
# Within compressed data 0xff is followed by 0, by the number of a restart, or by the 0xff of the marker itself.
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")


def keep_only_pixels(data: bytes, format: Format) -> bytes | None:
    """The same picture without anything else: no EXIF, XMP, comment, text or tail; None where that cannot be told.

    The picture itself is not touched, so what somebody hid within its compressed data stays there. Only
    such bytes may be handed out in place of a rendition.
    """
    match format:
        case "jpeg":
            return _jpeg_pixels(data)
        case "png":
            return _png_pixels(data)
        case "gif":
            return _gif_pixels(data)
        case "webp":
            return _webp_pixels(data)
        case "avif":
            return data if _is_bare_avif(data) else None
        case _:
            return None


# What a decoder needs of a baseline or progressive Huffman-coded picture: frame, tables, restart interval, scans.
_JPEG_NEEDED = frozenset({0xC0, 0xC1, 0xC2, 0xC4, 0xDA, 0xDB, 0xDD})


def _jpeg_pixels(data: bytes) -> bytes | None:
    """JFIF and Adobe say how the colours are coded, and have room for more: they are written anew."""
    jfif = adobe = b""
    kept, end = bytearray(), 2
    for marker, start, stop in _jpeg_segments(data):
        end = stop
        if marker in _JPEG_NEEDED:
            kept += data[start:stop]
        elif marker == 0xE0 and stop - start >= 18 and data[start + 4 : start + 9] == b"JFIF\0":
            # Version and density stay; the last two bytes are the size of a thumbnail, which does not.
            jfif = b"\xff\xe0\0\x10" + data[start + 4 : start + 16] + b"\0\0"
        elif marker == 0xEE and stop - start >= 16 and data[start + 4 : start + 9] == b"Adobe":
            # The transform is the one field of it that a decoder reads.
            adobe = b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0" + data[start + 15 : start + 16]
        elif marker != 0xFE and not 0xE0 <= marker <= 0xEF:
            return None
    return data[:2] + jfif + adobe + kept + b"\xff\xd9" if kept and data[end : end + 2] == b"\xff\xd9" else None


# Chunks that change what is seen, and the most bytes that each can need.
_PNG_NEEDED = {b"IHDR": 13, b"PLTE": 768, b"tRNS": 256, b"sRGB": 1, b"IEND": 0}


def _png_pixels(data: bytes) -> bytes | None:
    kept, at = bytearray(data[:8]), 8
    seen: set[bytes] = set()
    while at + 12 <= len(data):
        kind, length = data[at + 4 : at + 8], int.from_bytes(data[at : at + 4], "big")
        stop = at + 12 + length
        if kind in _PNG_NEEDED:
            # A second one, or more than there is to say, is not part of the picture.
            if length > _PNG_NEEDED[kind] or kind in seen:
                return None
            seen.add(kind)
        if kind in _PNG_NEEDED or kind == b"IDAT":
            kept += data[at:stop]
        if kind == b"IEND":
            return bytes(kept)
        at = stop
    return None


def _gif_pixels(data: bytes) -> bytes | None:
    at = 13 + _gif_palette_bytes(data[10:11])
    kept, control = bytearray(data[:at]), b""
    repeats = False
    while at < len(data):
        start, kind = at, data[at]
        if kind == 0x3B:
            return bytes(kept) + b"\x3b"
        if kind == 0x21:
            at += 2
        elif kind == 0x2C:
            at += 11 + _gif_palette_bytes(data[at + 9 : at + 10])
        else:
            return None
        while at < len(data) and data[at]:
            at += 1 + data[at]
        at += 1
        # A frame, its graphic control, and the extension that says how often to repeat.
        if kind == 0x2C:
            kept += control + data[start:at]
            control = b""
        elif data[start + 1 : start + 3] == b"\xf9\x04":
            if control or at - start != 8:
                # One a frame, of four bytes; what more of it means, decoders do not agree on.
                return None
            control = data[start:at]
        elif at - start == 19 and data[start + 1 : start + 14] == b"\xff\x0bNETSCAPE2.0" and not repeats:
            repeats = True
            kept += data[start:at]
    return None


def _gif_palette_bytes(flags: bytes) -> int:
    """The size of the colour table that these packed flags announce."""
    return 3 << ((flags[0] & 7) + 1) if flags and flags[0] & 0x80 else 0


def _webp_pixels(data: bytes) -> bytes | None:
    end, at = int.from_bytes(data[4:8], "little") + 8, 12
    kept, seen = bytearray(b"WEBP"), set[bytes]()
    while at + 8 <= end <= len(data):
        kind, length = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        stop = at + 8 + length + (length & 1)
        # Frames nest chunks of their own; not worth a second walker. A second picture is seen by nobody.
        if stop > end or kind in (b"ANIM", b"ANMF") or kind in seen:
            return None
        if kind == b"VP8X":
            if length != 10 or at != 12:
                return None
            # Of the flags (ICC, alpha, EXIF, XMP, animation) only alpha stays true; three reserved bytes follow.
            kept += data[at : at + 8] + bytes([data[at + 8] & 0x10, 0, 0, 0]) + data[at + 12 : stop]
        elif kind in (b"VP8 ", b"VP8L", b"ALPH"):
            seen |= {b"VP8 ", b"VP8L"} if kind != b"ALPH" else {kind}
            kept += data[at : at + 8 + length] + bytes(length & 1)
        at = stop
    return b"RIFF" + len(kept).to_bytes(4, "little") + bytes(kept) if at == end else None


# ISO/IEC 14496-12 8.11: items that carry something other than a picture, and what may not stand in `meta` beside them.
_AVIF_EXTRAS = (b"Exif", b"mime", b"uri ", b"xml ", b"bxml", b"uuid", b"free", b"skip", b"prof", b"rICC")


def _is_bare_avif(data: bytes) -> bool:
    """Whether an AVIF is three boxes, type, description and pictures, and the description names nothing else."""
    at, kinds = 0, list[bytes]()
    while at + 8 <= len(data) and len(kinds) < 4:
        size, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if size < 8 or at + size > len(data):
            return False
        if kind == b"meta" and any(extra in data[at : at + size] for extra in _AVIF_EXTRAS):
            return False
        kinds.append(kind)
        at += size
    return at == len(data) and kinds == [b"ftyp", b"meta", b"mdat"]


def is_srgb_profile(profile: bytes) -> bool:
    """Whether an ICC profile calls itself sRGB, so that nothing needs converting."""
    names = ("sRGB IEC61966", "sRGB built-in")
    return any(name.encode() in profile or name.encode("utf-16-be") in profile for name in names)
