"""Names that have outlived what they belong to: renditions of images that are gone, coded copies of blobs that are.

They are left where whoever deleted an image, or a document, was stopped in the middle.
"""

from collections.abc import AsyncIterator

from uvimg.core.address import original_of
from uvimg.core.coding import CODINGS, coded_digest
from uvimg.store import Finding, Store

_PAGE = 500


async def find_strays(store: Store, *, dry_run: bool) -> AsyncIterator[Finding]:
    """Take them away, and tell of each."""
    for prefix, reason in (
        (b"renditions/", "a rendition of an image that is gone"),
        (CODINGS, "a coded copy of what is gone"),
    ):
        last = b""
        while page := await store.scan(prefix, last, _PAGE):
            for name, _ in page:
                if await _is_stray(store, name):
                    if not dry_run:
                        await store.unbind([name])
                    yield Finding(name.decode(), reason)
            last = page[-1][0]


async def _is_stray(store: Store, name: bytes) -> bool:
    if name.startswith(CODINGS):
        return not await store.is_named(coded_digest(name))
    return await store.record(original_of(name)) is None
