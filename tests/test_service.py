"""Which app a path belongs to, and what becomes of whatever apps raise."""

import logging

import pytest

from uvimg.core.errors import NotFound, UvimgError
from uvimg.core.message import Request, Response
from uvimg.service import Service


class Named:
    """An app that answers with its name, and knows nothing below /missing or of anything called broken."""

    def __init__(self, name: str) -> None:
        self.name = name

    def try_now(self, request: Request) -> Response | None:
        if "broken" in request.path:
            raise ZeroDivisionError
        if "missing" in request.path:
            raise NotFound()
        return Response(200, {}, self.name.encode(), route="any")

    async def handle(self, request: Request) -> Response:
        response = self.try_now(request)
        assert response is not None
        return response

    def refuse(self, request: Request, error: UvimgError) -> Response:
        # As zimg's clients want it.
        return Response(200, {}, f"{self.name}: {error.status}".encode(), route="any")


def ask(path: str) -> Request:
    return Request("GET", path, path, "", {}, "127.0.0.1", 0, None)  # type: ignore[arg-type]


@pytest.fixture
def service() -> Service:
    pages = {"/health": Named("operations")}
    mounts = {"kv": Named("kv"), "docs": Named("docs")}
    return Service(Named("images"), None, lambda: 0, pages=pages, mounts=mounts)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/", "images"),
        ("/0123", "images"),
        ("/kv", "kv"),
        ("/kv/", "kv"),
        ("/kv/db/key", "kv"),
        ("/docs/a", "docs"),
        ("/kvx", "images"),
        ("/images/kv", "images"),
        ("//kv/a", "images"),
        ("kv/a", "images"),
        ("*", "images"),
        ("", "images"),
        ("/health", "operations"),
        # Whole paths alone: an app at the root keeps what lies below.
        ("/health/", "images"),
        ("/health/x", "images"),
    ],
)
async def test_a_path_belongs_to_one_app(service: Service, path: str, name: str) -> None:
    for response in (service.try_now(ask(path)), await service.handle(ask(path))):
        assert response is not None
        assert response.body == name.encode()
    assert sum(service.metrics.tallies[name, "any", 200, ""].rest().counts) == 2


def test_an_error_is_told_by_its_app_and_counted_by_its_own_name(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.CRITICAL, "uvimg"):
        for path, told in (("/kv/missing", b"kv: 404"), ("/docs/broken", b"docs: 500")):
            response = service.try_now(ask(path))
            assert response is not None
            assert (response.status, response.body) == (200, told)
    counted = {key for key, tally in service.metrics.tallies.items() if sum(tally.rest().counts) == 1}
    assert counted == {("kv", "any", 200, "NotFound"), ("docs", "any", 200, "UvimgError")}


def test_a_repeated_answer_is_counted_with_the_first(service: Service) -> None:
    response = service.try_now(ask("/kv/a"))
    assert response is not None
    for _ in range(3):
        assert response.tally is not None
        service.repeat(ask("/kv/a"), response.tally, 200, 2, "127.0.0.1")
    times = service.metrics.tallies["kv", "any", 200, ""].rest()
    assert (sum(times.counts), times.repeated) == (4, 3)
