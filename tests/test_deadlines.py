"""When which deadline of a connection expires, told with plain numbers for the clock."""

import math

from uvimg.core.deadlines import Timed
from uvimg.core.http1 import WRITE_STALL_BYTES, WRITE_STALL_S


def test_what_is_awaited_is_overdue_once_and_not_before_its_time() -> None:
    timed = Timed()
    timed.expect("head", 15)
    assert timed.due == 15
    assert timed.find_overdue(0, 15) is None
    assert timed.find_overdue(0, 15.1) == "head"
    assert (timed.find_overdue(0, 99), timed.awaited, timed.due) == (None, None, math.inf)


def test_nobody_is_idle_before_he_has_his_answer() -> None:
    timed = Timed()
    timed.expect("request", 1)
    timed.hold(100, 0)
    assert (timed.awaited, timed.due) == (None, WRITE_STALL_S)
    timed.release()
    assert timed.due == math.inf


def test_a_head_has_its_time_whether_or_not_an_answer_is_taken() -> None:
    timed = Timed()
    timed.expect("head", 3)
    timed.hold(100, 0)
    assert timed.due == 3
    assert timed.find_overdue(100, 4) == "head"
    timed.expect("end", 2 * WRITE_STALL_S)
    assert timed.due == WRITE_STALL_S
    timed.release()
    assert timed.due == 2 * WRITE_STALL_S


def test_who_takes_an_answer_at_the_least_rate_is_not_dropped_and_who_takes_less_is() -> None:
    timed = Timed()
    left, now = 10 * WRITE_STALL_BYTES, 0.0
    timed.hold(left, now)
    for _ in range(5):
        now, left = timed.due + 0.1, left - WRITE_STALL_BYTES
        assert timed.find_overdue(left, now) is None
        assert timed.due == now + WRITE_STALL_S
    assert timed.find_overdue(left - WRITE_STALL_BYTES + 1, timed.due + 0.1) == "taking"
