"""Plans: the right steps, the right sizes, nothing huge, and one name for each picture."""

import re
from dataclasses import replace
from itertools import product

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from uvimg.core.errors import BadParameter
from uvimg.core.plan import Crop, Encode, Flatten, Gray, Load, Plan, Rotate, Rules, Source, make_plan
from uvimg.core.route import Params, Show, route

PHOTO = Source("jpeg", 640, 856)
SIZE = 29_615


def plan(query: str = "", source: Source = PHOTO, **rules: object) -> Plan:
    found = route("GET", "/" + "0" * 32, query)
    assert isinstance(found, Show)
    return make_plan(found.params, source, SIZE, replace(Rules(), **rules))


def sizes(made: Plan) -> list[tuple[int, int]]:
    """Width and height after each step that sets them."""
    return [(step.width, step.height) for step in made.steps if isinstance(step, Load | Crop | Rotate)]


def image(width: int, height: int, **facts: object) -> Source:
    return msgspec.structs.replace(Source("jpeg", width, height), **facts)


@pytest.mark.parametrize(
    ("width", "height", "query", "expected"),
    [
        (640, 856, "w=100", [(100, 134)]),
        (640, 856, "w=100&h=100", [(100, 134), (100, 100)]),
        (640, 856, "h=100&p=4", [(75, 100)]),
        # Proportional, not stretched to both sides because they nearly fit.
        (100, 101, "w=100&h=100&p=4", [(99, 100)]),
        (101, 100, "w=100&h=100&p=4", [(100, 99)]),
        (1000, 999, "w=500&h=500", [(501, 500), (500, 500)]),
        # Half a pixel rounds up, and the side asked for is met however odd the ratio.
        (2, 3, "h=1", [(1, 1)]),
        (200, 101, "w=100", [(100, 51)]),
        (16_383, 7, "w=9999", [(9999, 4)]),
        (10_000, 1, "w=10", [(10, 1)]),
        # Percents, each side for itself.
        (640, 856, "w=50&p=3", [(320, 428)]),
        (640, 856, "h=50&p=3", [(320, 428)]),
        (640, 856, "w=50&h=25&p=3", [(320, 214)]),
        (3, 3, "w=1&p=3", [(1, 1)]),
        # Unscaled crops; the missing side is the image's.
        (640, 856, "w=100&p=2", [(640, 856), (100, 856)]),
        (640, 856, "w=9000&h=100&p=2", [(640, 856), (640, 100)]),
        (640, 856, "w=9000&h=9000&p=2", [(640, 856)]),
        (640, 856, "x=600&y=800&w=100&h=100", [(640, 856), (40, 56)]),
        (640, 856, "x=600&h=100", [(640, 856), (40, 100)]),
        (640, 856, "x=-7&y=-9&w=9&h=9", [(640, 856), (9, 9)]),
        (640, 856, "x=5&y=5", [(640, 856)]),
        (640, 856, "w=90&h=90&r=90", [(90, 120), (90, 90), (90, 90)]),
        (640, 856, "r=90", [(640, 856), (856, 640)]),
        (640, 856, "r=45", [(640, 856), (1060, 1060)]),
    ],
)
def test_a_size_is_the_one_that_the_table_of_modes_says(
    width: int, height: int, query: str, expected: list[tuple[int, int]]
) -> None:
    assert sizes(plan(query, image(width, height))) == expected
    turned = image(height, width, orientation=6)
    assert sizes(plan(query, turned)) == expected


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("w=1000&h=100", (640, 100)),
        ("w=1000", (640, 856)),
        ("w=9000&h=9000&p=0", (640, 856)),
        ("w=900&p=3", (640, 856)),
        ("w=1000&h=1000&p=4", (640, 856)),
    ],
)
def test_without_zoom_nothing_is_enlarged(query: str, expected: tuple[int, int]) -> None:
    assert sizes(plan(query, zoom_up=False))[-1] == expected


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("w=9999999", "w"),
        ("h=9999999", "h"),
        ("w=999999999&h=999999999", "w"),
        ("w=20000&h=1", "w"),
        ("w=1&h=20000", "h"),
        ("w=999999999&h=999999999&p=0", "w"),
        ("w=999999999&h=1&p=0", "w"),
        ("w=999999999&p=3", "w"),
        ("w=9000&h=9000&p=0", "w"),
        ("w=9000&h=5000&p=0&r=45", "w"),
        ("w=100&p=0", "h"),
        ("h=100&p=0", "w"),
        ("x=640", "x"),
        ("y=856&w=5", "y"),
        ("x=999999999", "x"),
    ],
)
def test_what_is_too_much_or_beyond_the_image_is_refused_by_name(query: str, name: str) -> None:
    with pytest.raises(BadParameter) as refused:
        plan(query)
    assert refused.value.parameter == name
    assert refused.value.detail.startswith(f"{name} ")


def test_the_limits_of_enlarging_never_forbid_the_image_itself() -> None:
    large, limits = image(9000, 8000), {"max_side": 100, "max_pixels": 10_000}
    for query in ("", "r=90", "w=8999", "w=9000&h=8000&p=0", "w=9000&h=1&p=2", "x=1&w=8999"):
        assert plan(query, large, **limits)
    for query in ("w=9001", "r=45", "w=8000&h=9001&p=0"):
        with pytest.raises(BadParameter):
            plan(query, large, **limits)


def test_haste_gives_a_rendition_another_name_only_where_it_makes_another() -> None:
    for query in ("w=320", "w=100&h=100&g=1", "w=50"):
        assert plan(query, fast_shrink=True).key != plan(query).key, query
    for query in ("", "w=321", "w=1000", "w=30"):
        assert plan(query, fast_shrink=True) == plan(query), query
    assert plan("w=100", image(640, 856, format="png"), fast_shrink=True).key == plan("w=100").key


sides = st.integers(1, 70) | st.sampled_from([1000, 9_999, 10_001, 16_384, 999_999_999])
asked = st.builds(
    Params,
    w=st.just(0) | sides,
    h=st.just(0) | sides,
    p=st.integers(0, 4),
    g=st.integers(0, 1),
    x=st.sampled_from([-9, -1, 0, 1, 5, 69]),
    y=st.sampled_from([-1, 0, 3]),
    r=st.sampled_from([0, 0, 45, 90, 180, 359]),
    q=st.sampled_from([0, 50, 75, 100]),
    f=st.sampled_from(["", "none", "jpeg", "png", "webp", "gif", "avif"]),
)
sources = st.builds(
    Source,
    format=st.sampled_from(["jpeg", "png", "gif", "webp", "avif", "tiff", "svg"]),
    width=st.integers(1, 70) | st.sampled_from([4000, 16_384]),
    height=st.integers(1, 70) | st.sampled_from([4000, 16_384]),
    frames=st.sampled_from([1, 3, 500]),
    orientation=st.integers(1, 8),
    quality=st.sampled_from([50, 75, 100]),
    has_alpha=st.booleans(),
    gray=st.booleans(),
    managed=st.booleans(),
)
configured = st.builds(
    Rules,
    quality=st.sampled_from([50, 75]),
    format=st.sampled_from([None, "jpeg", "webp"]),
    background=st.sampled_from([(255, 255, 255), (0, 0, 1)]),
    zoom_up=st.booleans(),
    max_side=st.sampled_from([50, 16_384]),
    max_pixels=st.sampled_from([5000, 50_000_000]),
    max_frames=st.sampled_from([2, 100]),
    webp_effort=st.sampled_from([2, 3]),
    png_compression=st.sampled_from([6, 9]),
    fast_shrink=st.booleans(),
)


@given(asked, sources, configured)
def test_a_plan_stays_within_the_image_and_the_limits(params: Params, source: Source, rules: Rules) -> None:
    assume(not params.original)
    try:
        made = make_plan(params, source, SIZE, rules)
    except BadParameter:
        return
    load, *rest = made.steps
    assert isinstance(load, Load)
    assert isinstance(rest[-1], Encode)
    for width, height in sizes(made):
        assert 1 <= width <= max(rules.max_side, source.width, source.height)
        assert 1 <= height <= max(rules.max_side, source.width, source.height)
        assert width * height <= max(rules.max_pixels, source.width * source.height)
    for step in rest:
        if isinstance(step, Crop):
            assert 0 <= step.left <= load.width - step.width
            assert 0 <= step.top <= load.height - step.height
    width, height = sizes(made)[-1]
    assert load.frames == 1 or load.frames * width * height <= rules.max_pixels
    assert re.fullmatch(r"[0-9a-z.-]{1,160}", made.key)


@given(asked, asked, sources, configured, configured)
def test_plans_for_one_original_share_a_key_only_if_they_make_the_same(
    one: Params, other: Params, source: Source, rules: Rules, changed: Rules
) -> None:
    plans = []
    for params, configuration in product((one, other), (rules, changed)):
        if not params.original:
            try:
                plans.append(make_plan(params, source, SIZE, configuration))
            except BadParameter:
                continue
    for left, right in product(plans, plans):
        assert (left.key == right.key) == (left == right)


@pytest.mark.parametrize(
    "queries",
    [
        (
            "w=100",
            "w=100&p=4",
            "w=100&x=-1",
            "w=100&f=jpeg",
            "w=100&q=75",
            "w=100&f=none",
            "w=100&h=134",
            "w=100&h=134&p=0",
        ),
        ("w=9999&h=9999&p=2", "q=75", "f=jpg", "w=640&h=856", "w=100&p=3", "x=0&y=0&w=640&h=856", "x=5&q=75"),
        ("f=png", "f=png&q=5", "f=png&q=90"),
        ("", "w=0", "r=360", "unknown=1"),
    ],
)
def test_queries_that_mean_the_same_picture_share_a_key(queries: tuple[str, ...]) -> None:
    assert len({plan(query).key for query in queries}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"query": "w=640"}),
        ({"query": "w=99"}, {"query": "w=98&h=132"}),
        ({"query": "r=45"}, {"query": "r=45", "background": (0, 0, 0)}),
        ({"source": image(9, 9, has_alpha=True)}, {"source": image(9, 9, has_alpha=True), "background": (0, 0, 0)}),
        ({"query": "f=webp"}, {"query": "f=webp", "webp_effort": 4}),
        ({"query": "f=avif"}, {"query": "f=avif", "avif_effort": 4}),
        ({"query": "f=gif"}, {"query": "f=gif", "gif_effort": 4}),
        ({"query": "f=png"}, {"query": "f=png", "png_compression": 4}),
        ({}, {"quality": 80}),
        ({}, {"format": "webp"}),
        (
            {"source": image(9, 9, format="gif", frames=9)},
            {"source": image(9, 9, format="gif", frames=9), "max_frames": 5},
        ),
    ],
)
def test_what_changes_the_picture_changes_the_key(one: dict[str, object], other: dict[str, object]) -> None:
    assert plan(**one).key != plan(**other).key


def test_the_quality_of_a_jpeg_is_never_raised_and_that_of_others_not_known() -> None:
    def quality(query: str, source: Source) -> int:
        encode = plan(query, source).steps[-1]
        assert isinstance(encode, Encode)
        return encode.quality

    assert quality("q=90", image(9, 9, quality=60)) == 60
    assert quality("q=50", image(9, 9, quality=60)) == 50
    assert quality("", image(9, 9, quality=60)) == 60
    assert quality("q=90", image(9, 9, format="png", quality=60)) == 90


@pytest.mark.parametrize(
    ("facts", "allowed"),
    [
        ({}, True),
        ({"orientation": 3}, False),
        ({"managed": True}, False),
        ({"format": "gif", "frames": 100}, True),
        ({"format": "gif", "frames": 101}, False),
    ],
)
def test_only_a_bare_image_may_be_its_original_and_only_as_it_would_be_seen(
    facts: dict[str, object], allowed: bool
) -> None:
    for query, bare in (("", True), ("q=75", False), ("g=1", False), ("w=9", False), ("f=jpeg", False)):
        encode = plan(query, image(9, 9, **facts)).steps[-1]
        assert isinstance(encode, Encode)
        assert encode.or_original == (allowed and bare)
        assert encode.max_bytes == (SIZE if bare else 0)


def test_frames_are_kept_as_far_as_format_limit_and_pixels_allow() -> None:
    def frames(query: str, **rules: object) -> int:
        load = plan(query, image(100, 100, format="gif", frames=50), **rules).steps[0]
        assert isinstance(load, Load)
        return load.frames

    assert frames("f=gif") == frames("f=webp") == 50
    assert frames("f=jpeg") == frames("f=png") == frames("f=avif") == 1
    assert frames("f=gif", max_frames=7) == 7
    assert frames("f=gif", max_pixels=100_000) == 10
    assert frames("f=gif&w=10", max_pixels=100_000) == 50
    # A turned frame is larger than the frame.
    assert frames("f=gif&r=45", max_pixels=100_000) == 4
    assert frames("f=gif&w=1&h=1&p=2", max_pixels=100_000) == 10


def test_alpha_is_laid_on_a_colour_only_where_the_format_has_none() -> None:
    for format, flattened in (("jpeg", True), ("png", False), ("webp", False), ("gif", False), ("avif", False)):
        made = plan(f"f={format}", image(9, 9, has_alpha=True), background=(1, 2, 3))
        assert (Flatten((1, 2, 3)) in made.steps) == flattened
    assert not any(isinstance(step, Flatten) for step in plan("f=jpeg").steps)


def test_gray_is_a_step_only_where_there_is_colour() -> None:
    assert Gray() in plan("g=1").steps
    assert Gray() not in plan("g=1", image(9, 9, gray=True)).steps


def test_a_webp_beyond_its_own_limit_is_refused() -> None:
    with pytest.raises(BadParameter) as refused:
        plan("f=webp", image(16_384, 9))
    assert refused.value.parameter == "f"
    assert plan("f=webp&w=16383", image(16_384, 9))
