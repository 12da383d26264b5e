"""The parameters of an image: w, h, p, g, x, y, r, q, f. One set of rules for queries and for types' tables.

Values come as text, for that is what a query has; BadParameter names the first that cannot be.
"""

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from uvimg.core.errors import BadParameter
from uvimg.core.formats import OUTPUT_FORMATS, OutputFormat, parse_output_format

PARAMETERS = ("w", "h", "p", "g", "x", "y", "r", "q", "f")


# Made for every new URL, and a frozen dataclass takes ten times as long to make.
class Params(msgspec.Struct, frozen=True):
    """What is wanted of an image, as zimg names it; see the table of parameters in the README.

    w and h are 0, x and y are -1, q is 0 and f is "" where they are not given. `bare` is the image
    asked for with no parameter at all.
    """

    w: int = 0
    h: int = 0
    p: int = 1
    g: int = 0
    x: int = -1
    y: int = -1
    r: int = 0
    q: int = 0
    f: OutputFormat | Literal["", "none"] = ""

    @property
    def bare(self) -> bool:
        return self == _BARE

    @property
    def original(self) -> bool:
        """p=0 with neither w nor h is the original, byte for byte, whatever else is given."""
        return self.p == 0 and not self.w and not self.h


_BARE = Params()


# Nine digits: more than any limit allows, and too few to compute anything huge with.
_INTEGER = re.compile(r"-?\d{1,9}", re.ASCII)


def read_params(fields: Mapping[str, str], extension: str | None) -> Params:
    """The parameters of an image. Unknown ones are ignored and make no rendition of their own.

    `extension` is that of the path, which may say the format.
    """
    if not fields and extension is None:
        return _BARE
    return Params(
        w=_integer(fields, "w", 0, 0, None),
        h=_integer(fields, "h", 0, 0, None),
        p=_integer(fields, "p", 1, 0, 4),
        g=_integer(fields, "g", 0, 0, 1),
        x=_integer(fields, "x", -1, None, None),
        y=_integer(fields, "y", -1, None, None),
        r=_integer(fields, "r", 0, None, None) % 360,
        q=_integer(fields, "q", 0, 1, 100),
        f=_format(fields, extension),
    )


def _integer(fields: Mapping[str, str], name: str, default: int, low: int | None, high: int | None) -> int:
    text = fields.get(name)
    if text is None:
        return default
    value = int(text) if _INTEGER.fullmatch(text) else None
    if value is None or (low is not None and value < low) or (high is not None and value > high):
        least = "" if low is None else f" from {low} up,"
        allowed = f"{least} of at most nine digits" if high is None else f" from {low} to {high}"
        raise BadParameter(name, f"{name} must be a whole number{allowed}.")
    return value


def _format(fields: Mapping[str, str], extension: str | None) -> OutputFormat | Literal["", "none"]:
    """The format asked for, by f or by the extension of the path."""
    text = fields.get("f", "").lower()
    wanted = "none" if text == "none" else parse_output_format(text)
    if text and wanted is None:
        raise BadParameter("f", f"f must be one of {', '.join(OUTPUT_FORMATS)} or none.")
    if extension is None:
        return wanted or ""
    format = parse_output_format(extension)
    if format is None:
        raise BadParameter("f", f"The path's extension must be one of {', '.join(OUTPUT_FORMATS)}, or absent.")
    if wanted is not None and wanted != format:
        raise BadParameter("f", f"f={text} contradicts the path's extension, .{extension.lower()}.")
    return format
