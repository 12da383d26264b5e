"""The engine "jpeg": JPEG in, JPEG or WebP out, several times as fast as the general pipeline.

libjpeg decodes at a half, a quarter or an eighth of the size, and only the luminance where gray is wanted;
a SIMD Lanczos brings what is cropped, and no more, to its size; the result is turned upright, when it is small.
WebP is then written by libvips. What takes libvips so long with small pictures is building a pipeline of ten
operations (a quarter), decoding by lines in another thread, and writing (a fifth); none of it grows with the result.
Rule: whatever this engine does not expect is Unsuited, and libvips, which knows every oddity, does it instead.
Surprise: Pillow decodes and encodes, but its own reader of headers is not used. It looks through a photograph's
EXIF in Python, which takes longer than decoding a small picture.
"""

import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from cykooz_resizer.rust_lib import PilImageWrapper, RustResizeOptions, RustResizer
from PIL import Image, ImageFile

from uvimg.core.formats import JpegFrame, jpeg_frame
from uvimg.core.plan import JPEG_MAX_DECODED_BYTES, Crop, Encode, Gray, Load, Plan, Rotate, Step, choose_divisor

# Where a frame header stands when there is little before it, and when there is a camera's EXIF and a profile.
_HEAD_BYTES = (1 << 16, 1 << 20)
# Read at a time from a file; from memory all at once.
_BLOCK_BYTES = 1 << 17
# Where Huffman codes are made to measure libjpeg cannot wait for room, so there is some for all that it writes. Noise
# of black and white at the highest quality takes 1.6 bytes a value; Pillow by itself leaves 0.3 to 2.
_MOST_BYTES_A_VALUE = 2
# From here on our libvips encoder keeps the colours at full resolution too.
_LEAST_QUALITY_444 = 90
# A JPEG's own luminance is not to the bit what its colours, once rounded and cut off at black and white, make in gray.
# Scaling evens that out. Above these qualities, of what the decoder scales and of what it does not, it is more than the
# encoder loses, and of what is not scaled at all it always is: then gray is made of the colours.
_MOST_QUALITY_OF_LUMA, _OF_LUMA_UNSCALED = 90, 75

# Convolution, Lanczos with three lobes; the third number counts for another algorithm only.
_LANCZOS = RustResizeOptions().set_resize_alg(2, 5, 2).set_use_alpha(False)

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Pillow counts against the clock.
_TURNS = {90: Image.Transpose.ROTATE_270, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_90}


class Unsuited(Exception):
    """This engine cannot do it, or not as well as libvips."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A picture of 1 or 3 channels, as JPEG or as its pixels, one byte a channel, row by row."""

    width: int
    height: int
    channels: int
    data: bytes
    is_jpeg: bool


class _Jpeg(ImageFile.ImageFile):
    """A JPEG of which everything is known but its pixels; Pillow's way to have a decoder of its own used."""

    def __init__(self, file: IO[bytes], frame: JpegFrame, mode: str, divisor: int) -> None:
        self._frame, self._wanted, self._divisor = frame, mode, divisor
        super().__init__(file)

    def _open(self) -> None:
        # libjpeg rounds up.
        self._size = -(-self._frame.width // self._divisor), -(-self._frame.height // self._divisor)
        self._mode = self._wanted
        self.tile = [ImageFile._Tile("jpeg", (0, 0, *self._size), 0, (self._wanted, ""))]
        self.decoderconfig = (self._divisor, 0)


class Engine:
    """What is kept from one picture to the next."""

    def __init__(self) -> None:
        self._resizer = RustResizer()

    def try_out(self) -> None:
        """Use everything once: what Python imports on first use, it cannot once the process is confined."""
        sample = _write(Image.new("RGB", (16, 16)), 75)
        plan = Plan((Load(4, 4, 1, managed=False, gray=False), Gray(), Encode("jpeg", 75, 0)))
        self.draw(plan, 6, sample, None)

    def draw(self, plan: Plan, orientation: int, data: bytes, fd: int | None) -> "Drawn":
        """What a plan makes of `data` or, when there is one, of the file `fd`. Unsuited when libvips should do it."""
        load, *rest, encode = plan.steps
        assert isinstance(load, Load)
        assert isinstance(encode, Encode)
        gray = any(isinstance(step, Gray) for step in rest)
        try:
            image = self._load(load, rest, encode.quality if gray else None, orientation, data, fd)
            if orientation in _UPRIGHT:
                image = image.transpose(_UPRIGHT[orientation])
            for step in rest:
                if isinstance(step, Rotate):
                    image = image.transpose(_TURNS[step.degrees])
            if gray and image.mode != "L":
                image = image.convert("L")
            width, height = image.size
            if encode.format == "jpeg":
                return Drawn(width, height, len(image.mode), _write(image, encode.quality), is_jpeg=True)
            return Drawn(width, height, len(image.mode), image.tobytes(), is_jpeg=False)
        except (OSError, ValueError, RuntimeError, MemoryError) as exc:
            # Pillow's and the resizer's own words for what is damaged or too much; a traceback would help nobody.
            raise Unsuited(str(exc)) from exc

    def _load(
        self, load: Load, rest: Sequence[Step], gray_at: int | None, orientation: int, data: bytes, fd: int | None
    ) -> Image.Image:
        """What the plan scales and crops, as it is stored: not yet turned upright, and perhaps not yet gray.

        `gray_at` is the quality at which gray will be written, None for colours.
        """
        frame = _find_frame(data, fd)
        if frame.components != (1 if load.gray else 3):
            raise Unsuited("its channels are not those that were found at upload")
        # All in the stored picture's own directions.
        turned = orientation >= 5
        scaled = (load.height, load.width) if turned else (load.width, load.height)
        crop = next((step for step in rest if isinstance(step, Crop)), Crop(0, 0, load.width, load.height))
        left, top, width, height = _as_stored(crop, load, orientation)
        divisor = choose_divisor((frame.width, frame.height), scaled, fast=load.fast)
        is_scaled = scaled != (frame.width, frame.height)
        most = _MOST_QUALITY_OF_LUMA if divisor > 1 else _OF_LUMA_UNSCALED if is_scaled else 0
        luma = gray_at is not None and gray_at <= most
        mode = "L" if frame.components == 1 or luma else "RGB"
        columns, rows = -(-frame.width // divisor), -(-frame.height // divisor)
        if columns * rows * (1 if mode == "L" else 4) > JPEG_MAX_DECODED_BYTES:
            raise Unsuited("it is too large to be held in memory")
        decoded = _decode(data, fd, frame, mode, divisor)
        if not is_scaled:
            return decoded.crop((left, top, left + width, top + height))
        # Sides of the decoded picture in its own, broken pixels: the last column and row may be only partly real.
        across, down = frame.width / divisor / scaled[0], frame.height / divisor / scaled[1]
        box = left * across, top * down, width * across, height * down
        result = Image.new(mode, (width, height))
        self._resizer.resize_pil(
            PilImageWrapper(decoded), PilImageWrapper(result), _LANCZOS.set_crop_box(*_within(box, columns, rows))
        )
        return result


def _decode(data: bytes, fd: int | None, frame: JpegFrame, mode: str, divisor: int) -> Image.Image:
    if fd is None:
        decoded = _Jpeg(io.BytesIO(data), frame, mode, divisor)
        decoded.decodermaxblock = len(data)
        decoded.load()
        return decoded
    with open(fd, "rb", buffering=0, closefd=False) as file:
        decoded = _Jpeg(file, frame, mode, divisor)
        decoded.decodermaxblock = _BLOCK_BYTES
        decoded.load()
    return decoded


def _find_frame(data: bytes, fd: int | None) -> JpegFrame:
    for size in _HEAD_BYTES:
        frame = jpeg_frame(data if fd is None else os.pread(fd, size, 0))
        if frame is not None:
            return frame
        if fd is None:
            break
    raise Unsuited("it has no frame header where one is looked for")


def _as_stored(crop: Crop, load: Load, orientation: int) -> tuple[int, int, int, int]:
    """Left, top, width and height of a crop of the upright picture in the one that is not yet turned upright."""
    right, low = load.width - crop.left - crop.width, load.height - crop.top - crop.height
    left = {1: crop.left, 2: right, 3: right, 4: crop.left, 5: crop.top, 6: crop.top, 7: low, 8: low}[orientation]
    top = {1: crop.top, 2: crop.top, 3: low, 4: low, 5: crop.left, 6: right, 7: right, 8: crop.left}[orientation]
    return (left, top, crop.height, crop.width) if orientation >= 5 else (left, top, crop.width, crop.height)


def _within(box: tuple[float, float, float, float], columns: int, rows: int) -> tuple[float, float, float, float]:
    """Left, top, width and height that rounding has not carried over an edge."""
    left, top, width, height = box
    left, top = min(left, math.nextafter(columns, 0)), min(top, math.nextafter(rows, 0))
    return left, top, min(width, columns - left), min(height, rows - top)


def _write(image: Image.Image, quality: int) -> bytes:
    """As our libvips encoder does it: the IJG tables, Huffman codes made to measure, nothing but the picture."""
    file = io.BytesIO()
    subsampling = 0 if quality >= _LEAST_QUALITY_444 or image.mode == "L" else 2
    usual = ImageFile.MAXBLOCK
    # Pillow has no other place where it can be said.
    ImageFile.MAXBLOCK = max(usual, _MOST_BYTES_A_VALUE * image.width * image.height * len(image.mode))
    try:
        image.save(file, "JPEG", quality=quality, optimize=True, subsampling=subsampling)
    finally:
        ImageFile.MAXBLOCK = usual
    return file.getvalue()
