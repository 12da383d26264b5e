"""The requests under tests/requests/ against every front-end: whole, a byte at a time, and among others.

How the files are written stands in their README.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conversation import Answer, Hall, Unreadable, one_at_a_time, read_answers, talk_all

EVERY_FRONT_END = True
FOLDER = Path(__file__).parent / "requests"


@dataclass
class Case:
    """One request and its answer."""

    where: str
    app: str
    name: str
    data: bytes = b""
    status: int = 0
    closes: bool = False
    has: dict[str, str] = field(default_factory=dict)
    lacks: list[str] = field(default_factory=list)
    body: bytes | None = None
    answers_head: bool = False
    may_continue: bool = False
    # By front-end: the answer, in the words of the file.
    exceptions: dict[str, str] = field(default_factory=dict)
    why: str = ""


_ESCAPES = {"r": b"\r", "n": b"\n", "t": b"\t", "0": b"\0", "\\": b"\\"}
_PART = re.compile(r"\\x([0-9a-f]{2})|\\\((\d+) ([^)]*)\)|\\([rnt0\\])|([^\\])")


def spell(text: str) -> bytes:
    """The bytes that a line of a file means."""
    data, at = b"", 0
    while at < len(text):
        found = _PART.match(text, at)
        assert found is not None, text
        at = found.end()
        if found[1]:
            data += bytes.fromhex(found[1])
        elif found[2]:
            data += spell(found[3]) * int(found[2])
        else:
            data += _ESCAPES[found[4]] if found[4] else found[5].encode("ascii")
    return data


def read_cases(path: Path) -> Iterator[Case]:
    app, case = "wire", None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        mark, _, rest = line.partition(" ")
        if mark == "==":
            if case is not None:
                yield case
            case = Case(f"{path.name}:{number}", app, rest)
        elif case is None:
            app = rest if mark == "on" else app
        elif mark == ">":
            case.data += spell(rest)
        elif mark == "<":
            status, connection = rest.split()
            case.status, case.closes = int(status), {"close": True, "keep": False}[connection]
        elif mark == "<+":
            name, _, value = rest.partition(": ")
            case.has[name.lower()] = value
        elif mark == "<-":
            case.lacks.append(rest.lower())
        elif mark == "<=":
            case.body = spell(rest)
        elif mark == "<0":
            case.answers_head = True
        elif mark == "<?":
            case.may_continue = True
        elif mark == "except":
            front_end, _, told = rest.partition(": ")
            answer, _, why = told.partition("; ")
            assert why, f"{path.name}:{number}: an exception says why"
            case.exceptions[front_end] = answer
        else:
            case.why += line
    assert case is not None, path
    yield case


CASES = [case for path in sorted(FOLDER.glob("*.txt")) for case in read_cases(path)]
FRONT = {"wire": b"GET /now/front HTTP/1.1\r\nHost: x\r\n\r\n", "images": b"GET /echo HTTP/1.1\r\nHost: x\r\n\r\n"}
SLOW = {"wire": b"GET /slow/front?3 HTTP/1.1\r\nHost: x\r\n\r\n", "images": FRONT["images"]}
BEHIND = {
    "wire": b"GET /now/behind HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "images": b"GET /favicon.ico HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
}
# What stands in the answers to these and in no other.
IN_FRONT = {"wire": b"x /now/front", "images": b"zimg works!"}
IN_SLOW = {"wire": b"/slow/front?3", "images": b"zimg works!"}
IN_BEHIND = {"wire": b"x /now/behind", "images": b"<svg"}


@pytest.fixture(scope="module")
def hall(front_end: dict[str, str]) -> Iterator[Hall]:
    with Hall(front_end["front_end"], front_end["loop"]) as opened:
        yield opened


@pytest.fixture(scope="module")
def ports(hall: Hall) -> dict[str, int]:
    return {"wire": hall.serve_wire(), "images": hall.serve_images(max_size=4096)}


def fault(case: Case, received: bytes, before: int) -> str | None:
    """What is wrong with what came for a case, behind which a good request stood and `before` which so many did."""
    bodiless = [before] if case.answers_head else []
    try:
        answers = read_answers(received, bodiless)
    except Unreadable as exc:
        return f"unreadable: {exc}"
    continued = [answer for answer in answers if answer.status == 100]
    answers = [answer for answer in answers if answer.status != 100]
    if (continued and not case.may_continue) or len(continued) > 1:
        return "100 Continue came"
    front, rest = answers[:before], answers[before:]
    expected = [IN_FRONT[case.app], IN_SLOW[case.app]][:before]
    if [answer.status for answer in front] != [200] * before or any(
        text not in answer.body for text, answer in zip(expected, front, strict=True)
    ):
        return f"what stands before is not answered in order: {received!r}"
    if not rest:
        return "there is no answer"
    answer, behind = rest[0], rest[1:]
    if (wrong := _fault_of_answer(case, answer)) is not None:
        return wrong
    if case.closes:
        if behind or IN_BEHIND[case.app] in received:
            return "something behind it is answered"
        # HTTP/1.0 ends by itself.
        return None if answer.is_last else "it does not say that it is the last"
    if answer.is_last or [each.status for each in behind] != [200] or IN_BEHIND[case.app] not in behind[0].body:
        return f"what stands behind is not answered: {received!r}"
    return None


def _fault_of_answer(case: Case, answer: Answer) -> str | None:
    if answer.status != case.status:
        return f"{answer.status} instead of {case.status}"
    for name, value in case.has.items():
        if answer.fields.get(name) != value:
            return f"{name}: {answer.fields.get(name)}"
    for name in case.lacks:
        if name in answer.fields:
            return f"{name}: {answer.fields[name]}"
    if case.body is not None and answer.body != case.body:
        return f"body {answer.body!r}"
    return None


def judge(case: Case, front_end: str, received: bytes, before: int = 0) -> str | None:
    """What is wrong with a case, an exception that is none any more included."""
    wrong = fault(case, received, before)
    told = case.exceptions.get(front_end)
    if told is None:
        return wrong and f"{wrong}: {received[:300]!r}"
    if told == "any":
        return None
    if wrong is None:
        return "answered as by the others: delete the exception"
    status, connection = told.split()
    allowed = Case(case.where, case.app, case.name, status=int(status), closes=connection == "close")
    allowed.answers_head, allowed.may_continue = case.answers_head, True
    wrong = fault(allowed, received, before)
    return wrong and f"not even its exception: {wrong}: {received[:300]!r}"


def judge_all(
    hall: Hall, ports: dict[str, int], pieces_of: Callable[[Case], list[bytes]], before: int = 0, whole: bool = False
) -> list[str]:
    """What is wrong with the cases when they are sent in these pieces; no pieces leave a case out."""
    wrong = []
    for app, port in ports.items():
        sent = []
        for case in (case for case in CASES if case.app == app):
            told = case.exceptions.get(hall.front_end, "close" if case.closes else "keep")
            if told == "any":
                continue
            pieces = pieces_of(case)
            if whole and not told.endswith("close"):
                # To what closes the connection nothing is added: the server has to end it by itself.
                pieces.append(BEHIND[case.app])
            if pieces:
                sent.append((case, pieces))
        received = hall.run(talk_all(port, [pieces for _, pieces in sent]))
        for (case, _), got in zip(sent, received, strict=True):
            if (what := judge(case, hall.front_end, got, before)) is not None:
                wrong.append(f"{case.where} {case.name}: {what}")
    return wrong


def test_every_file_is_read_and_every_case_says_why() -> None:
    assert len(CASES) > 100
    assert len({case.name for case in CASES}) == len(CASES)
    assert [case.where for case in CASES if not (case.data and case.status and case.why)] == []


def test_a_request_is_answered_as_its_file_says(hall: Hall, ports: dict[str, int]) -> None:
    assert judge_all(hall, ports, lambda case: [case.data], whole=True) == []


def test_a_request_is_answered_the_same_when_each_byte_comes_alone(hall: Hall, ports: dict[str, int]) -> None:
    assert judge_all(hall, ports, lambda case: [*one_at_a_time(case.data), BEHIND[case.app]]) == []


def test_a_request_is_answered_the_same_among_others_in_one_packet(hall: Hall, ports: dict[str, int]) -> None:
    def pack(case: Case) -> list[bytes]:
        return [FRONT[case.app] + SLOW[case.app] + case.data + BEHIND[case.app]]

    assert judge_all(hall, ports, pack, before=2) == []


# Of the places where a case can be cut, each takes one in so many, beginning elsewhere than its neighbour.
_STRIDE = 20


def test_a_request_is_answered_the_same_wherever_it_is_cut_in_two(hall: Hall, ports: dict[str, int]) -> None:
    places = {case.where: number % _STRIDE for number, case in enumerate(CASES)}

    def cut(case: Case) -> list[bytes]:
        at = places[case.where]
        places[case.where] += _STRIDE
        if not 0 < at < min(len(case.data), 1000):
            return []
        return [case.data[:at], case.data[at:] + BEHIND[case.app]]

    for _ in range(max(len(case.data) for case in CASES if len(case.data) < 1000) // _STRIDE):
        assert judge_all(hall, ports, cut) == []
