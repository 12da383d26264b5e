"""Which jobs are held for slow before they are begun."""

from typing import Any

import pytest

from uvimg.core.cost import choose_lane, predict_ms, takes_long_to_inspect
from uvimg.core.formats import FORMATS, Format
from uvimg.core.plan import Encode, Load, Plan, Rotate, Rules, Scale, Source, make_plan
from uvimg.core.route import Params

PHOTO = Source("jpeg", 2725, 2225)
TINY = Source("jpeg", 640, 856)


def lane(source: Source, **params: Any) -> str:
    return choose_lane(make_plan(Params(**params), source, 1_000_000, Rules()), source, "libvips")


def cost(source: Source, rules: Rules | None = None, **params: Any) -> float:
    return predict_ms(make_plan(Params(**params), source, 1_000_000, rules or Rules()), source, "libvips")


@pytest.mark.parametrize(
    ("source", "params"),
    [
        (TINY, {"w": 100, "h": 100, "g": 1}),
        (PHOTO, {"w": 100, "h": 100}),
        (PHOTO, {"w": 800}),
        (PHOTO, {"w": 400, "f": "webp"}),
        (PHOTO, {"w": 400, "f": "png"}),
        (TINY, {"w": 100, "f": "avif"}),
        (Source("png", 1000, 800), {"w": 200, "r": 90}),
        (Source("gif", 320, 240, frames=4), {"w": 100, "f": "gif"}),
    ],
)
def test_what_people_ask_for_all_day_is_fast(source: Source, params: dict[str, Any]) -> None:
    assert lane(source, **params) == "fast"


@pytest.mark.parametrize(
    ("source", "params"),
    [
        (PHOTO, {"w": 800, "f": "avif"}),
        (PHOTO, {"w": 1600, "f": "webp"}),
        (Source("jpeg", 9000, 8000), {"w": 100}),
        (Source("jpeg", 4000, 3000, progressive=True), {"w": 100}),
        (Source("png", 4000, 3000), {"w": 100}),
        (Source("avif", 2000, 1500), {"w": 100}),
        (PHOTO, {"w": 1600, "r": 45}),
        (Source("gif", 320, 240, frames=100), {"w": 100, "f": "gif"}),
        (TINY, {"w": 5000}),
        (TINY, {"w": 2000}),
    ],
)
def test_what_takes_many_times_as_long_is_slow(source: Source, params: dict[str, Any]) -> None:
    assert lane(source, **params) == "slow"


def test_what_a_script_enlarges_in_the_middle_counts() -> None:
    load, turn = Load(100, 100, 1, managed=False, gray=False), Rotate(1, 103, 103, (255, 255, 255))
    small, large = (Plan((load, turn, Scale(side, side), Encode("jpeg", 75, 0))) for side in (50, 5000))
    assert choose_lane(small, TINY, "libvips") == "fast"
    assert choose_lane(large, TINY, "libvips") == "slow"


def test_more_work_never_costs_less() -> None:
    assert cost(PHOTO, w=400) < cost(PHOTO, w=800) < cost(PHOTO, w=1600) < cost(PHOTO, w=1600, r=30)
    assert cost(TINY, w=400) < cost(PHOTO, w=400)
    for format, setting, efforts in (
        ("avif", "avif_effort", range(10)),
        ("webp", "webp_effort", range(7)),
        ("gif", "gif_effort", range(1, 11)),
        ("png", "png_compression", range(10)),
    ):
        costs = [cost(PHOTO, Rules(**{setting: effort}), w=400, f=format) for effort in efforts]  # type: ignore[arg-type]
        assert costs == sorted(costs)
        assert costs[0] < costs[-1]


@pytest.mark.parametrize("format", FORMATS)
def test_a_small_upload_is_not_held_for_long_and_the_largest_is(format: Format) -> None:
    assert not takes_long_to_inspect(format, 30_000)
    assert takes_long_to_inspect(format, 100 << 20)
