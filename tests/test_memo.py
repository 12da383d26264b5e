"""What is given again to an equal request, and when it is not."""

import time

import pytest

from tests.conftest import Server, make_photo
from uvimg.core.message import Request, Response
from uvimg.service import Service
from uvimg.web.memo import Memo

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


REQUEST = Request("GET", "/", "/", "", {}, "127.0.0.1", 0, None)  # type: ignore[arg-type]
ANSWER = b"HTTP/1.1 200 OK\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\nContent-Length: %d\r\n\r\n%s"


def keep(memo: Memo, key: bytes, body: bytes = b"x", **response: str) -> None:
    memo.begin(key)
    version = memo.begin(key)
    assert version is not None
    response = {"lasts": "while the store is unchanged", **response}
    memo.keep(key, version, ANSWER % (len(body), body), False, REQUEST, Response(200, {}, body, **response))  # type: ignore[arg-type]


def test_what_came_once_is_not_kept(memo: Memo) -> None:
    assert memo.begin(b"a") is None
    assert memo.begin(b"b") is None
    assert memo.begin(b"a") == 1


def test_an_answer_is_known_until_the_store_changes(memo: Memo, app: Changing) -> None:
    keep(memo, b"a")
    keep(memo, b"b", lasts="always")
    assert memo.recall(b"a", "") is not None
    app.version = 2
    assert memo.recall(b"a", "") is None
    assert memo.recall(b"b", "") is not None


def test_an_answer_looked_up_before_a_change_is_not_taken_for_one_behind_it(memo: Memo, app: Changing) -> None:
    memo.begin(b"a")
    before = memo.begin(b"a")
    assert before is not None
    app.version = 2
    memo.keep(b"a", before, ANSWER % (1, b"x"), False, REQUEST, Response(200, lasts="while the store is unchanged"))
    assert memo.recall(b"a", "") is None


def test_an_answer_that_does_not_last_is_not_kept(memo: Memo) -> None:
    keep(memo, b"a", lasts="not")
    assert memo.recall(b"a", "") is None


def test_the_date_is_today_s(memo: Memo) -> None:
    keep(memo, b"a", b"Date: never")
    known = memo.recall(b"a", "")
    assert known is not None
    year = time.strftime("%Y", time.gmtime()).encode()
    assert known.whole.count(year) == 1
    assert known.whole.endswith(b"Date: never")
    known.date(86_399.9)
    assert b"\r\nDate: Thu, 01 Jan 1970 23:59:59 GMT\r\n" in known.whole
    known.date(86_400)
    assert b"\r\nDate: Fri, 02 Jan 1970 00:00:00 GMT\r\n" in known.whole


def test_what_is_kept_is_bounded_and_what_is_asked_for_stays(memo: Memo) -> None:
    keep(memo, b"asked for")
    for number in range(1000):
        keep(memo, b"%d" % number, bytes(1000))
        assert memo.recall(b"asked for", "") is not None
    known = sum(memo.recall(b"%d" % number, "") is not None for number in range(1000))
    assert 0 < known * 1000 < 100_000


def test_a_memo_without_memory_keeps_nothing(app: Changing) -> None:
    nothing = Memo(Service(app, None, lambda: app.version), 0)
    keep(nothing, b"a")
    assert nothing.recall(b"a", "") is None


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
