"""Ids, names and paths: only what is whole and ours becomes one."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uvimg.core.address import (
    blob_path,
    image_name,
    original_of,
    parse_blob_path,
    parse_id,
    rendition_name,
    renditions_prefix,
)

MD5 = hashlib.md5(b"", usedforsecurity=False).hexdigest()
SHA256 = hashlib.sha256(b"").hexdigest()


@pytest.mark.parametrize("text", [MD5, SHA256, MD5.upper(), SHA256.title()])
def test_an_id_is_the_same_in_any_case(text: str) -> None:
    assert parse_id(text) == text.lower()


@pytest.mark.parametrize(
    "text",
    [
        "",
        MD5[:-1],
        MD5 + "0",
        SHA256 + MD5,
        MD5 + "\n",
        "\n" + MD5,
        " " + MD5,
        MD5[:-1] + "g",
        MD5[:-1] + "\0",
        "٣" * 32,
        "２" * 32,
        "../" + MD5,
        MD5[:-3] + "%61",
        "0x" + MD5[2:],
        "+" + MD5[1:],
    ],
)
def test_what_is_not_all_hex_digits_is_no_id(text: str) -> None:
    assert parse_id(text) is None


@given(st.text(alphabet=st.characters() | st.sampled_from("0123456789abcdefABCDEF"), min_size=30, max_size=66))
def test_an_id_is_ascii_of_the_two_lengths_or_none_at_all(text: str) -> None:
    found = parse_id(text)
    assert found is None or (len(found) in (32, 64) and found.isascii() and int(found, 16) >= 0)


@given(st.binary(min_size=32, max_size=32))
def test_a_path_leads_back_to_its_digest(digest: bytes) -> None:
    assert parse_blob_path(blob_path(digest)) == digest


@pytest.mark.parametrize(
    "path",
    [
        SHA256,
        "/" + SHA256,
        f"{SHA256[:1]}/{SHA256}",
        f"{SHA256[:4]}/{SHA256}",
        f"00/{SHA256}",
        f"{SHA256[:2]}/{SHA256}\n",
        f"{SHA256[:2]}/{SHA256}.tmp",
        f"{SHA256[:2]}/{SHA256[:2]}/{SHA256}",
        f"{SHA256[:2]}/{SHA256.upper()}",
        f"{SHA256[:2]}/../{SHA256[:2]}/{SHA256}",
    ],
)
def test_a_foreign_file_has_no_digest(path: str) -> None:
    assert parse_blob_path(path) is None


def test_a_rendition_knows_its_original() -> None:
    digest = bytes.fromhex(SHA256)
    name = rendition_name(digest, "100x100-jpeg75.0")
    assert name.startswith(renditions_prefix(digest))
    assert original_of(name) == image_name(SHA256)
