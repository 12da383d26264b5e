"""Types that a Lua script makes (t=NAME): zimg's scripts, unchanged, in a runtime that has nothing else to reach for.

Alone imports lupa. A script sees zimg.*, log.print and the harmless part of Lua 5.1's library. Each run has globals
of its own, in which the whole file is executed before f() is called, so nothing leaks from one image to the next.
Rule: no object of Python's ever comes into a script's hands, for those have metatables that undo a process; it is
given Lua functions around the one door, which takes and gives numbers and bytes and never raises.
Surprise: it is Lua 5.1 and not LuaJIT, which lets a recursion through string.gsub run out of C stack. Time has no
bound here: the worker's deadline is it.
"""

from typing import Any

from lupa import lua51

from uvimg.core.plan import Rules, Source
from uvimg.core.script import DONE, FAILED, Recording
from uvimg.imaging import Printed

# What zimg's own sample needs is 0.1 MiB.
_MAX_MEMORY_BYTES = 32 << 20
# One that is left with more by a run's garbage is made anew.
_UNTIDY_BYTES = _MAX_MEMORY_BYTES // 4
# A frame's head is bounded, and so is what anybody reads.
_MOST_LINES, _MOST_PRINTED_CHARS = 100, 10_000
_LONGEST_LINE = 400

# Called with the door, the highest level that is logged, and the script as a function; gives a function back that
# runs it: with a type's name for f(), without one for the file alone. That returns why it failed.
_PRELUDE = rb"""
local door, threshold, script = ...
local error, pairs, pcall, rawget, setfenv, unpack = error, pairs, pcall, rawget, setfenv, unpack
local seed, sub, tonumber, type = math.randomseed, string.sub, tonumber, type

local function copy(t)
    local copied = {}
    for key, value in pairs(t) do copied[key] = value end
    return copied
end

local library = {}
for name in ("assert error getmetatable ipairs next pairs pcall rawequal rawget rawset select setmetatable "
        .. "tonumber tostring type unpack xpcall _VERSION"):gmatch("%S+") do
    library[name] = _G[name]
end
library.collectgarbage = function() return 0 end
-- Lua 5.1 counts them in 32 bits, and what is more than that overruns its stack.
function library.unpack(t, first, last)
    first, last = tonumber(first) or 1, tonumber(last) or #t
    if not (last - first < 1000) then error("too many results to unpack", 2) end
    return unpack(t, first, last)
end
local parts = {}
for _, name in pairs({"coroutine", "math", "string", "table"}) do parts[name] = copy(_G[name]) end
parts.string.dump = nil
local function pass(good, ...)
    if good then return ... end
    local why = ...
    -- The line is that of the script, unless a function of its own has failed and said so.
    error(why, type(why) == "string" and not why:match("^[^\n]-:%d+: ") and 3 or 0)
end
-- Lua 5.1 follows a pattern by recursion, one C call for each of its items.
for _, name in pairs({"find", "gfind", "gmatch", "gsub", "match"}) do
    local search = string[name]
    parts.string[name] = search and function(text, pattern, ...)
        if type(pattern) == "string" and #pattern > 1000 then error("the pattern is too long", 2) end
        return pass(pcall(search, text, pattern, ...))
    end
end
-- ("x"):rep(3) finds its function by this, which no script may change.
local strings = getmetatable("")
strings.__index, strings.__metatable = copy(parts.string), false

local function number(value) return tonumber(value) or 0 end
local function text(value)
    local kind = type(value)
    return (kind == "string" or kind == "number") and sub(value, 1, 400) or "(" .. kind .. ")"
end
local function print_line(level, value)
    level = number(level)
    if level <= threshold then door("print", level, text(value)) end
end

return function(name)
    local globals = copy(library)
    for part, functions in pairs(parts) do globals[part] = copy(functions) end
    globals._G = globals
    local running = false
    local function call(...)
        if not running then error("zimg is there for f() alone", 3) end
        return door(...)
    end
    globals.zimg = {
        type = function() return name end,
        cols = function() return call("cols") end,
        rows = function() return call("rows") end,
        quality = function() return call("quality") end,
        format = function() return call("format") end,
        scale = function(cols, rows) return call("scale", number(cols), number(rows)) end,
        crop = function(x, y, cols, rows) return call("crop", number(x), number(y), number(cols), number(rows)) end,
        rotate = function(degrees) return call("rotate", number(degrees)) end,
        gray = function() return call("gray") end,
        set_quality = function(quality) return call("set_quality", number(quality)) end,
        set_format = function(format) return call("set_format", text(format)) end,
        ret = function(code) call("ret", number(code)) end,
    }
    globals.log = {
        print = function(level, value)
            -- What the file says while it is read was said when it was read first.
            if running or not name then print_line(level, value) end
        end,
    }
    globals.print = function(value) globals.log.print(6, value) end
    seed(0)
    setfenv(script, globals)
    local good, why = pcall(script)
    if good then
        local f = rawget(globals, "f")
        if type(f) ~= "function" then
            good, why = false, "it defines no function f()"
        elseif name then
            running = true
            good, why = pcall(f)
            running = false
        end
    end
    if not good then return text(why) end
end
"""


class ScriptError(Exception):
    """The script is broken; the message says where and why, in one line."""


class Run:
    """What came of asking the script: the code it gave to zimg.ret, why it failed ("" if it did not), its lines."""

    def __init__(self, recording: Recording, code: int | None, error: str, printed: tuple[Printed, ...]) -> None:
        self.recording, self.code, self.error, self.printed = recording, code, error, printed


class Script:
    """A script that has been read. `ask` is the door; `printed` is what the file itself had logged.

    Raises ScriptError.
    """

    def __init__(self, name: str, text: bytes, level: int, rules: Rules) -> None:
        self._name, self._level, self._rules = name, level, rules
        self._text = _as_text(name, text)
        self._recording: Recording | None = None
        self._code: int | None = None
        self._printed: list[Printed] = []
        self._trouble: Exception | None = None
        self._start()
        if why := self._run(None):
            raise ScriptError(self._locate(why))
        self.printed = self._take_printed()

    def ask(self, type: str, source: Source) -> Run:
        """Run f() for a type of an image of these facts."""
        recording = self._recording = Recording(source, self._rules)
        self._code = None
        why = self._run(type.encode())
        self._recording = None
        if self._trouble is not None:
            raise self._trouble
        return Run(recording, self._code, self._locate(why) if why else "", self._take_printed())

    def _start(self) -> None:
        lua = lua51.LuaRuntime(
            encoding=None,
            register_eval=False,
            register_builtins=False,
            attribute_filter=_deny,
            max_memory=_MAX_MEMORY_BYTES,
        )
        try:
            script = lua.compile(self._text, name=b"@" + self._name.encode())
        except lua51.LuaMemoryError:
            raise ScriptError(f"{self._name}: it needs too much memory") from None
        except lua51.LuaError as exc:
            raise ScriptError(self._locate(exc.args[0])) from None
        self._lua, self._enter = lua, lua.compile(_PRELUDE, name=b"=uvimg")(self._open, self._level, script)

    def _run(self, type: bytes | None) -> str:
        """Why it failed, "" if it did not."""
        why: bytes | str | None
        try:
            why = self._enter(type)
        except lua51.LuaMemoryError:
            why = b"not enough memory"
        except lua51.LuaError as exc:
            why = exc.args[0]
        if self._lua.get_memory_used() > _UNTIDY_BYTES:
            self._start()
        # error("", 0) fails too.
        return "" if why is None else _as_line(why) or "it failed without a word"

    def _locate(self, why: str | bytes) -> str:
        """An error with the script's name, which Lua leaves out of some."""
        line = _as_line(why)
        return line if line.startswith(f"{self._name}:") else f"{self._name}: {line}"

    def _take_printed(self) -> tuple[Printed, ...]:
        printed, self._printed = tuple(self._printed), []
        return printed

    def _open(self, what: bytes, *arguments: Any) -> Any:
        """The one door between a script and us. What it raised, a script could hold in its hands."""
        try:
            return self._answer(what, *arguments)
        except Exception as exc:
            self._trouble = exc
            return FAILED

    def _answer(self, what: bytes, *arguments: Any) -> Any:
        if what == b"print":
            self._print(*arguments)
            return None
        recording = self._recording
        assert recording is not None
        match what:
            case b"cols":
                return recording.size[0]
            case b"rows":
                return recording.size[1]
            case b"quality":
                return recording.quality
            case b"format":
                return recording.format.encode()
            case b"scale":
                return recording.scale(*arguments)
            case b"crop":
                return recording.crop(*arguments)
            case b"rotate":
                return recording.rotate(*arguments)
            case b"gray":
                return recording.gray()
            case b"set_quality":
                return recording.set_quality(*arguments)
            case b"set_format":
                return recording.set_format(arguments[0].decode("ascii", "replace"))
        assert what == b"ret"
        code = arguments[0]
        self._code = -1 if code <= -1 else DONE if code >= 1 else 0
        return None

    def _print(self, level: float, text: bytes) -> None:
        if len(self._printed) >= _MOST_LINES:
            return
        room = _MOST_PRINTED_CHARS - sum(len(line.text) for line in self._printed)
        if room > 0:
            self._printed.append(Printed(int(max(0, min(7, level))), _as_line(text)[:room]))


def _deny(owner: object, name: object, is_setting: bool) -> str:
    raise AttributeError


def _as_text(name: str, text: bytes) -> bytes:
    """The script as Lua's own loader would take it, but for compiled ones: what is in those nobody can check."""
    text = text.removeprefix(b"\xef\xbb\xbf")
    if text.startswith(b"#"):
        text = b"--" + text
    if text.startswith(b"\x1b"):
        raise ScriptError(f"{name}: it is compiled; only the text of a script is taken")
    return text


def _as_line(text: str | bytes) -> str:
    """One printable line of bounded length."""
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    line = text.partition("\n")[0][:_LONGEST_LINE]
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line)
