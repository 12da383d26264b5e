"""What is served, and who serves it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from bench.exchange import Ask, exchange
from bench.serving import Address, BenchError, Launch
from bench.work import Picture, Task, Walk, draw


class Content(StrEnum):
    """What is served."""

    TINY = "tiny"
    RENDITION = "rendition"
    ORIGINAL = "original"
    UNCHANGED = "unchanged"  # a 304 to a GET of the rendition
    VALUE = "value"  # the quotation under a key, where the server has been given it
    MESSAGES = "messages"  # raw TCP; nothing that a site has
    MADE = "made"  # renditions that have to be made; which, the load says


@dataclass(frozen=True, slots=True)
class Site:
    """A store with a photo in it, and the same bytes as plain files, to serve."""

    folder: Path
    # Where uvimg has each content, and what it answers there.
    paths: dict[Content, str]
    bodies: dict[Content, bytes]
    etag: str
    # Whether this is only for a look.
    quick: bool = False

    def find(self, picture: Picture) -> Path:
        """The file of a picture that renditions are made of."""
        file = self.folder / "pictures" / picture
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(draw(picture))
        return file


FILE_NAMES = {
    Content.TINY: "tiny.html",
    Content.RENDITION: "rendition.jpg",
    Content.ORIGINAL: "original.jpg",
    Content.UNCHANGED: "rendition.jpg",
}


# The rendition of zimg's tables, at uvimg's own quality.
ZIMG_TASK = Task(Picture.SMALL, 100, 100, 75, gray=True)


@dataclass(frozen=True, slots=True)
class Variant:
    """One server: how it is started for a content and a number of processes, and where it has the content."""

    name: str
    ours: bool
    launch: Callable[[Site, Content, int], Launch]
    # A program that has to be installed.
    program: str = ""
    # It answers the same to everything, also where a server would have to look first.
    blind: bool = False
    # Where it has all contents, whatever they are, if neither we nor the site made them.
    path: str = ""
    # The requests for what is to be made, once it has the picture. Loops are asked for nothing.
    ask_for: Callable[[Site, Walk, Address], list[Ask]] = lambda site, walk, address: []
    # Why it cannot do this at all; "" when it can.
    lacks: Callable[[], str] = lambda: ""

    def ask(self, site: Site, content: Content, address: Address) -> Ask:
        """The request for a content, with the answer that it must have."""
        if content is Content.MESSAGES:
            # The client knows what it sent.
            return Ask("", 0, b"")
        if self.path:
            return Ask(self.path, 200, None)
        path = site.paths[content] if self.ours else f"/{FILE_NAMES[content]}"
        kind = ("Content-Type", "text/html" if content is Content.TINY else "image/jpeg")
        if content is not Content.UNCHANGED:
            return Ask(path, 200, site.bodies[content], expected=(kind,))
        etag = site.etag
        if not self.blind:
            etag = exchange(address, Ask(path, 200, b"")).fields.get("etag", "")
            if not etag:
                raise BenchError(f"{self.name} gives {path} no ETag")
        return Ask(path, 304, b"", (("If-None-Match", etag),), (("ETag", etag),))


def absent(name: str, reason: str) -> Variant:
    """One whose published figures have nobody to stand beside: it is named, with the reason."""

    def launch(site: Site, content: Content, processes: int) -> Launch:
        raise BenchError(reason)

    return Variant(name, False, launch, lacks=lambda: reason)
