"""What is given again to an equal request, and when it is not."""

import time
from typing import Any

import pytest

from tests.conftest import Server, make_photo
from uvimg.core.errors import StoreDown
from uvimg.core.http1 import parse_head
from uvimg.core.message import NO_BODY, Request, Response
from uvimg.service import Service
from uvimg.web.memo import Known, Memo, Watch

EVERY_FRONT_END = True


class Changing:
    """An app behind whose back nothing changes but its version."""

    version = 1

    def try_now(self, request: Request) -> Response | None:
        return None

    async def handle(self, request: Request) -> Response:
        return Response(204)

    def refuse(self, request: Request, error: Exception) -> Response:
        return Response(500)


@pytest.fixture
def app() -> Changing:
    return Changing()


@pytest.fixture
def memo(app: Changing) -> Memo:
    return Memo(Service(app, None, lambda: app.version), 100_000)


ANSWER = b"HTTP/1.1 200 OK\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\nContent-Length: %d\r\n\r\n%s"


def spell(target: str, fields: str = "") -> bytes:
    return f"GET {target} HTTP/1.1\r\nHost: x\r\n{fields}\r\n".encode()


def ask(memo: Memo, target: str, fields: str = "") -> Known | None:
    """What a front-end does with a head that it is sent."""
    data = spell(target, fields)
    return memo.recall(data, "") or memo.recall_like(parse_head(data), data, "")


def begin(memo: Memo, target: str, fields: str = "") -> Watch | None:
    return memo.begin(parse_head(spell(target, fields)))


def keep(
    memo: Memo, target: str, fields: str = "", body: bytes = b"x", heeds: tuple[str, ...] = (), **response: Any
) -> None:
    begin(memo, target)
    watch = begin(memo, target, fields)
    assert watch is not None
    for name in heeds:
        watch.headers.get(name)
    response = {"lasts": "while the store is unchanged", **response}
    request = Request("GET", target, target, "", watch.headers, "127.0.0.1", 0, None)  # type: ignore[arg-type]
    memo.keep(watch, ANSWER % (len(body), body), False, request, Response(200, {}, body, **response))


def test_what_came_once_is_not_kept(memo: Memo) -> None:
    assert begin(memo, "/a") is None
    assert begin(memo, "/b") is None
    assert begin(memo, "/a") is not None


def test_an_answer_is_known_until_the_store_changes(memo: Memo, app: Changing) -> None:
    keep(memo, "/a")
    keep(memo, "/b", lasts="always")
    for _ in range(3):
        assert ask(memo, "/a") is not None
    app.version = 2
    assert ask(memo, "/a") is None
    assert ask(memo, "/b") is not None


def test_an_answer_looked_up_before_a_change_is_not_taken_for_one_behind_it(memo: Memo, app: Changing) -> None:
    begin(memo, "/a")
    before = begin(memo, "/a")
    assert before is not None
    app.version = 2
    request = Request("GET", "/a", "/a", "", {}, "127.0.0.1", 0, None)  # type: ignore[arg-type]
    memo.keep(before, ANSWER % (1, b"x"), False, request, Response(200, lasts="while the store is unchanged"))
    assert ask(memo, "/a") is None


def test_an_answer_that_does_not_last_is_not_kept(memo: Memo) -> None:
    keep(memo, "/a", lasts="not")
    assert ask(memo, "/a") is None


def test_only_fields_that_were_asked_for_tell_answers_apart(memo: Memo) -> None:
    keep(memo, "/a", "Range: bytes=0-1\r\nCookie: 1\r\n", b"part", heeds=("range",))
    keep(memo, "/a", "Cookie: 2\r\n", b"whole", heeds=("range",))
    for cookie in range(5):
        part = ask(memo, "/a", f"Cookie: {cookie}\r\nRange: bytes=0-1\r\n")
        whole = ask(memo, "/a", f"Cookie: {cookie}\r\n")
        assert part is not None
        assert part.whole.endswith(b"part")
        assert whole is not None
        assert whole.whole.endswith(b"whole")
    assert ask(memo, "/a", "Range: bytes=0-2\r\n") is None


def test_a_field_that_mattered_once_matters_from_then_on(memo: Memo) -> None:
    keep(memo, "/a", body=b"first")
    keep(memo, "/a", "If-Match: x\r\nIf-Range: y\r\n", b"second", heeds=("if-match", "if-range"))
    # What the first was made from is not known to be all that matters any more.
    assert ask(memo, "/a") is None
    found = ask(memo, "/a", "If-Match: x\r\nIf-Range: y\r\n")
    assert found is not None
    assert found.whole.endswith(b"second")
    assert ask(memo, "/a", "If-Match: x\r\n") is None


def test_an_answer_made_from_all_fields_is_not_kept(memo: Memo) -> None:
    begin(memo, "/a")
    watch = begin(memo, "/a")
    assert watch is not None
    assert dict(watch.headers) == {"host": "x"}
    request = Request("GET", "/a", "/a", "", watch.headers, "127.0.0.1", 0, None)  # type: ignore[arg-type]
    memo.keep(watch, ANSWER % (1, b"x"), False, request, Response(200, lasts="always"))
    assert ask(memo, "/a") is None


def test_other_fields_that_mattered_are_not_taken_for_those_that_do_now(memo: Memo) -> None:
    keep(memo, "/a", "If-Range: x\r\n", b"first", heeds=("if-range",))
    memo._heeded.clear()
    keep(memo, "/a", "If-Match: y\r\n", b"second", heeds=("if-match",))
    assert ask(memo, "/a", "If-Match: x\r\n") is None


def test_a_store_that_cannot_say_its_version_leaves_the_answer_to_the_app(memo: Memo, app: Changing) -> None:
    def fail() -> int:
        raise StoreDown

    keep(memo, "/a")
    assert ask(memo, "/a") is not None
    memo._service.version = fail
    assert ask(memo, "/a") is None
    assert begin(memo, "/a") is None


def test_what_is_remembered_holds_no_fields_and_no_connection(memo: Memo) -> None:
    keep(memo, "/a", "Cookie: 1\r\n")
    known = ask(memo, "/a")
    assert known is not None
    assert not known.request.headers
    assert known.request.body is NO_BODY


def test_the_date_is_today_s(memo: Memo) -> None:
    keep(memo, "/a", body=b"Date: never")
    known = ask(memo, "/a")
    assert known is not None
    year = time.strftime("%Y", time.gmtime()).encode()
    assert known.whole.count(year) == 1
    assert known.whole.endswith(b"Date: never")
    known.date(86_399.9)
    assert b"\r\nDate: Thu, 01 Jan 1970 23:59:59 GMT\r\n" in known.whole
    known.date(86_400)
    assert b"\r\nDate: Fri, 02 Jan 1970 00:00:00 GMT\r\n" in known.whole


def test_what_is_kept_is_bounded_and_what_is_asked_for_stays(memo: Memo) -> None:
    keep(memo, "/asked")
    for number in range(1000):
        keep(memo, f"/{number}", body=bytes(1000))
        assert ask(memo, "/asked") is not None
        ask(memo, f"/{number}")
        ask(memo, f"/{number}")
    known = sum(ask(memo, f"/{number}") is not None for number in range(1000))
    assert 0 < known * 1000 < 100_000


def test_a_memo_without_memory_keeps_nothing(app: Changing) -> None:
    nothing = Memo(Service(app, None, lambda: app.version), 0)
    assert [begin(nothing, "/a") for _ in range(3)] == [None] * 3


def test_what_is_deleted_is_gone_for_those_who_had_it_again_and_again(server: Server) -> None:
    data = make_photo(4711)
    image_id = server.upload(data)
    for _ in range(4):
        assert server.get(f"/{image_id}?p=0").content == data
    assert server.http.delete(f"{server.url}/images/{image_id}").status_code == 204
    assert server.get(f"/{image_id}?p=0").status_code == 404
    server.upload(data)
    for _ in range(4):
        assert server.get(f"/{image_id}?p=0").content == data


def test_an_answer_given_again_is_logged_with_its_own_peer(server: Server) -> None:
    for _ in range(5):
        server.get("/echo?logged")
    lines = [line for line in server.log.splitlines() if "/echo?logged" in line]
    assert len(lines) == 5
    assert all(" 127.0.0.1 GET /echo?logged 200 " in line for line in lines)
