"""The child that works on images: one job at a time, over the socket it was born with.

Alone imports pyvips. It decides nothing: a plan says what to do, and whatever goes wrong is an answer or
the end of this process, which the parent notices and replaces.
"""

import contextlib
import functools
import math
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from typing import Any, TypeAlias

import msgspec

# Landlock leaves libvips no place for its temporary files, so large images stay in (limited) memory.
os.environ["VIPS_DISC_THRESHOLD"] = "100g"

import pyvips

from uvimg.core.cost import choose_lane
from uvimg.core.errors import BadParameter
from uvimg.core.formats import FORMATS, OUTPUT_FORMATS, Format, is_srgb_profile, jpeg_quality, keep_only_pixels
from uvimg.core.plan import Crop, Encode, Flatten, Gray, Load, Plan, Rotate, Scale, Source, Step, choose_divisor
from uvimg.imaging import (
    PREFIX,
    Inspect,
    Inspected,
    Job,
    Learn,
    Learnt,
    Limits,
    Order,
    Planned,
    Ready,
    Refused,
    Render,
    Rendered,
    RenderType,
    Reply,
    encode_frame,
    jpeg,
    rendering,
)
from uvimg.imaging.confine import confine, die_with_parent, limit

# Below this a picture is no longer worth its bytes.
_LEAST_QUALITY = 10
_OTHERS = (Encode("webp", 75, 2), Encode("webp", _LEAST_QUALITY, 2), Encode("png", 0, 9))

# pyvips has no types.
Image: TypeAlias = Any

_LOADERS: dict[Format, str] = {
    "jpeg": "VipsForeignLoadJpeg",
    "png": "VipsForeignLoadPng",
    "webp": "VipsForeignLoadWebp",
    "gif": "VipsForeignLoadNsgif",
    "avif": "VipsForeignLoadHeif",
    "tiff": "VipsForeignLoadTiff",
    "svg": "VipsForeignLoadSvg",
}


_jpeg = jpeg.Engine()


class Arguments(msgspec.Struct, frozen=True):
    """What the parent says on the command line. `sandbox` is "auto", "require" or "off"; `niceness` adds to its own.

    `scripted` announces a script, whose text would be too long for a command line.
    """

    socket_fd: int
    parent_pid: int
    memory_bytes: int
    sandbox: str
    allowed: tuple[str, ...]
    niceness: int = 0
    scripted: bool = False


def main() -> None:
    arguments = msgspec.json.decode(sys.argv[1].encode(), type=Arguments)
    die_with_parent(arguments.parent_pid)
    # Before there are threads, which have it from this one.
    os.nice(arguments.niceness)
    # Ctrl-C, a closed terminal and a service manager's signals reach the whole group; the parent says when work is
    # over.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # uvloop hands on whatever is not close-on-exec, LMDB's file for one: a cage is no use around that.
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd != arguments.socket_fd:
            with contextlib.suppress(OSError):
                os.close(fd)
    connection = socket.socket(fileno=arguments.socket_fd)
    _set_up_libvips(arguments.allowed)
    # Looking into a profile takes a codec that Python imports on first use, which it cannot once confined. libvips
    # in turn may only work once confined, for the threads that it starts then stay.
    is_srgb_profile(b"")
    _jpeg.try_out()
    scripting = _Scripting() if arguments.scripted else None
    in_force: tuple[str, ...] = ()
    limit(arguments.memory_bytes)
    if arguments.sandbox != "off":
        in_force = confine()
    reads, writes = _try_out(arguments.allowed)
    version = ".".join(str(pyvips.version(part)) for part in range(3))
    connection.sendall(encode_frame(Ready(version, reads, writes, in_force), 0))
    while (received := _receive(connection)) is not None:
        job, original = received
        with original:
            answer, body = _answer(job, original, scripting)
        _send(connection, encode_frame(answer, len(body)), body)


class Original:
    """The bytes of a job's image, in memory or in a file that somebody else holds too."""

    def __init__(self, data: bytes, fd: int | None, size: int) -> None:
        self.data, self.fd, self.size = data, fd, size

    def source(self) -> Any:
        """A new libvips source; each serves one load."""
        if self.fd is None:
            return pyvips.Source.new_from_memory(self.data)
        os.lseek(self.fd, 0, os.SEEK_SET)
        return pyvips.Source.new_from_descriptor(self.fd)

    def read(self, size: int) -> bytes:
        """The first `size` bytes."""
        return self.data[:size] if self.fd is None else os.pread(self.fd, size, 0)

    def __enter__(self) -> "Original":
        return self

    def __exit__(self, *_: object) -> None:
        if self.fd is not None:
            os.close(self.fd)


def _send(connection: socket.socket, frame: bytes, body: bytes) -> None:
    """In one call, so that the parent is woken once."""
    sent = connection.sendmsg((frame, body))
    if sent < len(frame) + len(body):
        # A stopped process sends less.
        connection.sendall(memoryview(frame + body)[sent:])


# Most orders arrive in one call, with their originals.
_buffer = memoryview(bytearray(1 << 17))
_DESCRIPTOR_BYTES = socket.CMSG_SPACE(4)


def _receive(connection: socket.socket) -> tuple[Job, Original] | None:
    """The next job, None when the parent has closed the socket."""
    received, ancillary, _, _ = connection.recvmsg_into((_buffer,), _DESCRIPTOR_BYTES)
    if not received:
        return None
    if received < PREFIX.size:
        received += _fill(connection, received, PREFIX.size)
    head_size, size = PREFIX.unpack_from(_buffer)
    begin = PREFIX.size + head_size
    if received < begin:
        received += _fill(connection, received, begin)
    order = _decode_order(_buffer[PREFIX.size : begin])
    data = bytes(_buffer[begin:received])
    if len(data) < size:
        data = b"".join((data, _receive_exactly(connection, size - len(data))))
    fd = int.from_bytes(ancillary[0][2][:4], sys.byteorder) if ancillary else None
    return order.job, Original(data, fd, size if fd is None else order.file_size)


_decode_order = msgspec.msgpack.Decoder(Order).decode


def _fill(connection: socket.socket, start: int, stop: int) -> int:
    """More of an order that came in pieces."""
    part = _receive_exactly(connection, stop - start)
    _buffer[start:stop] = part
    return len(part)


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    parts, missing = [], size
    while missing:
        # Nearly always one call. A stopped process gets less.
        part = connection.recv(missing, socket.MSG_WAITALL)
        if not part:
            raise SystemExit(0)
        parts.append(part)
        missing -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _answer(job: Job, original: Original, scripting: "_Scripting | None") -> tuple[Reply, bytes]:
    try:
        match job:
            case Inspect():
                return _inspect(job.format, original, job.limits), b""
            case Render():
                return _render(job, original)
            case Learn():
                assert scripting is not None
                return scripting.learn(job, original.read(original.size)), b""
            case RenderType():
                assert scripting is not None
                return scripting.render(job, original)
    except pyvips.Error as exc:
        # libvips' own words, and libjpeg's.
        if "out of memory" in str(exc) or "Insufficient memory" in str(exc):
            return _NO_MEMORY, b""
        return Refused("undecodable", _first_line(exc)), b""
    except MemoryError:
        return _NO_MEMORY, b""
    except Exception:
        # Our own bug: the log says where, the parent answers 500, and this process starts anew.
        traceback.print_exc()
        raise SystemExit(1) from None


class _Scripting:
    """The script of the types. Made before this process is confined, for it is then that lupa can be imported."""

    def __init__(self) -> None:
        # Only where there is a script: it takes memory, and a moment.
        from uvimg.imaging import scripts

        self._scripts = scripts
        self._script: scripts.Script | None = None

    def learn(self, job: Learn, text: bytes) -> Learnt | Refused:
        try:
            self._script = self._scripts.Script(job.name, text, job.level, job.rules)
        except self._scripts.ScriptError as exc:
            return Refused("script", str(exc))
        return Learnt(self._script.printed)

    def render(self, job: RenderType, original: Original) -> tuple[Reply, bytes]:
        """Carry out what the script says, like any other plan, unless that is slow."""
        assert self._script is not None
        run = self._script.ask(job.name, job.source)
        # zimg's own sample says that it failed, goes on, and fails.
        if run.error and run.code != -1:
            return Refused("script", run.error, run.printed), b""
        if run.code is None or run.code < 0:
            return Refused("type", "There is no such type of this image.", run.printed), b""
        try:
            plan = run.recording.plan()
        except BadParameter as exc:
            return Refused("limits", exc.detail, run.printed), b""
        lasts = run.code > 0
        order = rendering(plan, job.source)
        if choose_lane(plan, job.source, order.engine) == "slow":
            return Planned(plan, lasts, run.printed), b""
        rendered, body = _render(order, original)
        return msgspec.structs.replace(rendered, plan=plan, lasts=lasts, printed=run.printed), body


_NO_MEMORY = Refused("memory", "The image needs more memory than a worker has.")


def _first_line(exc: pyvips.Error) -> str:
    """What the decoder said, without libvips' own 'unable to call'. It names functions and pixels, no paths."""
    lines = [line.strip() for line in str(exc).splitlines()[1:] if line.strip()]
    return (lines or ["the decoder gave no reason"])[0][:200]


def _set_up_libvips(allowed: tuple[str, ...]) -> None:
    pyvips.cache_set_max(0)
    # One job has one core: the other cores have workers of their own.
    pyvips.concurrency_set(1)
    # First all that is not trusted, then every loader: what follows lifts the block, of whichever kind, again.
    pyvips.block_untrusted_set(True)
    pyvips.operation_block_set("VipsForeignLoad", True)
    for format in FORMATS:
        if format in allowed:
            pyvips.operation_block_set(_LOADERS[format], False)


def _try_out(allowed: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Which formats this libvips reads and writes, found by doing it.

    Called when confined, for that is how it will be done; what cannot be loaded then is no part of the answer.
    """
    writes = []
    image = pyvips.Image.black(16, 16, bands=3).copy(interpretation="srgb")
    samples: dict[str, bytes] = {"svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"/>'}
    for format in OUTPUT_FORMATS:
        with contextlib.suppress(pyvips.Error):
            samples[format] = _write(image, Encode(format, 75, 1 if format != "avif" else 0))
            writes.append(format)
    with contextlib.suppress(pyvips.Error):
        samples["tiff"] = image.tiffsave_buffer()
    reads = [name for name in FORMATS if name in allowed and name in samples and _can_read(name, samples[name])]
    return tuple(reads), tuple(writes)


def _can_read(format: Format, sample: bytes) -> bool:
    original = Original(sample, None, len(sample))
    try:
        if isinstance(_inspect(format, original, Limits()), Refused):
            return False
        for frame in _load(Load(8, 8, 1, managed=True, gray=False), original):
            frame.avg()
    except pyvips.Error:
        return False
    keep_only_pixels(sample, format)
    return True


def _inspect(format: Format, original: Original, limits: Limits) -> Inspected | Refused:
    """The facts from the header, held against the limits; only then is anything decoded."""
    # Not yet all frames: counting what a GIF declares is cheap, laying them out is not.
    image = pyvips.Image.new_from_source(original.source(), "", access="sequential")
    fields = set(image.get_fields())
    width, height = image.width, image.get("page-height") if "page-height" in fields else image.height
    frames = image.get("n-pages") if format in ("gif", "webp") and "n-pages" in fields else 1
    progressive = "interlaced" in fields or ("jpeg-multiscan" in fields and image.get("jpeg-multiscan") == 1)
    if refused := _check_limits(width, height, frames, progressive, limits):
        return refused
    if not image.get("vips-loader").startswith("heifload" if format == "avif" else f"{format}load"):
        return Refused("undecodable", f"it is no {format}")
    colours = _CHANNELS.get(image.interpretation, 3)
    if image.bands not in (colours, colours + 1):
        return Refused("undecodable", f"it has {image.bands} channels")
    # A lossy header is no proof: decode all of it, strictly. JPEG at an eighth still reads every byte, but
    # libvips leaves nothing of a side that is shorter than the divisor.
    shrink = next(divisor for divisor in (8, 4, 2, 1) if divisor <= min(width, height))
    options = {"shrink": shrink} if format == "jpeg" else {"n": -1} if frames > 1 else {}
    pyvips.Image.new_from_source(original.source(), "", access="sequential", fail_on="error", **options).avg()
    if format == "gif" and not _is_whole_gif(original.read(original.size)):
        return Refused("undecodable", "it ends in the middle of a frame")
    icc = image.get("icc-profile-data") if "icc-profile-data" in fields else b""
    gray = image.interpretation in ("b-w", "grey16") and image.bands <= 2
    plain = (gray or image.interpretation == "srgb") and image.format == "uchar" and (not icc or is_srgb_profile(icc))
    # The container of HEIF and AVIF has turned the picture already; its EXIF value is a leftover.
    turned = image.get("orientation") if "orientation" in fields and format != "avif" else 1
    return Inspected(
        Source(
            format,
            width,
            height,
            frames,
            turned if 1 <= turned <= 8 else 1,
            # Quantization tables stand before the picture, behind at most a few segments of metadata.
            jpeg_quality(original.read(1 << 20)) if format == "jpeg" else 100,
            bool(image.hasalpha()),
            gray,
            not plain,
            progressive,
        )
    )


def _is_whole_gif(data: bytes) -> bool:
    """Whether a GIF goes on to its end. libvips leaves out a frame that is cut off, strict or not.

    Only the trailer may be missing, as it is in some files that are otherwise all there.
    """
    return data.endswith(b";") or keep_only_pixels(data + b";", "gif") is not None


# Without alpha; all the others have three.
_CHANNELS = {"b-w": 1, "grey16": 1, "cmyk": 4}


def _check_limits(width: int, height: int, frames: int, progressive: bool, limits: Limits) -> Refused | None:
    size = f"{width} × {height} pixels" + (f" in {frames} frames" if frames > 1 else "")
    if max(width, height) > limits.max_side:
        return Refused("limits", f"The image declares {size}; allowed are {limits.max_side} a side.")
    if frames > limits.max_frames:
        return Refused("limits", f"The image declares {size}; allowed are {limits.max_frames} frames.")
    if width * height * frames > limits.max_pixels:
        return Refused("limits", f"The image declares {size}; allowed are {limits.max_pixels} pixels in all.")
    if progressive and width * height > limits.max_progressive_pixels:
        allowed = f"allowed are {limits.max_progressive_pixels} pixels when progressive or interlaced"
        return Refused("limits", f"The image declares {size}; {allowed}.")
    return None


def _render(job: Render, original: Original) -> tuple[Rendered, bytes]:
    if job.engine == "jpeg":
        with contextlib.suppress(jpeg.Unsuited):
            return _render_by_jpeg(job, original)
    return _render_by_libvips(job.format, job.plan, original)


def _render_by_jpeg(job: Render, original: Original) -> tuple[Rendered, bytes]:
    encode = job.plan.steps[-1]
    assert isinstance(encode, Encode)
    drawn = _jpeg.draw(job.plan, job.orientation, original.data, original.fd)
    rendered = Rendered(encode.format, drawn.width, drawn.height, engine="jpeg")
    if drawn.is_jpeg:
        return rendered, drawn.data
    image = pyvips.Image.new_from_memory(drawn.data, drawn.width, drawn.height, drawn.channels, "uchar")
    return rendered, _write(image.copy(interpretation="srgb" if drawn.channels == 3 else "b-w"), encode)


def _render_by_libvips(format: Format, plan: Plan, original: Original) -> tuple[Rendered, bytes]:
    load, *rest, encode = plan.steps
    assert isinstance(load, Load)
    assert isinstance(encode, Encode)
    frames = list(_load(load, original))
    for step in rest:
        frames = [_execute(step, frame) for frame in frames]
    image = frames[0] if len(frames) == 1 else _join(frames)
    width, height = frames[0].width, frames[0].height
    if not encode.max_bytes:
        return Rendered(encode.format, width, height), _write(image, encode)
    image = image.copy_memory()
    body = _write(image, encode)
    if len(body) > encode.max_bytes and encode.or_original:
        data = original.read(original.size)
        kept = keep_only_pixels(data, format)
        if kept is not None:
            as_original = kept == data
            return Rendered(format, width, height, as_original), b"" if as_original else kept
    while len(body) > encode.max_bytes and encode.quality > _LEAST_QUALITY:
        encode = msgspec.structs.replace(encode, quality=max(_LEAST_QUALITY, encode.quality - 15))
        body = _write(image, encode)
    if len(body) > encode.max_bytes:
        # What no quality makes small enough (a flat TIFF, say) another format that every browser shows may.
        for other in _OTHERS:
            with contextlib.suppress(pyvips.Error):
                written = _write(image, other)
                if len(written) < len(body):
                    encode, body = other, written
    return Rendered(encode.format, width, height), body


def _load(load: Load, original: Original) -> Iterator[Image]:
    """The frames, upright, 8 bits a channel, in sRGB or gray, at the plan's size."""
    colours = {"output_profile": "srgb"} if load.managed else {}
    if load.frames == 1:
        # thumbnail also turns upright, converts colours and premultiplies alpha, so it serves at any size.
        options = {"height": load.height, "size": "force", **colours}
        if load.fast:
            # At its own size thumbnail_image leaves the pixels alone; it turns upright and converts colours.
            image = _load_small(load, original).thumbnail_image(load.width, **options)
        else:
            image = pyvips.Image.thumbnail_source(original.source(), load.width, **options)
        yield _to_8_bit(image, load.gray)
        return
    strip = pyvips.Image.new_from_source(original.source(), "", n=load.frames)
    height = strip.get("page-height")
    for index in range(strip.height // height):
        # Frame by frame: scaled as one strip, neighbours would bleed into each other's edges.
        frame = strip.crop(0, index * height, strip.width, height)
        frame.set_type(pyvips.GValue.gint_type, "page-height", height)
        frame = frame.thumbnail_image(load.width, height=load.height, size="force", **colours)
        yield _to_8_bit(frame, load.gray)


def _load_small(load: Load, original: Original) -> Image:
    """A JPEG at the part of its size that a plan in haste says; thumbnail would keep a factor of two."""
    image = pyvips.Image.new_from_source(original.source(), "", access="sequential")
    upright = image.autorot()
    divisor = choose_divisor((upright.width, upright.height), (load.width, load.height), fast=True)
    return pyvips.Image.new_from_source(original.source(), "", access="sequential", shrink=divisor)


def _to_8_bit(image: Image, gray: bool) -> Image:
    wanted = "b-w" if gray else "srgb"
    if image.interpretation != wanted or image.format != "uchar":
        image = image.colourspace(wanted)
    return image


def _execute(step: Step, image: Image) -> Image:
    match step:
        case Scale():
            return _scale(step, image)
        case Crop():
            return image.crop(step.left, step.top, step.width, step.height)
        case Gray():
            return _gray(image)
        case Flatten():
            return image.flatten(background=_colour(step.background, image)) if image.hasalpha() else image
        case Rotate():
            return _rotate(step, image)
        case _:
            raise AssertionError(f"not a step in the middle of a plan: {step}")


# ITU-R BT.601, on the values as they are stored: by these a JPEG keeps its luminance, so both engines agree.
_LUMA = (0.299, 0.587, 0.114)


def _gray(image: Image) -> Image:
    if image.bands < 3:
        return image
    colours = image.extract_band(0, n=3) if image.bands > 3 else image
    # To whole numbers by cutting off, hence the half.
    luma = colours.recomb(_luma_matrix()).linear(1, 0.5, uchar=True)
    if image.bands > 3:
        luma = luma.bandjoin(image.extract_band(3))
    return luma.copy(interpretation="b-w")


@functools.cache
def _luma_matrix() -> Image:
    return pyvips.Image.new_from_array([list(_LUMA)])


def _scale(step: Scale, image: Image) -> Image:
    """As Load scales, alpha premultiplied. What a frame of an animation says of its strip is put right on the way."""
    image = _as_one_page(image)
    return _as_one_page(image.thumbnail_image(step.width, height=step.height, size="force", no_rotate=True))


def _as_one_page(image: Image) -> Image:
    if "page-height" in image.get_fields():
        image = image.copy()
        image.set_type(pyvips.GValue.gint_type, "page-height", image.height)
    return image


def _rotate(step: Rotate, image: Image) -> Image:
    if step.degrees % 90 == 0:
        # A turn needs lines in another order than a sequential load gives them.
        return image.copy_memory().rot(f"d{step.degrees}")
    image = image.copy_memory()
    background = _colour(step.background, image)
    if image.hasalpha():
        background = [*background, 255]
    cosine, sine = _direction(step.degrees)
    centre_x, centre_y = (image.width - 1) / 2, (image.height - 1) / 2
    left, top = (step.width - 1) / 2, (step.height - 1) / 2
    return image.affine(
        [cosine, -sine, sine, cosine],
        interpolate=pyvips.Interpolate.new("bicubic"),
        # Output pixel (0, 0) is the canvas' corner, with the picture's centre in the middle.
        idx=-centre_x,
        idy=-centre_y,
        odx=left,
        ody=top,
        oarea=[0, 0, step.width, step.height],
        background=background,
        extend="background",
    )


def _direction(degrees: int) -> tuple[float, float]:
    return math.cos(math.radians(degrees)), math.sin(math.radians(degrees))


def _colour(background: tuple[int, int, int], image: Image) -> list[float]:
    """A colour for this image's channels; gray takes its luma."""
    if image.bands >= 3:
        return [float(value) for value in background]
    return [sum(weight * value for weight, value in zip(_LUMA, background, strict=True))]


def _join(frames: list[Image]) -> Image:
    """Frames as the tall strip that libvips' savers take."""
    strip = pyvips.Image.arrayjoin(frames, across=1).copy()
    strip.set_type(pyvips.GValue.gint_type, "page-height", frames[0].height)
    strip.set_type(pyvips.GValue.gint_type, "n-pages", len(frames))
    if "delay" in strip.get_fields():
        strip.set_type(pyvips.GValue.array_int_type, "delay", strip.get("delay")[: len(frames)])
    return strip


def _write(image: Image, encode: Encode) -> bytes:
    """The bytes of a rendition. No metadata comes along."""
    match encode.format:
        case "jpeg":
            # libvips leaves the second out where its libjpeg is not MozJPEG's.
            slow = {"trellis_quant": True, "overshoot_deringing": True} if encode.effort else {}
            written = image.jpegsave_buffer(Q=encode.quality, optimize_coding=True, keep="none", **slow)
        case "png":
            written = image.pngsave_buffer(compression=encode.effort, keep="none")
        case "webp":
            written = image.webpsave_buffer(Q=encode.quality, effort=encode.effort, keep="none")
        case "gif":
            written = image.gifsave_buffer(effort=encode.effort, keep="none")
        case "avif":
            written = image.heifsave_buffer(
                Q=encode.quality, effort=encode.effort, compression="av1", bitdepth=8, keep="none"
            )
    return bytes(written)


if __name__ == "__main__":
    main()
