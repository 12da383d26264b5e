"""Which reduced versions an original is to have, and from which of them a plan may start."""

from dataclasses import replace

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from uvimg.core.errors import BadParameter
from uvimg.core.formats import FORMATS, OUTPUT_FORMATS
from uvimg.core.plan import Encode, Load, Plan, Rules, Source, make_plan
from uvimg.core.pyramid import (
    PyramidRules,
    choose_kept,
    describe_level,
    find_levels,
    list_levels,
    plan_level,
    start_from_level,
)
from uvimg.core.route import Params

RULES = PyramidRules()
PHOTO = Source("jpeg", 2725, 2225)

SOURCES = st.builds(
    Source,
    st.sampled_from(FORMATS),
    st.integers(1, 16_384),
    st.integers(1, 16_384),
    frames=st.sampled_from((1, 1, 1, 5)),
    orientation=st.integers(1, 8),
    quality=st.integers(1, 100),
    has_alpha=st.booleans(),
    gray=st.booleans(),
    managed=st.booleans(),
    progressive=st.booleans(),
)
LARGE = st.builds(
    Source,
    st.just("jpeg"),
    st.integers(200, 16_384),
    st.integers(200, 16_384),
    orientation=st.integers(1, 8),
    gray=st.booleans(),
    managed=st.booleans(),
)
PARAMS = st.builds(
    Params,
    w=st.integers(0, 3000),
    h=st.integers(0, 3000),
    p=st.sampled_from((0, 1, 2, 3, 4)),
    g=st.integers(0, 1),
    x=st.integers(-1, 300),
    y=st.integers(-1, 300),
    r=st.sampled_from((0, 0, 90, 33)),
    q=st.integers(0, 100),
    f=st.sampled_from((None, *OUTPUT_FORMATS)),
)
ALL = replace(RULES, min_pixels=1)


def plan(width: int, height: int, encode: Encode | None = None) -> Plan:
    load = Load(width, height, 1, managed=False, gray=False)
    return Plan((load, encode or Encode("jpeg", 75, 0)))


def test_a_photo_has_its_half_its_quarter_and_its_eighth() -> None:
    assert [(level.width, level.height) for level in list_levels(PHOTO, RULES)] == [
        (1362, 1112),
        (681, 556),
        (340, 278),
    ]
    assert [level.key for level in list_levels(PHOTO, RULES)] == ["pyramid-1", "pyramid-2", "pyramid-3"]


def test_a_level_is_upright() -> None:
    turned = Source("jpeg", 2725, 2225, orientation=6)
    assert [(level.width, level.height) for level in list_levels(turned, RULES)] == [
        (1112, 1362),
        (556, 681),
        (278, 340),
    ]


def test_what_is_small_or_no_jpeg_has_none() -> None:
    assert list_levels(Source("jpeg", 2000, 999), RULES) == ()
    assert list_levels(Source("jpeg", 2000, 1000), RULES) != ()
    for format in FORMATS:
        assert bool(list_levels(Source(format, 2725, 2225), RULES)) == (format == "jpeg")
    assert list_levels(PHOTO, replace(RULES, min_pixels=0)) == ()


@settings(max_examples=60, deadline=None)
@given(SOURCES)
def test_each_level_is_the_half_of_the_one_above_and_none_is_too_small(source: Source) -> None:
    above = source.upright_size
    for number, level in enumerate(list_levels(source, ALL), 1):
        assert level.number == number
        assert (level.width, level.height) == (above[0] // 2, above[1] // 2)
        assert max(level.width, level.height) >= 240
        assert min(level.width, level.height) >= 16
        above = level.width, level.height


def test_a_plan_starts_from_the_smallest_that_is_at_least_twice_its_size() -> None:
    def best(width: int, height: int) -> list[int]:
        return [level.number for level in find_levels(plan(width, height), PHOTO, RULES)]

    assert best(122, 100) == [3, 2, 1]
    assert best(170, 139) == [3, 2, 1]
    assert best(171, 139) == [2, 1]
    assert best(170, 140) == [2, 1]
    assert best(400, 327) == [1]
    assert best(800, 653) == []
    # Stretched: both sides count.
    assert best(10, 556) == [1]
    assert best(10, 2225) == []


def test_what_would_show_the_loss_is_made_of_the_original() -> None:
    for encode, starts in (
        (Encode("jpeg", 85, 0), True),
        (Encode("jpeg", 86, 0), False),
        (Encode("webp", 75, 2), True),
        (Encode("avif", 75, 1), True),
        (Encode("png", 0, 6), False),
        (Encode("gif", 0, 3), False),
        (Encode("jpeg", 75, 0, max_bytes=1000), False),
    ):
        assert bool(find_levels(plan(100, 80, encode), PHOTO, RULES)) == starts, encode


@settings(max_examples=60, deadline=None)
@given(PARAMS, LARGE)
def test_no_plan_enlarges_or_crops_unscaled_from_a_level(params: Params, source: Source) -> None:
    if params.original:
        return
    try:
        made = make_plan(params, source, 500_000, Rules())
    except BadParameter:
        return
    levels = find_levels(made, source, ALL)
    load = made.steps[0]
    assert isinstance(load, Load)
    for level in levels:
        assert level.width >= 2 * load.width
        assert level.height >= 2 * load.height
    if (load.width, load.height) == source.upright_size:
        assert not levels
    assert list(levels) == sorted(levels, key=lambda level: level.width)


@settings(max_examples=60, deadline=None)
@given(PARAMS, LARGE)
def test_only_the_conversion_of_colours_is_left_out_of_a_plan_and_its_name_stays(
    params: Params, source: Source
) -> None:
    if params.original:
        return
    try:
        made = make_plan(params, source, 500_000, Rules())
    except BadParameter:
        return
    from_level = start_from_level(made)
    assert from_level.key == made.key
    assert from_level.steps[1:] == made.steps[1:]
    assert from_level.steps[0] == msgspec.structs.replace(made.steps[0], managed=False)


@settings(max_examples=60, deadline=None)
@given(LARGE)
def test_the_plan_of_a_level_gives_what_its_facts_say(source: Source) -> None:
    above = source
    for level in list_levels(source, ALL):
        load, encode = plan_level(level, above).steps
        facts = describe_level(level, source)
        assert isinstance(load, Load)
        assert isinstance(encode, Encode)
        assert (load.width, load.height) == facts.upright_size == (level.width, level.height)
        assert (load.managed, load.gray) == (above.managed, source.gray == facts.gray and source.gray)
        assert (facts.format, facts.orientation, facts.managed, facts.quality) == ("jpeg", 1, False, encode.quality)
        above = facts


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 10_000), max_size=8), st.integers(1, 20_000), st.integers(1, 300))
def test_what_is_kept_has_room_and_the_smallest_come_first(sizes: list[int], original: int, percent: int) -> None:
    sizes.sort(reverse=True)
    kept = choose_kept(sizes, original, replace(RULES, max_percent=percent))
    room = original * percent // 100
    assert sum(sizes[index] for index in kept) <= room
    # A run that ends with the smallest, and one more would be too much.
    assert list(kept) == list(range(len(sizes) - len(kept), len(sizes)))
    if len(kept) < len(sizes):
        assert sum(sizes[len(sizes) - len(kept) - 1 :]) > room
