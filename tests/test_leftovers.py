"""What a request was about is let go of with it, though the collector of cycles is seldom asked to look."""

import gc
import hashlib
import tracemalloc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from uvimg.core.errors import PreconditionFailed
from uvimg.core.form import FormReader
from uvimg.store import Record, open_store


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


async def test_a_change_that_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    store = open_store(f"local:{tmp_path}/data")

    def refuse(name: bytes, old: Record | None) -> Record | None:
        raise PreconditionFailed()

    try:
        await store.change([b"name"], refuse)
    except PreconditionFailed as exc:
        error = weakref.ref(exc)
    # The writer knows its last job until it has another.
    record = Record(hashlib.sha256(b"v").digest(), 1, "text/plain", 1, inline=b"v")
    await store.change([b"name"], lambda _, old: record)
    assert error() is None
    await store.close()


def test_of_a_form_nothing_large_is_left() -> None:
    head = b'--x\r\nContent-Disposition: form-data; name="f"; filename="a"\r\n\r\n'
    tracemalloc.start()
    try:
        for _ in range(10):
            FormReader("multipart/form-data; boundary=x").feed(head + bytes(100_000))
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert left < 100_000
