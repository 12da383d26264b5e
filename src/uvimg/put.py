"""`uvimg put`: files and folders from the shell into documents, by a server's URL or straight into a store.

What is hidden (its name begins with a dot), what is no ordinary file and links to folders are left out and told.
Files are put one after the other, so that what is there when something fails is what the bar said.
"""

import asyncio
import os
import re
import stat
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from uvimg.core.document import check_path, document_name, guess_type
from uvimg.core.errors import BadRequest, TargetTooLong, UvimgError
from uvimg.store import open_store

_PIECE_BYTES = 262_144
# Of connecting, and of a server that says nothing.
_PATIENCE_S = 60.0
# More of an answer than anybody would read.
_LONGEST_REASON = 65_536


class CannotPut(Exception):
    """What was to be put cannot be; the message is one readable line."""


@dataclass(frozen=True, slots=True)
class Item:
    """A file, and the document's path that it is to have below where all are put."""

    file: Path
    path: str
    size: int


@dataclass(frozen=True, slots=True)
class Found:
    items: list[Item]
    # Why others were left out, one line each.
    notes: list[str]


def find_items(sources: Sequence[str], destination: str) -> Found:
    """What is to be put: a file as DESTINATION, or into it where that ends with a slash; of a folder what is in it."""
    found = Found([], [])
    folder = not destination or destination.endswith("/")
    if not folder and (len(sources) > 1 or os.path.isdir(sources[0])):
        raise CannotPut(f"several files cannot all be {destination}: end it with a slash to put them into it")
    for source in sources:
        if os.path.isdir(source):
            for file in _walk(Path(source), found.notes):
                _add(found, file, destination + file.relative_to(source).as_posix())
        elif not os.path.exists(source):
            raise CannotPut(f"{source}: there is no such file")
        else:
            _add(found, Path(source), destination + Path(source).name if folder else destination)
    if not found.items:
        raise CannotPut(f"{' '.join(sources)}: there is no file in it")
    return found


def _walk(folder: Path, notes: list[str]) -> Iterator[Path]:
    def complain(exc: OSError) -> None:
        raise CannotPut(f"{exc.filename}: {exc.strerror}")

    for place, folders, files in os.walk(folder, onerror=complain):
        hidden = [name for name in (*folders, *files) if name.startswith(".")]
        notes += [f"{Path(place, name)}: left out, it is hidden" for name in hidden]
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        # They may lead out of the folder, or round in a circle.
        notes += [
            f"{path}: left out, it is a link to a folder"
            for name in folders
            if (path := Path(place, name)).is_symlink()
        ]
        yield from (Path(place, name) for name in sorted(files) if not name.startswith("."))


def _add(found: Found, file: Path, path: str) -> None:
    try:
        facts = file.stat()
    except OSError as exc:
        raise CannotPut(f"{file}: {exc.strerror}") from exc
    if not stat.S_ISREG(facts.st_mode):
        found.notes.append(f"{file}: left out, it is no ordinary file")
        return
    try:
        check_path(path)
    except (BadRequest, TargetTooLong) as exc:
        raise CannotPut(f"{str(file)!a}: {exc.detail}") from exc
    found.items.append(Item(file, path, facts.st_size))


def split_destination(destination: str) -> tuple[str, str]:
    """A destination as (base URL with a slash at its end, path), the base "" for a path in a store."""
    found = re.fullmatch(r"(https?://[^/?#]+)(/[^?#]*)?", destination, re.IGNORECASE)
    if found is not None:
        path = found[2] or "/"
        folder, _, name = path.rpartition("/")
        # Paths of documents are quoted when they are put.
        return f"{found[1]}{folder}/", unquote(name, errors="surrogateescape")
    if "://" in destination:
        raise CannotPut(f"{destination} is neither a URL that begins with http:// or https:// nor a document's path")
    return "", destination.removeprefix("/")


Watch = Callable[[int], object]


async def put_by_url(
    items: Sequence[Item], base: str, certificate: str, watch: Watch, begin: Callable[[str], object]
) -> None:
    """PUT each of the items below `base`. CannotPut for the first that fails."""
    # Only here: putting into a store needs no client.
    import ssl

    import aiohttp

    try:
        trust = ssl.create_default_context(cafile=certificate or None)
    except OSError as exc:
        raise CannotPut(f"{certificate}: {exc.strerror}") from exc
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_PATIENCE_S, sock_read=_PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(ssl=trust)) as session:
        for item in items:
            begin(item.path)
            url = base + quote(item.path)
            headers = {"Content-Type": guess_type(item.path), "Content-Length": str(item.size)}
            try:
                # A file that has been read is not there for another place, and where a GET leads is no document put.
                async with session.put(url, data=_read(item, watch), headers=headers, allow_redirects=False) as answer:
                    if answer.status not in (200, 201, 204):
                        text = (await answer.content.read(_LONGEST_REASON)).decode(errors="replace")
                        reason = _explain(answer.status, answer.headers.get("Location", ""), text)
                        raise CannotPut(f"{item.file}: {reason}")
            except aiohttp.ClientError as exc:
                if isinstance(exc.__cause__, CannotPut):
                    # The client has its own words around what `_read` says.
                    raise exc.__cause__ from exc
                raise CannotPut(f"{url}: {exc}") from exc
            except TimeoutError as exc:
                raise CannotPut(f"{url}: the server does not answer") from exc


def _explain(status: int, location: str, text: str) -> str:
    found = re.search(r'"detail":\s*"((?:[^"\\]|\\.)*)"', text)
    reason = f", and points at {location}" if location else f": {found[1]}" if found else ""
    # Nobody's server writes to this terminal.
    return f"the server says {status}" + "".join(char if char.isprintable() else "?" for char in reason)


async def put_into_store(items: Sequence[Item], url: str, watch: Watch, begin: Callable[[str], object]) -> None:
    """Put the items into a store that a service may be using. CannotPut for the first that fails."""
    from uvimg.apps.codings import Codings
    from uvimg.apps.documents import replace_document
    from uvimg.coders import Coders

    store = open_store(url)
    coders = Coders(1)
    try:
        codings = Codings(store, coders, 3, "none")
        for item in items:
            begin(item.path)
            try:
                async with store.incoming() as incoming:
                    async for piece in _read(item, watch):
                        await incoming.write(piece)
                    await replace_document(store, codings, document_name(item.path), incoming, guess_type(item.path))
            except UvimgError as exc:
                raise CannotPut(f"{item.file}: {exc.detail}") from exc
    finally:
        coders.close()
        await store.close()


async def _read(item: Item, watch: Watch) -> AsyncIterator[bytes]:
    """A file's bytes. CannotPut when it cannot be read, or is no longer as long as it was."""
    left = item.size
    try:
        with open(item.file, "rb", buffering=0) as file:
            while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
                left -= len(piece)
                if left < 0:
                    break
                watch(len(piece))
                yield piece
    except OSError as exc:
        raise CannotPut(f"{item.file}: {exc.strerror}") from exc
    if left:
        raise CannotPut(f"{item.file}: it was changed while it was read")
