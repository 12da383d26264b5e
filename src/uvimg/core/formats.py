"""What is known of the image formats: names, media types, and what their bytes give away.

The allow-list by magic bytes stands before libvips, whose own search would try a text file as a matrix.
The walkers below read hostile bytes: they only ever step forward, so they end, and they raise nothing.
"""

import re
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


def recognise(head: bytes) -> Format | None:
    """The format that a file's first HEAD_BYTES bytes announce, None when it is none of ours."""
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
    if re.match(rb"\s*(?:\xef\xbb\xbf)?\s*(?:<\?xml|<!--|<!DOCTYPE svg|<svg)", head) and b"<svg" in head:
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


def jpeg_quality(data: bytes) -> int:
    """The IJG quality 1..100 whose luminance table is nearest to this JPEG's; 100 when it cannot be told."""
    for marker, start, stop in _jpeg_segments(data):
        if marker == 0xDB and stop - start >= 65 and data[start] & 0x0F == 0:
            wide = data[start] >> 4
            table = data[start + 1 : start + 1 + 64 * (1 + wide)]
            total = sum(table) if not wide else sum(table[1::2]) + 256 * sum(table[0::2])
            return 1 + min(range(100), key=lambda index: abs(_SUMS[index] - total))
    return 100


def keep_only_pixels(data: bytes, format: Format) -> bytes | None:
    """The same picture without anything else: no EXIF, XMP, comment, text or tail; None where that cannot be told.

    The picture itself is not touched. Only such bytes may be handed out in place of a rendition.
    """
    match format:
        case "jpeg":
            parts = _jpeg_pixels(data)
        case "png":
            parts = _png_pixels(data)
        case "gif":
            parts = _gif_pixels(data)
        case "webp":
            return _webp_pixels(data)
        case _:
            return None
    return None if parts is None else b"".join(parts)


def _jpeg_segments(data: bytes) -> list[tuple[int, int, int]]:
    """The marker segments before the first scan, and that scan's: (marker, start, stop) of each payload."""
    segments: list[tuple[int, int, int]] = []
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if length < 2:
            break
        segments.append((marker, at + 4, min(at + 2 + length, len(data))))
        if marker == 0xDA:
            break
        at += 2 + length
    return segments


# Tables, frames, scans, restart interval, JFIF and Adobe's transform flag: what a decoder needs.
_JPEG_NEEDED = frozenset({0xC0, 0xC1, 0xC2, 0xC4, 0xDA, 0xDB, 0xDD, 0xE0, 0xEE})
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")


def _jpeg_pixels(data: bytes) -> list[bytes] | None:
    parts, at = [data[:2]], 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker, stop = data[at + 1], at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if stop < at + 4 or stop > len(data):
            return None
        # JFIF and Adobe segments have room for more behind their fixed fields.
        if marker in _JPEG_NEEDED and (marker, stop - at > 18) != (0xE0, True):
            if marker == 0xEE and stop - at != 16:
                return None
            if marker == 0xDA:
                found = _JPEG_MARKER.search(data, stop)
                if found is None:
                    return None
                stop = found.start()
            parts.append(data[at:stop])
        at = stop
        if data[at : at + 2] == b"\xff\xd9":
            return [*parts, b"\xff\xd9"]
    return None


def _png_pixels(data: bytes) -> list[bytes] | None:
    parts, at = [data[:8]], 8
    while at + 12 <= len(data):
        kind, stop = data[at + 4 : at + 8], at + 12 + int.from_bytes(data[at : at + 4], "big")
        if kind in (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND", b"sRGB"):
            parts.append(data[at:stop])
        if kind == b"IEND":
            return parts if stop == at + 12 else None
        at = stop
    return None


_GIF_LOOP_BYTES = 19


def _gif_pixels(data: bytes) -> list[bytes] | None:
    at = 13 + _gif_palette_bytes(data[10:11])
    parts = [data[:at]]
    while at < len(data):
        start, kind = at, data[at]
        if kind == 0x3B:
            return [*parts, b"\x3b"]
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
        control = data[start + 1 : start + 3] == b"\xf9\x04"
        loop = data[start + 1 : start + 14] == b"\xff\x0bNETSCAPE2.0" and at - start == _GIF_LOOP_BYTES
        if kind == 0x2C or control or loop:
            parts.append(data[start:at])
    return None


def _gif_palette_bytes(flags: bytes) -> int:
    """The size of the colour table that these packed flags announce."""
    return 3 << ((flags[0] & 7) + 1) if flags and flags[0] & 0x80 else 0


def _webp_pixels(data: bytes) -> bytes | None:
    end, at, parts = int.from_bytes(data[4:8], "little") + 8, 12, [b"WEBP"]
    while at + 8 <= end <= len(data):
        kind, length = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        stop = at + 8 + length + (length & 1)
        if stop > end or kind in (b"ANIM", b"ANMF"):
            # Frames nest chunks of their own; not worth a second walker.
            return None
        if kind == b"VP8X" and length == 10:
            # Flags: of ICC, alpha, EXIF, XMP and animation only alpha stays true.
            parts.append(data[at : at + 8] + bytes([data[at + 8] & 0x10]) + data[at + 9 : stop])
        elif kind in (b"VP8 ", b"VP8L", b"ALPH"):
            parts.append(data[at:stop])
        at = stop
    body = b"".join(parts)
    return b"RIFF" + len(body).to_bytes(4, "little") + body if at == end else None


def is_srgb_profile(profile: bytes) -> bool:
    """Whether an ICC profile calls itself sRGB, so that nothing needs converting."""
    names = ("sRGB IEC61966", "sRGB built-in")
    return any(name.encode() in profile or name.encode("utf-16-be") in profile for name in names)
