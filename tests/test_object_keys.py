"""Keys stand in the order of their names, and every server takes them."""

from hypothesis import example, given
from hypothesis import strategies as st

from uvimg.core.object_keys import due_key, fits, read_due, read_name, spell_name, spell_prefix

names = st.binary(min_size=1, max_size=511) | st.text("/.-_ab0!~\x00", min_size=1).map(str.encode)


@given(names)
@example(b"/" * 511)
@example(b"a" * 511)
def test_a_name_comes_back_from_its_key(name: bytes) -> None:
    assert read_name(spell_name(name)) == name
    assert read_due(due_key(1_800_000_000, name)) == (1_800_000_000, name)


@given(names, names)
@example(b"a", b"a/b")
@example(b"a" * 80, b"a" * 80 + b"/")
@example(b"a" * 80 + b"/", b"a" * 80 + b"-")
def test_keys_stand_in_the_order_of_their_names(one: bytes, other: bytes) -> None:
    assert (spell_name(one) < spell_name(other)) == (one < other)


@given(names, names, st.integers(0, 511))
def test_a_prefix_begins_the_keys_of_its_names_and_no_others(name: bytes, other: bytes, length: int) -> None:
    for prefix in (name[:length], other[:length]):
        assert spell_name(name).startswith(spell_prefix(prefix)) == name.startswith(prefix)
        assert spell_name(name) > spell_prefix(prefix) or not name.startswith(prefix)


@given(names, names)
@example(b"a", b"a/b")
@example(b"a" * 80, b"a" * 81)
def test_no_key_is_the_folder_of_another(one: bytes, other: bytes) -> None:
    assert not spell_name(other).startswith(spell_name(one) + "/")


@given(names)
@example(b"a/../b")
@example(b"//")
def test_the_segments_of_a_key_are_what_every_server_takes(name: bytes) -> None:
    key = spell_name(name)
    assert key.isascii()
    assert key.isprintable()
    assert all(0 < len(segment) <= 255 and segment not in (".", "..") for segment in key.split("/"))


def test_what_would_be_too_long_for_a_server_is_known_before() -> None:
    assert fits(b"images/" + b"0" * 64, "prefix/" * 30)
    assert fits(b"kv/database/" + b"k" * 499, "prefix/")
    assert not fits(b"\xff" * 511, "")


def test_a_foreign_key_is_no_name() -> None:
    for key in ("names/_a", "names/a!", "names/_a%!", "other/_a!", "names/_=00!", "names/_" + "a" * 81 + "!"):
        assert read_name(key) is None
