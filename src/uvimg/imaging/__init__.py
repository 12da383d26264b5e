"""What parent and child say to each other about image work.

A frame is two 32-bit lengths (big-endian), a msgpack head of the first, bytes of the second. An original
travels as those bytes or, when it is a file, as a descriptor beside the frame (SCM_RIGHTS), so that
nobody copies it. The child answers every job with exactly one frame.
"""

import struct

import msgspec

from uvimg.core.formats import Format, OutputFormat
from uvimg.core.plan import Engine, Plan, Rules, Source, choose_engine

PREFIX = struct.Struct(">II")


class Limits(msgspec.Struct, frozen=True):
    """What a header may declare, checked before anything is decoded. Pixels count over all frames."""

    max_pixels: int = 75_000_000
    max_side: int = 16_384
    max_frames: int = 1_000
    max_progressive_pixels: int = 40_000_000


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """Read the facts, hold them against the limits, decode to the end. Answered by Inspected or Refused."""

    format: Format
    limits: Limits


class Render(msgspec.Struct, frozen=True, tag=True):
    """Carry out a plan, best made by `rendering`. Answered by Rendered and its bytes, or Refused.

    libvips does what the engine "jpeg" cannot; it finds the orientation (1..8) by itself.
    """

    format: Format
    plan: Plan
    engine: Engine = "libvips"
    orientation: int = 1


def rendering(plan: Plan, source: Source) -> Render:
    """The job that carries out a plan on an original, or on whatever else has these facts."""
    return Render(source.format, plan, choose_engine(plan, source), source.orientation)


class Learn(msgspec.Struct, frozen=True, tag=True):
    """Read the script of the types, the frame's bytes, once, before any RenderType. Answered by Learnt or Refused.

    `name` stands in its errors. What it prints above `level` (0 to 7, as in syslog) is left out.
    """

    name: str
    level: int
    rules: Rules


class RenderType(msgspec.Struct, frozen=True, tag=True):
    """Ask the script about a type and carry out what it says. Answered by Rendered and its bytes, or Refused.

    What would be slow is not carried out here, for nobody knew that when the lane was chosen: Planned answers then.
    """

    name: str
    source: Source


Job = Inspect | Render | Learn | RenderType


class Order(msgspec.Struct, frozen=True):
    """The head of a frame to the child. `file_size` is set when a descriptor comes with it, which is then that long."""

    job: Job
    file_size: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The child's first frame: what its libvips can do, and what confines it."""

    libvips: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    confined_by: tuple[str, ...]


class Printed(msgspec.Struct, frozen=True, array_like=True):
    """A line that a script had logged; `level` as in syslog."""

    level: int
    text: str


class Learnt(msgspec.Struct, frozen=True, tag=True):
    printed: tuple[Printed, ...] = ()


class Inspected(msgspec.Struct, frozen=True, tag=True):
    source: Source


class Rendered(msgspec.Struct, frozen=True, tag=True):
    """The frame's bytes are the rendition; with `as_original` there are none, the original is the rendition.

    `engine` is the one that made it in the end; `plan` is what a script wanted, and `lasts` whether that may be kept.
    """

    format: Format | OutputFormat
    width: int
    height: int
    as_original: bool = False
    engine: Engine = "libvips"
    plan: Plan | None = None
    lasts: bool = True
    printed: tuple[Printed, ...] = ()


class Planned(msgspec.Struct, frozen=True, tag=True):
    """What a script wants, as in Rendered, and has yet to be done."""

    plan: Plan
    lasts: bool
    printed: tuple[Printed, ...] = ()


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The image cannot be worked on: `kind` chooses our error, `detail` is fit for the public but for "script"."""

    kind: str
    detail: str
    printed: tuple[Printed, ...] = ()


Reply = Ready | Learnt | Inspected | Rendered | Planned | Refused


def encode_frame(head: msgspec.Struct, size: int) -> bytes:
    """A frame's prefix and head; `size` bytes are to follow."""
    data = msgspec.msgpack.encode(head)
    return PREFIX.pack(len(data), size) + data
