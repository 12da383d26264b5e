"""Types that a Lua script makes: zimg's scripts as they are, hostile ones contained, and plans like any others."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import pyvips
import requests
from hypothesis import strategies as st

from bench import corpus
from tests.conftest import Server, decode, make_photo
from tests.test_wire import wait_until
from uvimg.core.errors import BadParameter
from uvimg.core.params import Params
from uvimg.core.plan import Crop, Encode, Gray, Load, Rotate, Rules, Scale, Source, make_plan
from uvimg.core.script import DONE, FAILED, REFUSED, Recording
from uvimg.imaging.scripts import Run, Script, ScriptError

ROOT = Path(__file__).parent.parent
PHOTO = Source("jpeg", 640, 856, quality=90)
RULES = Rules(max_side=2000, max_pixels=3_000_000)


def learn(body: str, level: int = 7) -> Script:
    """A script whose f() is this."""
    return Script("s.lua", f"function f()\n{body}\nend".encode(), level, RULES)


def ask(body: str, source: Source = PHOTO, type: str = "name") -> Run:
    return learn(body).ask(type, source)


def said(run: Run) -> list[str]:
    return [line.text for line in run.printed]


# What the calls say and do


@pytest.mark.parametrize(
    ("call", "value"),
    [
        ("zimg.type()", "name"),
        ("zimg.cols()", "640"),
        ("zimg.rows()", "856"),
        ("zimg.quality()", "90"),
        ("zimg.format()", "JPEG"),
        # Those that ship with zimg pass things that it never looked at.
        ("zimg.cols(im)", "640"),
        ("zimg.scale(100, 50) .. zimg.cols() .. 'x' .. zimg.rows()", "1100x50"),
        ("zimg.scale(99.9, '50') .. zimg.cols() .. 'x' .. zimg.rows()", "199x50"),
        ("zimg.scale(0, 50)", "0"),
        ("zimg.scale(-1, 50)", "0"),
        ("zimg.scale(0/0, 50)", "0"),
        ("zimg.scale(100)", "0"),
        ("zimg.scale({}, 'x')", "0"),
        ("zimg.scale(2001, 1)", "-1"),
        ("zimg.scale(1/0, 1)", "-1"),
        ("zimg.scale(1900, 1900)", "-1"),
        ("zimg.crop(600, 800, 100, 100) .. zimg.cols() .. 'x' .. zimg.rows()", "140x56"),
        ("zimg.crop(-10, -10, 100, 100) .. zimg.cols() .. 'x' .. zimg.rows()", "190x90"),
        ("zimg.crop(40, 56, 0, 0) .. zimg.cols() .. 'x' .. zimg.rows()", "1600x800"),
        ("zimg.crop(640, 0, 1, 1)", "0"),
        ("zimg.crop(0, 0, -1, 1)", "0"),
        ("zimg.rotate(90) .. zimg.cols() .. 'x' .. zimg.rows()", "1856x640"),
        ("zimg.rotate(-270.2) .. zimg.cols()", "1856"),
        ("zimg.rotate(45) .. zimg.cols() .. 'x' .. zimg.rows()", "11060x1060"),
        ("zimg.rotate(720) .. zimg.cols()", "1640"),
        ("zimg.rotate(1/0)", "0"),
        ("zimg.gray() .. zimg.cols()", "1640"),
        ("zimg.set_quality(50) .. zimg.quality()", "150"),
        ("zimg.set_quality(0)", "0"),
        ("zimg.set_quality(101)", "0"),
        ("zimg.set_format('webp') .. zimg.format()", "1WEBP"),
        ("zimg.set_format('JPG') .. zimg.format()", "1JPEG"),
        ("zimg.set_format('tiff')", "0"),
        ("zimg.set_format()", "0"),
        ("tostring((zimg.ret(1)))", "nil"),
        ("('x'):rep(3) .. string.format('%d', 7) .. table.concat({1, 2}) .. math.floor(1.5)", "xxx7121"),
        ("#('a b c'):gsub('%s', '') .. (('k=v'):match('=(.)'))", "3v"),
        ("select('#', unpack({1, 2, 3})) .. tostring(pcall(error))", "3false"),
        ("coroutine.wrap(function() coroutine.yield(zimg.scale(7, 7)) end)() .. zimg.cols()", "17"),
    ],
)
def test_every_call_of_the_api_answers_as_zimg_does(call: str, value: str) -> None:
    run = ask(f"log.print(6, {call})")
    assert (run.error, said(run)) == ("", [value])


@pytest.mark.parametrize(
    ("body", "params"),
    [
        ("zimg.scale(100, 134)", Params(w=100, q=90)),
        ("zimg.scale(100, 134) zimg.crop(0, 17, 100, 100) zimg.gray()", Params(w=100, h=100, g=1, q=90)),
        # As zimg's own sample does it. Loading the whole of it is what must not happen.
        ("zimg.crop(0, 108, 640, 640) zimg.scale(100, 100) zimg.gray()", Params(w=100, h=100, g=1, q=90)),
        ("zimg.gray() zimg.crop(0, 108, 640, 640) zimg.scale(100, 100)", Params(w=100, h=100, g=1, q=90)),
        ("zimg.scale(640, 856) zimg.scale(320, 428)", Params(w=50, p=3, q=90)),
        ("zimg.crop(100, 100, 500, 600) zimg.crop(20, 30, 40, 50)", Params(x=120, y=130, w=40, h=50, q=90)),
        ("zimg.crop(0, 0, 640, 856)", Params(q=90)),
        ("zimg.scale(144, 144) zimg.rotate(45)", Params(w=144, h=144, p=0, r=45, q=90)),
        ("zimg.set_quality(33) zimg.set_format('png')", Params(q=33, f="png")),
        ("zimg.set_quality(99)", Params(q=90)),
        ("zimg.set_format('gif') zimg.set_format('webp') zimg.rotate(-90)", Params(r=270, q=90, f="webp")),
    ],
)
@pytest.mark.parametrize("alpha", [False, True])
def test_a_script_makes_the_plan_that_its_parameters_make(body: str, params: Params, alpha: bool) -> None:
    source = Source("jpeg", 640, 856, quality=90, has_alpha=alpha, managed=True)
    assert ask(body, source).recording.plan() == make_plan(params, source, 0, RULES)


@pytest.mark.parametrize(
    ("body", "key"),
    [
        # What enlarges or comes later has steps of its own.
        ("zimg.crop(0, 0, 20, 30) zimg.scale(200, 300)", "640x856-c0.0.20.30-s200x300-jpeg90.0"),
        ("zimg.scale(10, 10) zimg.scale(20, 20)", "10x10-s20x20-jpeg90.0"),
        ("zimg.rotate(90) zimg.scale(20, 10)", "640x856-r90.ffffff-s20x10-jpeg90.0"),
        ("zimg.rotate(90) zimg.crop(1, 2, 3, 4) zimg.scale(2, 2)", "640x856-r90.ffffff-c1.2.3.4-s2x2-jpeg90.0"),
        ("zimg.crop(8, 0, 632, 856) zimg.scale(1, 1)", "1x1-jpeg90.0"),
        ("", "640x856-jpeg90.0"),
    ],
)
def test_calls_in_any_order_become_steps_in_that_order(body: str, key: str) -> None:
    assert ask(body).recording.plan().key == key


def test_a_picture_is_as_people_see_it_and_what_is_not_known_of_it_is_the_settings() -> None:
    turned = Source("png", 640, 856, orientation=6, frames=1)
    run = ask("log.print(6, zimg.cols() .. ' ' .. zimg.quality() .. zimg.format()) zimg.set_format('jpeg')", turned)
    assert said(run) == ["856 100PNG"]
    assert run.recording.plan().key == "856x640-jpeg75.0"


def test_an_animation_keeps_its_frames_as_far_as_its_largest_moment_allows() -> None:
    source = Source("gif", 100, 100, frames=50)
    assert ask("zimg.scale(50, 50)", source).recording.plan().key == "50x50x50-gif0.3"
    # 1000 × 1000 are three frames' worth of the limit, though they are small in the end.
    body = "zimg.scale(1000, 1000) zimg.crop(0, 0, 20, 20)"
    assert ask(body, source).recording.plan().key == "1000x1000x3-c0.0.20.20-gif0.3"


def test_what_a_script_makes_is_bounded() -> None:
    recording = Recording(PHOTO, RULES)
    assert {recording.rotate(90) for _ in range(16)} == {DONE}
    assert recording.rotate(90) == REFUSED
    # An image that was uploaded under wider limits may keep its size, not more.
    large = Recording(Source("png", 5000, 4000), RULES)
    assert (large.scale(5000, 4000), large.scale(5001, 1), large.crop(0, 0, 5000, 1)) == (DONE, REFUSED, DONE)
    assert Recording(PHOTO, RULES).set_format("") == FAILED
    webp = Recording(Source("png", 1, 1), Rules(max_side=20_000))
    assert (webp.scale(17_000, 1), webp.set_format("webp")) == (DONE, DONE)
    with pytest.raises(BadParameter):
        webp.plan()


SIDES = st.integers(-50, 2500)
CALLS = st.one_of(
    st.tuples(st.just("scale"), SIDES, SIDES),
    st.tuples(st.just("crop"), SIDES, SIDES, SIDES, SIDES),
    st.tuples(st.just("rotate"), st.one_of(st.sampled_from((90, 180, 270)), st.integers(-400, 400))),
    st.tuples(st.just("gray")),
)


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(st.integers(1, 3000), st.integers(1, 3000), st.lists(CALLS, max_size=24))
def test_whatever_is_called_each_step_fits_the_one_before(width: int, height: int, calls: list[Any]) -> None:
    recording = Recording(Source("png", width, height), RULES)
    for name, *arguments in calls:
        before = recording.size
        done = getattr(recording, name)(*arguments)
        if name == "scale" and done == DONE:
            assert recording.size == tuple(arguments)
        elif done != DONE:
            assert recording.size == before
    load, *steps, encode = recording.plan().steps
    assert isinstance(load, Load)
    assert isinstance(encode, Encode)
    size = load.width, load.height
    for step in steps:
        assert max(size) <= max(RULES.max_side, width, height)
        assert size[0] * size[1] <= max(RULES.max_pixels, width * height)
        if isinstance(step, Crop):
            assert step.left >= 0 <= step.top
            assert step.left + step.width <= size[0]
            assert step.top + step.height <= size[1]
        if not isinstance(step, Gray):
            assert isinstance(step, Crop | Scale | Rotate)
            size = step.width, step.height
        assert min(size) > 0
    assert size == recording.size


# Scripts of the kind that people have

# In the manner of zimg's: it says that it failed and goes on all the same, and prints as it goes.
OLD = b"""\xef\xbb\xbf#!/usr/bin/lua
LOG_DEBUG, LOG_INFO = 7, 6
counter = (counter or 0) + 1

local kinds = {
    face   = { edge = 64, turn = 180, grey = 1, q = 60, fmt = 'PNG' },
    strip  = { wide = 320 },
    asis   = {},
}

local function cut_to_square(edge)
    local c, r = zimg.cols(), zimg.rows()
    local short, x, y = math.min(c, r), 0, 0
    if c > r then x = math.ceil((c - r) / 2) else y = math.ceil((r - c) / 2) end
    local got = zimg.crop(x, y, short, short)
    log.print(LOG_DEBUG, "crop said " .. got)
    if got ~= 1 then return -1 end
    return zimg.scale(edge, edge)
end

function f()
    local code = -1
    local kind = kinds[zimg.type()]
    if kind == nil then
        zimg.ret(code)
    end
    local switch = {
        [1] = function() code = cut_to_square(kind.edge) end,
        [2] = function() code = zimg.scale(kind.wide, math.ceil(kind.wide / zimg.cols() * zimg.rows())) end,
        [3] = function() code = 0 end,
    }
    switch[kind.edge and 1 or kind.wide and 2 or 3]()
    if kind.turn then code = zimg.rotate(kind.turn) end
    if kind.grey == 1 then code = zimg.gray() end
    if kind.q and zimg.quality() > kind.q then zimg.set_quality(kind.q) end
    if not string.find(zimg.format(), "GIF") then code = code == 0 and 0 or zimg.set_format(kind.fmt or "JPEG") end
    log.print(LOG_INFO, string.format("%s: %d x %d, run %d", zimg.type(), zimg.cols(), zimg.rows(), counter))
    zimg.ret(code)
end

log.print(LOG_INFO, "read")
"""


def test_a_script_in_zimgs_manner_runs_unchanged() -> None:
    script = Script("old.lua", OLD, 7, RULES)
    assert [line.text for line in script.printed] == ["read"]
    face = script.ask("face", PHOTO)
    assert (face.code, face.error) == (1, "")
    assert face.recording.plan().key == "64x86-c0.11.64.64-r180.ffffff-g-png0.6"
    assert said(face) == ["crop said 1", "face: 64 x 64, run 1"]
    strip = script.ask("strip", PHOTO)
    assert (strip.code, strip.recording.plan().key) == (1, "320x428-jpeg90.0")
    assert script.ask("asis", PHOTO).code == 0
    # It says that it failed, goes on and fails: that is an answer, not an error.
    unknown = script.ask("other", PHOTO)
    assert unknown.code == -1
    assert re.fullmatch(r"old\.lua:\d+: attempt to index local 'kind' \(a nil value\)", unknown.error)


def test_the_shipped_script_knows_its_types() -> None:
    script = Script("types.lua", (ROOT / "conf/scripts/types.lua").read_bytes(), 7, RULES)
    wanted = {
        "test": "100x134-c0.17.100.100-r90.ffffff-g-jpeg75.0",
        "original": "640x856-jpeg70.0",
        "thumb300": "300x401-c0.50.300.300-jpeg85.0",
        "square": "500x669-c0.84.500.500-jpeg85.0",
        "thumbnail": "90x120-jpeg85.0",
        "small": "150x200-jpeg85.0",
        "middle": "440x589-jpeg90.0",
        "large": "640x856-jpeg90.0",
        "webp500": "500x669-webp90.2",
        "crop200": "640x856-c220.328.200.200-jpeg90.0",
        "none": None,
    }
    for name, key in wanted.items():
        run = script.ask(name, PHOTO)
        assert (run.error, run.code) == ("", 1 if key else -1)
        assert key is None or run.recording.plan().key == key
    assert script.ask("small", Source("gif", 900, 300, frames=5)).recording.plan().key == "200x67x5-gif0.3"


# Errors


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"\n\nx = = 1\n", "s.lua:3: unexpected symbol near '='"),
        (b"\nlocal t = nil\nt.x = 1\n", "s.lua:3: attempt to index local 't' (a nil value)"),
        (b"error({})", "s.lua: (table)"),
        (b"error('two\\nlines\\27[1m')", "s.lua:1: two"),
        (b"error('\\27[1m\\200', 0)", "s.lua: \N{REPLACEMENT CHARACTER}[1m\N{REPLACEMENT CHARACTER}"),
        (b"\nlocal x = ('y'):find('[')", "s.lua:2: malformed pattern (missing ']')"),
        (b"\nlocal x = string.gsub({}, 'x', 'y')", "s.lua:2: bad argument #1 to '?' (string expected, got table)"),
        (b"\nlocal x = ('y'):gsub('y',\nerror)", "s.lua:2: y"),
        (b"\nlocal x = ('y'):gsub('y',\nfunction() return nil .. 1 end)", "s.lua:3: attempt to concatenate a nil"),
        (b"\nlocal x = ('y'):find(('y'):rep(1001))", "s.lua:2: the pattern is too long"),
        (b"\nlocal x = unpack({}, 1, 2^31)", "s.lua:2: too many results to unpack"),
        (b"g = 1\n", "s.lua: it defines no function f()"),
        (b"f = {}\n", "s.lua: it defines no function f()"),
        (b"", "s.lua: it defines no function f()"),
        (b"#!/usr/bin/lua\n\nf = zimg.cols()", "s.lua:3: zimg is there for f() alone"),
        (b"\x1bLuaQ\0\1\4\x08\4\x08\0", "s.lua: it is compiled; only the text of a script is taken"),
        (b"error('', 0)", "s.lua: it failed without a word"),
        (b"error('\\nof Lua', 0)", "s.lua: it failed without a word"),
        (b"\xef\xbb\xbf\x1bLJ\2", "s.lua: it is compiled; only the text of a script is taken"),
        (b"local s = 'x' while true do s = s .. s end", "s.lua: not enough memory"),
        (b"x = '" + b"y" * 40_000_000 + b"'", "s.lua: it needs too much memory"),
    ],
    ids=range(21),
)
def test_a_broken_script_is_told_with_file_and_line(text: bytes, told: str) -> None:
    with pytest.raises(ScriptError) as caught:
        Script("s.lua", text, 7, RULES)
    assert str(caught.value).startswith(told)


def test_an_error_without_words_is_an_error() -> None:
    assert ask("zimg.ret(1) error('', 0)").error == "s.lua: it failed without a word"


def test_what_a_script_prints_is_bounded_and_printable() -> None:
    run = ask("for i = 1, 1e4 do log.print(i % 10 - 1, 'line\\n\\27[31m ' .. i) end print(nil)")
    assert len(run.printed) == 100
    assert said(run)[:2] == ["line", "line"]
    assert {line.level for line in run.printed} == set(range(8))
    long = ask("for i = 1, 1e3 do log.print(3, ('x'):rep(1e4)) end")
    assert sum(map(len, said(long))) == 10_000
    assert max(map(len, said(long))) == 400
    # Below the log's own level nothing is carried anywhere.
    quiet = Script(
        "s.lua", b"function f() log.print(7, 'no') log.print(4, 'yes') log.print() print('no') end", 4, RULES
    )
    assert said(quiet.ask("x", PHOTO)) == ["yes", "(nil)"]


# Hostile ones

# Each is a statement that must hold, or fail with an error that a script may well get.
HOSTILE = {
    "os": "assert(os == nil and io == nil and debug == nil and package == nil and require == nil and module == nil)",
    "loaders": "assert(not (load or loadstring or loadfile or dofile or loadlib))",
    "environments": "assert(getfenv == nil and setfenv == nil and newproxy == nil)",
    "python": "assert(python == nil and ffi == nil and jit == nil)",
    "dump": "assert(string.dump == nil and ('').dump == nil and not pcall(function() return ('x'):dump() end))",
    "string's metatable": "assert(getmetatable('') == false and not pcall(setmetatable, '', {}))",
    "globals": "assert(_G.os == nil and _G._G == _G and rawget(_G, 'debug') == nil)",
    "metatables of functions": "assert(getmetatable(zimg.scale) == nil and getmetatable(zimg) == nil)",
    "no foreign thing": (
        "local function walk(t, seen) for k, v in pairs(t) do assert(type(v) ~= 'userdata' and type(k) ~= 'userdata') "
        "if type(v) == 'table' and not seen[v] then seen[v] = true walk(v, seen) end end end walk(_G, {})"
    ),
    "errors of the door": (
        "for _, v in pairs({{}, print, true, '\\255\\0', coroutine.create(print), 0/0, 1/0, -1/0, 2^63, '0x10'}) do "
        "for name, call in pairs(zimg) do local _, why = pcall(call, v, v, v, v) assert(type(why) ~= 'userdata') end "
        "pcall(log.print, v, v) end"
    ),
    "yields through the door": (
        "local c = coroutine.wrap(function() for i = 1, 9 do zimg.gray() coroutine.yield() end end) c() c()"
    ),
    "finalizers": "setmetatable({}, {__gc = error}) collectgarbage() collectgarbage('stop')",
    "error objects": "local o = setmetatable({}, {__tostring = error}) pcall(error, o) error(o)",
    "strings without end": "local s = 'x' while true do s = s .. s end",
    "tables without end": "local t = {} for i = 1, 1e9 do t[i] = i end",
    "a huge string": "return ('x'):rep(1e9)",
    "a size that overflows": "return ('x'):rep(1e18), ('x'):rep(-1e18), ('x'):rep(2^31), ('x'):rep(2^32 + 1)",
    "a huge concatenation": "local t = {} for i = 1, 4e3 do t[i] = ('x'):rep(1e4) end return table.concat(t)",
    "recursion": "local function g() return 1 + g() end g()",
    "recursion through gsub": "local function g() return (('x'):rep(10)):gsub('.', g) end g()",
    "recursion through sort": "local function g() table.sort({1, 2, 3}, g) end g()",
    "recursion through pcall": "local function g() pcall(g) end g()",
    "recursion through metatables": (
        "local t = setmetatable({}, {}) getmetatable(t).__index = function(t, k) return t[k] end return t.x"
    ),
    "recursion through coroutines": "local function g() return coroutine.wrap(g)() end g()",
    "a deep pattern": "return ('x'):rep(1e6):find(('x?'):rep(5e5))",
    "a deep pattern by method": "return ('x'):rep(1e6):gsub(('x?'):rep(5e5), '')",
    "many captures": "return ('x'):find(('()'):rep(400))",
    "an unpack without end": "return unpack({}, 1, 1e8)",
    "an unpack that overflows": "return unpack({}, -2^31, 2^31 - 1)",
    "a comparison that lies": (
        "local t = {} for i = 1, 999 do t[i] = i % 7 end table.sort(t, function() return true end)"
    ),
    "formats": (
        "pcall(string.format, '%999d', 1) pcall(string.format, '%n') return ('%99.99f%99.99f'):format(1e308, -1e308)"
    ),
    "memory that is caught": "for i = 1, 5 do pcall(function() local s = 'x' while true do s = s .. s end end) end",
    "more calls than steps": "for i = 1, 1e3 do zimg.rotate(45) end assert(zimg.rotate(45) == -1)",
    "random state": "math.randomseed(os and 1 or 7) assert(math.random() >= 0)",
}


@pytest.fixture(scope="module")
def honest() -> Script:
    return learn("zimg.scale(10, 10) zimg.ret(1)")


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_script_gets_nothing_and_leaves_nothing(case: str, honest: Script) -> None:
    script = learn(HOSTILE[case])
    run = script.ask("x", PHOTO)
    if run.error:
        assert re.match(r"s\.lua(:\d+)?: ", run.error), run.error
        assert "assertion failed" not in run.error
    # The same runtime goes on, within its bounds.
    assert script.ask("x", PHOTO).error == run.error
    assert script._lua.get_memory_used() < 8 << 20
    assert honest.ask("x", PHOTO).recording.plan().key == "10x10-jpeg90.0"


def test_nothing_of_a_run_is_left_for_the_next() -> None:
    body = """
        seen = (seen or 0) + 1
        string.note = (string.note or 0) + 1
        zimg.note = (zimg.note or 0) + 1
        once = once or {}
        once[#once + 1] = 1
        count = upvalue()
        log.print(6, seen .. string.note .. zimg.note .. #once .. count .. math.random(1000) .. tostring(('').note))
        local found = pairs
        pairs, error, string.rep, _G.tostring, f = nil, nil, nil, nil, nil
    """
    text = f"local n = 0 function upvalue() n = n + 1 return n end function f() {body} end"
    script = Script("s.lua", text.encode(), 7, RULES)
    first, second = script.ask("a", PHOTO), script.ask("b", PHOTO)
    assert (first.error, second.error) == ("", "")
    assert said(first) == said(second)
    assert said(first)[0].startswith("11111")
    assert said(first)[0].endswith("nil")


# Over HTTP

SERVED = """
local last
function f()
    local name = zimg.type()
    if name == "loop" then while true do end end
    if name == "fail" then
        zimg.scale(1, 1)
        local t = nil
        return t.x
    end
    if name == "memory" then
        local s = "x"
        while true do s = s .. s end
    end
    if name == "silent" then return zimg.scale(3, 3) end
    if name == "lost" then return zimg.ret(-1) end
    if name == "fleeting" then zimg.scale(5, 5) return zimg.ret(0) end
    if name == "large" then
        zimg.rotate(1)
        zimg.scale(1500, 1500)
        zimg.set_format("avif")
    end
    if name == "noted" then log.print(4, "noted " .. zimg.cols()) end
    local width, height = name:match("^(%d+)x(%d+)$")
    if width then zimg.crop(0, 108, 640, 640) zimg.scale(tonumber(width), tonumber(height)) zimg.gray() end
    if name == "grown" then
        zimg.scale(30, 90)
        zimg.crop(0, 0, 30, 45)
        zimg.scale(60, 90)
        zimg.scale(60, 180)
    end
    if name == "mixed" then
        zimg.rotate(90)
        zimg.scale(60, 20)
        zimg.crop(10, 0, 40, 20)
        zimg.scale(80, 40)
        zimg.set_format("png")
    end
    zimg.ret(1)
end
"""


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two workers, little time for each job, and nothing kept in memory."""
    folder = tmp_path_factory.mktemp("scripted")
    (folder / "served.lua").write_text(SERVED)
    running = Server(folder, script=folder / "served.lua", worker_timeout_s=3, cache_size=0, memo_size=0)
    yield running
    running.kill()


def workers(server: Server) -> list[str]:
    return Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()


def count(server: Server, metric: str) -> float:
    """All that was counted under a name, with these labels."""
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(metric))


def test_a_script_makes_the_bytes_that_its_parameters_make(scripted: Server, server: Server, zimg_photo: bytes) -> None:
    md5 = scripted.upload(zimg_photo)
    server.upload(zimg_photo)
    quality = server.get(f"/info?md5={md5}").json()["info"]["quality"]
    for size in (100, 37):
        plain = server.get(f"/{md5}?w={size}&h={size}&g=1&q={quality}")
        typed = scripted.get(f"/{md5}?t={size}x{size}&w=9")
        assert (typed.status_code, typed.content) == (200, plain.content)
        assert typed.headers["ETag"] == plain.headers["ETag"]
    # From the store the next time, and for whoever has it not at all.
    again = scripted.get(
        f"/{md5}?t=100x100", headers={"If-None-Match": scripted.get(f"/{md5}?t=100x100").headers["ETag"]}
    )
    assert again.status_code == 304


def test_steps_in_a_new_order_are_carried_out_in_that_order(scripted: Server) -> None:
    image = corpus.quadrants(60, 180)
    md5 = scripted.upload(bytes(image.pngsave_buffer()))
    found = scripted.image(f"/{md5}?t=mixed")
    turned = image.rot("d90").resize(60 / 180, vscale=20 / 60).crop(10, 0, 40, 20).resize(2)
    assert (found.width, found.height) == (80, 40) == (turned.width, turned.height)
    for x in (4, 75):
        for y in (4, 35):
            assert max(abs(a - b) for a, b in zip(found.getpoint(x, y), turned.getpoint(x, y), strict=False)) < 4


def test_frames_and_alpha_come_through_every_step(scripted: Server) -> None:
    clear = corpus.flat(60, 180, (200, 10, 10)).bandjoin(corpus.flat(60, 180, (0,)))
    image = scripted.image(f"/{scripted.upload(bytes(clear.pngsave_buffer()))}?t=mixed")
    assert image.bands == 4
    assert image[3].max() == 0
    frames = [corpus.flat(60, 180, colour) for colour in ((250, 0, 0), (0, 250, 0), (0, 0, 250))]
    strip = pyvips.Image.arrayjoin(frames, across=1).copy()
    strip.set_type(pyvips.GValue.gint_type, "page-height", 180)
    gif = bytes(strip.gifsave_buffer())
    script = (
        "function f() zimg.scale(30, 90) zimg.crop(0, 0, 30, 45) zimg.scale(60, 90) zimg.scale(60, 180) zimg.ret(1) end"
    )
    assert Script("s.lua", script.encode(), 7, RULES).ask("x", Source("gif", 60, 180, 3)).recording.plan().key == (
        "30x90x3-c0.0.30.45-s60x90-s60x180-gif0.3"
    )
    assert decode(gif).get("n-pages") == 3


@pytest.mark.parametrize(
    ("name", "status", "told"),
    [
        ("fail", 500, "ScriptError(\"served.lua:9: attempt to index local 't' (a nil value)\")"),
        ("memory", 500, "ScriptError('served.lua: not enough memory')"),
        ("lost", 404, None),
        ("silent", 404, None),
        ("noted", 200, "WARNING noted 64"),
    ],
)
def test_what_a_script_says_is_the_answer_and_its_worker_lives(
    scripted: Server, name: str, status: int, told: str | None
) -> None:
    md5 = scripted.upload(make_photo(3))
    before = workers(scripted)
    answer = scripted.get(f"/images/{md5}?t={name}")
    assert answer.status_code == status
    if status == 500:
        assert answer.json()["detail"] == "The script of this type failed; the log knows where."
        assert "served.lua" not in answer.text
    if told:
        assert told in scripted.log
    assert workers(scripted) == before


def test_a_script_is_asked_once_for_a_type_that_is_none(scripted: Server) -> None:
    one, other = scripted.upload(make_photo(4)), scripted.upload(make_photo(5))
    assert scripted.get(f"/{one}?t=lost").status_code == 404
    before = count(scripted, "uvimg_jobs_total")
    # An image of equal facts is all the same to it.
    for md5 in (one, other):
        assert scripted.get(f"/{md5}?t=lost").status_code == 404
    assert count(scripted, "uvimg_jobs_total") == before


def test_what_a_script_wants_that_is_slow_is_made_in_the_slow_lane(scripted: Server) -> None:
    one, other = scripted.upload(make_photo(8)), scripted.upload(make_photo(9))
    slow, fast = (f'uvimg_jobs_total{{lane="{lane}"}}' for lane in ("slow", "fast"))
    before = count(scripted, slow), count(scripted, fast)
    assert scripted.image(f"/{one}?t=large").width == 1500
    assert (count(scripted, slow), count(scripted, fast)) == (before[0] + 1, before[1] + 1)
    # The next time nobody is asked.
    assert scripted.image(f"/{other}?t=large").width == 1500
    assert (count(scripted, slow), count(scripted, fast)) == (before[0] + 2, before[1] + 1)


def test_a_rendition_that_is_not_to_be_kept_is_made_each_time(scripted: Server) -> None:
    md5 = scripted.upload(make_photo(6))
    before = count(scripted, 'uvimg_hits_total{app="images",kind="made"')
    for _ in range(3):
        assert scripted.image(f"/{md5}?t=fleeting").width == 5
    assert count(scripted, 'uvimg_hits_total{app="images",kind="made"') == before + 3


def test_an_endless_script_ends_with_its_worker_and_others_go_on(scripted: Server) -> None:
    md5 = scripted.upload(make_photo(7))
    before = workers(scripted)
    with ThreadPoolExecutor() as threads:
        endless = threads.submit(requests.get, f"{scripted.url}/{md5}?t=loop", timeout=30)
        wait_until(lambda: count(scripted, 'uvimg_workers{state="busy"}') == 1)
        assert scripted.image(f"/{md5}?t=12x12").width == 12
        assert not endless.done()
        answer = endless.result()
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "10")
    # The next one has learnt the script before it is given any work.
    wait_until(lambda: len(set(workers(scripted)) - set(before)) == 1 and count(scripted, "uvimg_workers{") == 2, 30)
    for size in range(20, 26):
        assert scripted.image(f"/{md5}?t={size}x{size}").width == size


def test_types_that_are_disabled_are_ignored_and_their_script_is_not_looked_at(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.lua"
    broken.write_text("x = = 1")
    running = start_server(types="{a = {w = 3}}", script=broken, disable_type=True, workers=1)
    md5 = running.upload(make_photo(1))
    assert running.image(f"/{md5}?t=a&w=20").width == 20
    # Nor is Lua there where there is no use for it.
    for pid in (str(running.process.pid), *workers(running)):
        assert "lupa" not in Path(f"/proc/{pid}/maps").read_text()
