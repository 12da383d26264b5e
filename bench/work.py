"""What is to be made of a picture, so that nothing but work can answer it.

A walk is a long list of renditions around the one that is measured: all differ in width, height or quality, so
nothing that was made before is of any use, and no two in flight are equal. Servers and loops go through the same
list, in the same order.
"""

import random
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Literal

import pyvips

from bench import corpus
from bench.serving import BenchError


class Picture(StrEnum):
    """What renditions are made of, by the name of its file."""

    SMALL = "small.jpg"  # that of zimg's tables: 640 × 856
    PHOTO = "photo.jpg"  # as a camera makes them: 2725 × 2225


@cache
def draw(picture: Picture) -> bytes:
    """The picture's file; some take seconds."""
    return corpus.zimg_photo() if picture is Picture.SMALL else corpus.large_photo()


_SIZES = {Picture.SMALL: (640, 856), Picture.PHOTO: (2725, 2225)}


@dataclass(frozen=True, slots=True)
class Task:
    """One rendition: covering width × height and cut to it, or fitting inside."""

    picture: Picture
    width: int
    height: int
    quality: int
    fit: Literal["cover", "inside"] = "cover"
    gray: bool = False
    format: Literal["jpeg", "avif"] = "jpeg"


@dataclass(frozen=True, slots=True)
class Walk:
    """Renditions of one picture, no two alike."""

    picture: Picture
    tasks: tuple[Task, ...]


def make_walk(
    picture: Picture,
    side: int,
    reach: int,
    fit: Literal["cover", "inside"] = "cover",
    *,
    gray: bool = False,
    format: Literal["jpeg", "avif"] = "jpeg",
) -> Walk:
    """Around side × side, up to so many pixels more or less, at about uvimg's quality of 75.

    What is cut varies in both sides; what fits has one size for both, because one of them decides.
    """
    sides = range(side - reach, side + reach + 1)
    pairs = [(width, height) for width in sides for height in (sides if fit == "cover" else (width,))]
    # No more than the source has: uvimg would take that instead, and two tasks were one.
    tasks = [Task(picture, *pair, quality, fit, gray, format) for pair in pairs for quality in range(71, 80)]
    # Else the sizes grew while a round lasts.
    random.Random(1).shuffle(tasks)
    return Walk(picture, tuple(tasks))


def check_picture(body: bytes, task: Task) -> None:
    """BenchError where these bytes are not the rendition: its format, its size, and no colour where it is gray."""
    try:
        image = pyvips.Image.new_from_buffer(body, "", fail_on="error")
        loader = image.get("vips-loader")
        image = image.copy_memory()
    except pyvips.Error as exc:
        raise BenchError(f"a rendition cannot be decoded: {str(exc).splitlines()[0]}") from None
    wanted = _find_size(task)
    # A pixel is a matter of rounding where the other side follows.
    slack = 0 if task.fit == "cover" else 1
    is_right = (
        loader.startswith("jpeg" if task.format == "jpeg" else "heif")
        and abs(image.width - wanted[0]) <= slack
        and abs(image.height - wanted[1]) <= slack
        and (not task.gray or image.bands == 1 or _is_gray(image))
    )
    if not is_right:
        raise BenchError(
            f"a rendition is {image.width} × {image.height} in {image.bands} channels by {loader} instead of "
            f"{wanted[0]} × {wanted[1]} {'gray ' if task.gray else ''}{task.format}"
        )


def _is_gray(image: Any) -> bool:
    """Some write three channels that are equal."""
    return image.bands == 3 and all((image[0] - image[band]).abs().max() == 0 for band in (1, 2))


def _find_size(task: Task) -> tuple[int, int]:
    if task.fit == "cover":
        return task.width, task.height
    width, height = _SIZES[task.picture]
    scale = min(task.width / width, task.height / height)
    return round(width * scale), round(height * scale)
