"""When a server that may be away is asked, and what a guard makes of its silence."""

import asyncio
import logging

import pytest

from uvimg.core.breaker import Breaker
from uvimg.core.errors import StoreDown, StoreFull
from uvimg.store.guard import Guard


def test_it_opens_only_after_failures_without_a_success_between_them() -> None:
    breaker = Breaker(failures=3, pause_s=1)
    for _ in range(5):
        assert [breaker.fail(0), breaker.fail(0), breaker.succeed()] == [False, False, False]
    assert [breaker.fail(0), breaker.fail(0), breaker.fail(0)] == [False, False, True]
    assert breaker.state == "open"


def test_one_in_a_pause_is_let_through_an_open_one() -> None:
    breaker = Breaker(failures=1, pause_s=1)
    breaker.fail(10)
    asked = [breaker.admit(10 + step / 10) for step in range(31)]
    assert [step for step, admitted in enumerate(asked) if admitted] == [10, 20, 30]


def test_a_probe_that_fails_keeps_it_open_and_one_that_succeeds_closes_it() -> None:
    breaker = Breaker(failures=1, pause_s=1)
    assert breaker.fail(0)
    assert breaker.admit(1)
    assert not breaker.fail(1.5)
    assert not breaker.admit(2.4)
    assert breaker.admit(2.5)
    assert breaker.succeed()
    assert breaker.state == "closed"
    assert breaker.admit(2.5)


def test_a_probe_that_was_given_up_is_followed_by_another_at_once() -> None:
    breaker = Breaker(failures=1, pause_s=1)
    breaker.fail(0)
    assert breaker.admit(1)
    breaker.give_up()
    assert breaker.admit(1)
    assert not breaker.admit(1)


class _Foreign(Exception):
    pass


class _Full(Exception):
    pass


def _make_guard() -> Guard:
    meanings = {_Foreign: StoreDown, _Full: StoreFull}
    return Guard("the server", lambda exc: meanings[type(exc)]() if type(exc) in meanings else None, 0.05)


async def _answer(what: Exception | str) -> str:
    if isinstance(what, Exception):
        raise what
    return what


async def test_a_silent_server_is_not_asked_again_for_a_while_and_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guard = _make_guard()
    never = asyncio.Event()
    with caplog.at_level(logging.INFO, "uvimg.store"):
        for _ in range(20):
            with pytest.raises(StoreDown):
                await guard.run(never.wait)
        assert guard.is_away
        async with asyncio.timeout(5):
            while guard.is_away:
                try:
                    await guard.run(lambda: _answer("here"))
                except StoreDown:
                    await asyncio.sleep(0.01)
    assert [record.message for record in caplog.records] == [
        "the server is away: no answer in time",
        "the server answers again",
    ]
    assert guard.failures < 10 < guard.refused


async def test_what_a_server_says_is_no_sign_of_its_being_away() -> None:
    guard = _make_guard()
    for _ in range(10):
        with pytest.raises(StoreFull):
            await guard.run(lambda: _answer(_Full()))
        with pytest.raises(LookupError):
            await guard.run(lambda: _answer(LookupError()))
        for _ in range(2):
            with pytest.raises(StoreDown):
                await guard.run(lambda: _answer(_Foreign()))
    assert not guard.is_away


async def test_who_goes_before_the_answer_says_nothing_about_the_server() -> None:
    guard = _make_guard()
    for _ in range(10):
        task = asyncio.create_task(guard.run(asyncio.Event().wait, timeout_s=60))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not guard.is_away
    assert guard.failures == 0


async def test_an_error_of_many_lines_is_told_in_one(caplog: pytest.LogCaptureFixture) -> None:
    guard = _make_guard()
    for _ in range(3):
        with pytest.raises(StoreDown):
            await guard.run(lambda: _answer(_Foreign("refused\n\nDebug source:\n" + "x" * 5000)))
    assert [record.message for record in caplog.records] == ["the server is away: _Foreign: refused"]
