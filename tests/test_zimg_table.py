"""The table "observed on one JPEG of 640 × 856" of zimg's API, and what the corrections make of it."""

import pytest

from tests.conftest import Server, decode


@pytest.fixture(scope="module")
def photo_id(server: Server, zimg_photo: bytes) -> str:
    return server.upload(zimg_photo)


@pytest.mark.parametrize(
    ("query", "width", "height"),
    [
        ("", 640, 856),
        ("w=100", 100, 134),
        ("h=100", 75, 100),
        ("w=100&h=100", 100, 100),
        ("w=100&h=100&p=0", 100, 100),
        ("w=100&h=100&p=2", 100, 100),
        ("w=100&h=100&p=4", 75, 100),
        ("w=50&p=3", 320, 428),
        ("w=50&h=25&p=3", 320, 214),
        ("w=1000&h=1000", 1000, 1000),
        ("w=1000&h=1000&p=2", 640, 856),
        ("w=100&h=100&x=600&y=800", 40, 56),
        ("x=10&y=10", 640, 856),
        ("r=45", 1060, 1060),
        ("r=45&w=100&h=100", 144, 144),
        ("r=-90", 856, 640),
        ("g=1", 640, 856),
        ("q=10", 640, 856),
    ],
)
def test_sizes_are_those_that_zimg_was_seen_to_make(
    server: Server, photo_id: str, query: str, width: int, height: int
) -> None:
    answer = server.get(f"/{photo_id}?{query}")
    image = decode(answer.content)
    assert (image.width, image.height) == (width, height)
    assert answer.headers["Content-Type"] == "image/jpeg"
    assert image.bands == (1 if "g=1" in query else 3)


@pytest.mark.parametrize("format", ["jpeg", "png", "webp", "gif", "avif"])
def test_each_format_comes_with_its_size_and_its_real_type(server: Server, photo_id: str, format: str) -> None:
    answer = server.get(f"/{photo_id}?f={format}")
    image = decode(answer.content)
    assert (image.width, image.height) == (640, 856)
    assert answer.headers["Content-Type"] == f"image/{format}"


def test_p0_alone_is_the_original_byte_for_byte(server: Server, photo_id: str, zimg_photo: bytes) -> None:
    assert server.get(f"/{photo_id}?p=0").content == zimg_photo
