"""What a method, a path and a query ask for, and that nothing strange asks for anything."""

import contextlib
import time
from urllib.parse import parse_qsl, quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from uvimg.core.errors import BadParameter, BadRequest, MethodNotAllowed, NotFound, NotImplementedHere
from uvimg.core.message import split_target
from uvimg.core.route import Describe, Options, Page, Params, Query, Remove, Show, Upload, read_fields, route

ID = "5f189d8ec57f5a5a0d3dcba47fa797e2"
SHA = ID * 2


def ask(method: str, target: str) -> Query:
    return route(method, *split_target(target))


def params(query: str) -> Params:
    found = route("GET", f"/{ID}", query)
    assert isinstance(found, Show)
    return found.params


@pytest.mark.parametrize(
    ("method", "target", "expected"),
    [
        ("GET", f"/{ID}", Show(ID, Params())),
        ("GET", f"/{ID.upper()}", Show(ID, Params())),
        ("HEAD", f"/{SHA}?w=5", Show(SHA, Params(w=5))),
        ("GET", f"/images/{SHA}.jpg?w=5", Show(SHA, Params(w=5, f="jpeg"))),
        ("GET", f"/images/{ID}.webp?f=webp", Show(ID, Params(f="webp"))),
        ("GET", f"/%35{ID[1:]}", Show(ID, Params())),
        ("GET", f"http://any.host:1/{ID}?w=5", Show(ID, Params(w=5))),
        ("GET", f"http://any.host?w=/{ID}", Page("index")),
        ("GET", f"/images/{ID}/info", Describe(ID)),
        ("GET", f"/info?md5={ID}", Describe(ID)),
        ("GET", "/info?md5=5", Describe(None)),
        ("GET", "/info", Describe(None)),
        ("POST", "/upload", Upload()),
        ("POST", "/", Upload()),
        ("POST", "/images", Upload()),
        ("DELETE", f"/images/{ID}", Remove(ID)),
        ("GET", f"/admin?md5={ID}&t=1", Remove(ID, by_get=True)),
        ("GET", "/admin", Page("admin")),
        ("HEAD", "/admin", Page("admin")),
        ("HEAD", "/", Page("index")),
        ("OPTIONS", f"/images/{ID}", Options("GET, HEAD, DELETE, OPTIONS")),
        ("OPTIONS", "*", Options("GET, HEAD, POST, DELETE, OPTIONS")),
        ("OPTIONS", "/admin?nonsense=1", Options("GET, HEAD, OPTIONS")),
    ],
)
def test_what_is_asked_for_is_found(method: str, target: str, expected: Query) -> None:
    assert ask(method, target) == expected


@pytest.mark.parametrize(
    "target",
    [
        f"//{ID}",
        f"/{ID}/",
        f"/{ID}.jpg",
        f"/{ID}%0a",
        f"/{ID}%00",
        f"/{ID}%20",
        f"/{ID};w=5",
        f"/%2535{ID[1:]}",
        f"x{ID}",
        f"*{ID}",
        "",
        f"/./{ID}",
        f"/x/../{ID}",
        f"/x/%2e%2e/{ID}",
        f"/images/../{ID}",
        f"/images/%2e%2e/{ID}",
        f"/images//{ID}",
        f"/images/{ID}/",
        f"/images/{ID}/info/",
        f"/images/{ID}/info/x",
        f"/images/{ID}.jpg/info",
        f"/images/{ID}/Info",
        "/images/..%2f..%2fetc%2fpasswd",
        "/Images",
        "/upload/",
        "/dump",
        "/" + quote("٣" * 32),
        "/%ff" + ID[1:],
        "//evil.example/%2e%2e",
    ],
)
def test_a_path_that_is_not_exactly_one_of_ours_is_nothing(target: str) -> None:
    for method in ("GET", "POST", "DELETE", "OPTIONS"):
        with pytest.raises(NotFound):
            ask(method, target)


@pytest.mark.parametrize(
    ("method", "target", "allow"),
    [
        ("POST", f"/{ID}", "GET, HEAD, OPTIONS"),
        ("DELETE", f"/{ID}", "GET, HEAD, OPTIONS"),
        ("PUT", f"/images/{ID}", "GET, HEAD, DELETE, OPTIONS"),
        ("DELETE", f"/images/{ID}.jpg", "GET, HEAD, OPTIONS"),
        ("GET", "/upload", "POST, OPTIONS"),
        ("GET", "/images", "POST, OPTIONS"),
        ("POST", f"/info?md5={ID}", "GET, HEAD, OPTIONS"),
        ("POST", f"/admin?md5={ID}&t=1", "GET, HEAD, OPTIONS"),
        # Only to look, never to delete.
        ("HEAD", f"/admin?md5={ID}&t=1", "GET, OPTIONS"),
        ("CONNECT", "/", "GET, HEAD, POST, OPTIONS"),
    ],
)
def test_a_wrong_method_is_told_the_right_ones(method: str, target: str, allow: str) -> None:
    with pytest.raises(MethodNotAllowed) as refused:
        ask(method, target)
    assert refused.value.headers["Allow"] == allow


@pytest.mark.parametrize(("method", "target"), [("BREW", "/"), ("get", "/"), ("", "/images"), ("BREW", "/nowhere")])
def test_a_method_that_nobody_knows_is_not_implemented_anywhere(method: str, target: str) -> None:
    with pytest.raises(NotImplementedHere):
        ask(method, target)


@pytest.mark.parametrize("name", ["w", "h", "p", "g", "x", "y", "r", "q"])
@pytest.mark.parametrize(
    "value",
    [
        *("1e3", "%2B5", "+5", "%205", " 5", "5%20", "5%0a", "5%00", "0x5", "5.0", "1_0", "--5", "-", "٣", "%D9%A3"),
        *("true", "NaN", "9" * 10, "9" * 5000, "%FF", "5%", "\udcff"),
    ],
)
def test_a_value_that_is_no_plain_whole_number_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(BadParameter) as refused:
        params(f"{name}={value}")
    assert refused.value.parameter == name


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("w=-1", "w"),
        ("p=5", "p"),
        ("p=-1", "p"),
        ("g=2", "g"),
        ("q=0", "q"),
        ("q=101", "q"),
        ("f=bmp", "f"),
        ("f=tiff", "f"),
        ("f=svg", "f"),
        ("f=jpeg%00", "f"),
        ("f=../jpeg", "f"),
    ],
)
def test_a_value_beyond_its_bounds_is_refused_by_name(query: str, name: str) -> None:
    with pytest.raises(BadParameter) as refused:
        params(query)
    assert refused.value.parameter == name


@pytest.mark.parametrize("target", [f"/images/{ID}.bmp", f"/images/{ID}.", f"/images/{ID}.jpg?f=png"])
def test_an_extension_is_a_format_and_agrees_with_f(target: str) -> None:
    with pytest.raises(BadParameter):
        ask("GET", target)


@pytest.mark.parametrize(
    "queries",
    [
        (
            "",
            "w=",
            "w=&h=",
            "unknown=1",
            "w=0",
            "r=360",
            "r=-720",
            "x=-1&y=-1",
            "p=1",
            "t=small",
            "%FF%FE=1",
            "&&&",
            "=",
            "?",
        ),
        ("w=5", "w=5&w=9", "w=&w=5", "w=05", "%77=5", "w=%35", "w=5&g=0", "a=1&w=5&b=2", "w=5&W=9", "w=5#w=9"),
        ("r=-90", "r=270", "r=630", "r=-450"),
        ("f=jpg", "f=jpeg", "f=JPEG", "f=Jpg"),
    ],
)
def test_queries_that_say_the_same_mean_the_same(queries: tuple[str, ...]) -> None:
    assert len({ask("GET", f"/{ID}?{query}") for query in queries}) == 1


def test_ten_thousand_parameters_are_refused_at_once() -> None:
    started = time.process_time()
    for query in ("&".join(f"p{number}=1" for number in range(10_000)), "w=1&" * 10_000, "&" * 60_000):
        with pytest.raises(BadRequest):
            params(query)
    assert time.process_time() - started < 0.5


paths = st.builds(
    "".join,
    st.lists(
        st.sampled_from(["/", "//", "images", ID, SHA, ".", "..", ".jpg", "info", "admin", "upload", "%2e", "\0", "\n"])
        | st.text(max_size=3),
        max_size=6,
    ),
)
queries = st.builds(
    "&".join,
    st.lists(
        st.builds("{}={}".format, st.sampled_from([*"whpgxyrqft", "md5"]) | st.text(max_size=2), st.text(max_size=6))
        | st.builds("{}={}".format, st.sampled_from("whpgxyrq"), st.integers()),
        max_size=5,
    ),
)


@given(
    st.sampled_from(["GET", "HEAD", "POST", "DELETE", "OPTIONS"]) | st.text(), paths | st.text(), queries | st.text()
)
@example("GET", "/\ud800", "w=\udfff&\ud800=1")
def test_no_text_at_all_gets_more_than_one_of_our_errors(method: str, path: str, query: str) -> None:
    for given_path, given_query in ((path, query), split_target(f"{path}?{query}"), split_target(path)):
        found: Query | None = None
        with contextlib.suppress(BadRequest, NotFound, MethodNotAllowed, NotImplementedHere):
            found = route(method, given_path, given_query)
        if isinstance(found, Show):
            assert all(abs(value) < 10**9 for value in (found.params.w, found.params.h, found.params.x, found.params.y))


@given(st.text())
def test_a_split_target_can_always_be_written_out_again(target: str) -> None:
    path, query = split_target(target)
    (path + query).encode()


@given(st.text(st.characters(codec="utf-8"), max_size=20))
def test_a_path_is_decoded_exactly_once(path: str) -> None:
    assert split_target("/" + quote(quote(path, safe=""), safe=""))[0] == "/" + quote(path, safe="")
    assert split_target("/" + quote(path, safe=""))[0] == "/" + path


@given(
    st.lists(st.sampled_from(["a", "b", "w", "=", "&", "&", "=", "%41", "%", "+", "%c3%a9", "%ff", "1", "é"])).map(
        "".join
    )
)
def test_a_query_is_read_as_the_standard_library_reads_forms(query: str) -> None:
    pairs = parse_qsl(query, errors="replace")
    assert read_fields(query) == dict(reversed(pairs))
