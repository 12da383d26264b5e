"""Types as tables: t=NAME makes exactly what its parameters make, and is all that a closed site answers."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import corpus
from tests.conftest import Server, make_photo
from tests.test_pool import settings as pool_settings
from tests.test_supervisor import serving
from tests.test_wire import wait_until
from uvimg import config
from uvimg.assembly import CannotStart, assemble
from uvimg.config import ConfigError, load, to_environment
from uvimg.core.address import Digest, renditions_prefix
from uvimg.core.errors import BadParameter, NotFound
from uvimg.core.params import PARAMETERS, Params
from uvimg.core.plan import Rules
from uvimg.core.route import Show, route
from uvimg.core.types import Types, parse_tables
from uvimg.imaging import Learn
from uvimg.imaging.pool import Pool, WorkerDied
from uvimg.store import open_store

ROOT = Path(__file__).parent.parent
ID = "0" * 32
SMALL = Params(w=200, p=4, q=60)
TYPES = Types({"small": SMALL, "t@2x": Params()})
SCRIPTED = Types({"small": SMALL}, scripted=True)


@pytest.mark.parametrize(
    ("table", "params"),
    [
        ("", Params()),
        ("w = 100\nh = 80\np = 4\ng = 1\nr = -90\nq = 50\nf = 'webp'", Params(100, 80, 4, 1, -1, -1, 270, 50, "webp")),
        ("rotate = 45\ng = true\nf = 'JPG'", Params(r=45, g=1, f="jpeg")),
        ("crop = [5, 6, 70, 80]\nf = 'none'", Params(w=70, h=80, x=5, y=6, f="none")),
        ("p = 0", Params(p=0)),
    ],
)
def test_a_table_says_what_a_query_says(tmp_path: Path, table: str, params: Params) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f"quality = 3\n[types.'a.b']\n{table}\n[types.c]\nw = 1\n")
    settings = load({}, {}, str(path))
    assert dict(settings.types.by_name) == {"a.b": params, "c": Params(w=1)}
    # By the environment to children, by 'uvimg config' to people, both without loss.
    assert load({}, to_environment(settings)) == settings
    path.write_text(config.to_toml(settings))
    assert load({}, {}, str(path)) == settings


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ("[types.a]\nwidth = 3", "types.a.width: there is no such key; there are w, h, p, g, x, y, r, q, f, rotate"),
        ("[types.a]\nw = '3'", "types.a.w = '3': it must be a whole number"),
        ("[types.a]\nw = 3.5", "types.a.w = 3.5"),
        ("[types.a]\nw = true", "types.a.w = True"),
        ("[types.a]\nw = -1", "types.a.w = -1: w must be a whole number from 0 up"),
        ("[types.a]\np = 5", "types.a.p = 5: p must be a whole number from 0 to 4"),
        ("[types.a]\nq = 101", "types.a.q = 101"),
        ("[types.a]\ng = 2", "types.a.g = 2"),
        ("[types.a]\nf = 'jxl'", "types.a.f = jxl: f must be one of jpeg"),
        ("[types.a]\nf = 1", "types.a.f = 1: it must be a text"),
        ("[types.a]\nf = ''", "types.a.f = ''"),
        ("[types.a]\nw = 9999999999", "types.a.w = 9999999999"),
        ("[types.a]\np = 0\nw = 3", "types.a: p = 0 stretches to w and h, so it needs both"),
        ("[types.a]\ncrop = [1, 2, 3]", "types.a.crop = [1, 2, 3]: crop is [x, y, w, h]"),
        ("[types.a]\nw = 3\ncrop = [1, 2, 3, 4]", "types.a.crop: w is given twice"),
        ("[types.a]\nr = 3\nrotate = 4", "types.a.rotate: r is given twice"),
        ("[types.a.b]\nw = 3", "types.a.b: there is no such key"),
        ("[types]\na = 3", "types.a must be a table"),
        ("types = 3", "types must be tables"),
        ("[types.'a/b']\nw = 3", "types has the name 'a/b'"),
        ("[types.'']\nw = 3", "types has the name ''"),
        (f"[types.{'a' * 65}]\nw = 3", "1 to 64 letters"),
        ("".join(f"[types.a{number}]\n" for number in range(501)), "types holds 501 tables; allowed are 500"),
        # What Python or a terminal would choke on.
        (f"[types.a]\nw = 0x{'f' * 5000}", "types.a.w = a number of thousands of digits: it must be a whole number"),
        (f"[types.a]\ncrop = [0x{'f' * 5000}, 1, 1, 1]", "types.a.crop = a number of thousands of digits: crop is"),
        (f"[types.a]\ncrop = [{'1,' * 9000}]", "1, 1 …: crop is [x, y, w, h]"),
        (f"[types.a]\nw = {'9' * 5000}", "4300 digits"),
        (f"[types.a]\nw = {'[' * 3000}", "it is nested too deeply"),
        (f"types = '{'[' * 3000}'", "it is nested too deeply"),
        (f"port = 0x{'f' * 5000}", "port = a number of thousands of digits"),
        ('[types.a]\nf = "\\n\\u001b[31m"', r"types.a.f = '\n\x1b[31m': f must be one of"),
        ('[types.a]\n"\\n\\u001b[31m" = 1', r"types.a.'\n\x1b[31m': there is no such key"),
        ('"\\n\\u001b[31m" = 1', r"unknown setting '\n\x1b[31m'"),
    ],
)
def test_a_table_that_cannot_be_is_named_with_its_key_in_one_line(tmp_path: Path, table: str, told: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(table)
    with pytest.raises(ConfigError) as caught:
        load({}, {}, str(path))
    assert told in str(caught.value)
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("text", ["{", "3", "{a = 3}", "{}\nport = 3", "{a = {w = 1}}; 3"])
def test_tables_in_the_environment_are_one_inline_table(text: str) -> None:
    with pytest.raises(ConfigError, match=r"UVIMG_TYPES"):
        load({}, {"UVIMG_TYPES": text})
    assert load({}, {"UVIMG_TYPES": "{a = {w = 1}}"}).types == parse_tables({"a": {"w": 1}})


@pytest.mark.parametrize(
    ("query", "types", "shown"),
    [
        ("t=small", TYPES, Show(ID, SMALL, typed=True)),
        # Whatever else is given counts for nothing, and cannot be wrong.
        ("w=nonsense&t=small&q=3&p=9", TYPES, Show(ID, SMALL, typed=True)),
        ("t=t%402x", TYPES, Show(ID, Params(), typed=True)),
        ("t=&w=3", TYPES, Show(ID, Params(w=3))),
        ("w=3", TYPES, Show(ID, Params(w=3))),
        # Without types it is nobody's parameter, as in zimg.
        ("t=small&w=3", Types(), Show(ID, Params(w=3))),
        ("t=other", SCRIPTED, Show(ID, Params(), typed=True, script="other")),
        ("t=small", SCRIPTED, Show(ID, SMALL, typed=True)),
    ],
)
def test_t_chooses_a_type_where_there_are_any(query: str, types: Types, shown: Show) -> None:
    for path in (f"/{ID}", f"/images/{ID}"):
        assert route("GET", path, query, types) == shown


@pytest.mark.parametrize("name", ["other", "Small", "..", "a/b", "a%00b", "%C3%A9", "a" * 65, "a%0ab", "%3Cscript%3E"])
def test_a_type_that_is_none_is_not_found(name: str) -> None:
    with pytest.raises(NotFound):
        route("GET", f"/{ID}", f"t={name}", TYPES)
    if name not in ("other", "Small", ".."):
        with pytest.raises(NotFound):
            route("GET", f"/{ID}", f"t={name}", SCRIPTED)


def test_a_type_and_the_extension_of_a_path_contradict_each_other() -> None:
    with pytest.raises(BadParameter, match="extension"):
        route("GET", f"/images/{ID}.webp", "t=small", TYPES)


def renditions(server: Server, md5: str) -> set[str]:
    """The keys of all renditions that the server's store keeps of an image."""
    import asyncio

    async def look() -> set[str]:
        store = open_store(f"local:{server.store}", create=False)
        try:
            record = await store.record(b"images/" + md5.encode())
            assert record is not None
            digest: Digest = record.digest
            prefix = renditions_prefix(digest)
            return {bytes(name).removeprefix(prefix).decode() for name, _ in await store.scan(prefix, limit=100)}
        finally:
            await store.close()

    return asyncio.run(look())


def test_a_closed_site_answers_types_alone_and_keeps_them_alone(
    server: Server, start_server: Callable[..., Server]
) -> None:
    path = str(ROOT / "conf/types.toml")
    closed = start_server(config=path, disable_args=True, save_new=2, cache_size=0, workers=1)
    script = start_server(script=ROOT / "conf/scripts/types.lua", workers=1, store="memory:")
    data = corpus.jpeg(corpus.photo(700, 501, seed=3), 92)
    (md5,) = {running.upload(data) for running in (server, closed, script)}
    tables = load({}, {}, path).types.by_name
    for name, params in tables:
        given = {key: getattr(params, key) for key in PARAMETERS if getattr(params, key) != getattr(Params(), key)}
        # Those of the file do not enlarge.
        given |= {"w": min(700, params.w)} if params.w else {}
        typed, plain = closed.get(f"/{md5}?t={name}&w=7"), server.get(f"/{md5}", params=given)
        assert (typed.status_code, typed.content) == (200, plain.content), name
        assert typed.headers["ETag"] == plain.headers["ETag"]
        # And the script that ships beside the tables makes the same of all these names.
        scripted = script.get(f"/{md5}?t={name}")
        assert (scripted.status_code, scripted.content) == (200, plain.content), name
    assert closed.image(f"/{md5}?w=30&h=30").width == 700
    answer = closed.get(f"/images/{md5}?t=nothing")
    assert (answer.status_code, answer.json()["detail"]) == (404, "There is no such type.")
    # The plans' own keys, so that plain requests elsewhere find them; and nothing of what was asked for without t.
    wait_until(lambda: len(renditions(closed, md5)) == len(tables))
    assert renditions(closed, md5) <= renditions(server, md5)


def test_a_reload_brings_new_types_and_a_broken_script_leaves_the_old(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    path, script = tmp_path / "c.toml", tmp_path / "s.lua"
    path.write_text(f"script = '{script}'\n[types.a]\nw = 10\n")
    script.write_text("function f() zimg.scale(11, 11) zimg.ret(1) end")
    running = start_server(config=str(path), processes=1, workers=1)
    md5 = running.upload(make_photo(1))

    def widths() -> tuple[int, int]:
        return running.image(f"/{md5}?t=a").width, running.image(f"/{md5}?t=b").width

    assert widths() == (10, 11)
    before = serving(running)
    path.write_text(f"script = '{script}'\n[types.a]\nw = 20\n")
    script.write_text("function f() zimg.scale(22, 22) zimg.ret(1) end")
    running.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "reloaded: 1 processes" in running.log and len(serving(running)) == 1, 40)
    assert serving(running) != before
    # What was kept for the old script is not shown for the new one.
    assert widths() == (20, 22)
    script.write_text("function f()\n\n  zimg.scale(\nend")
    running.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "nothing was reloaded" in running.log, 40)
    assert "script s.lua:4: unexpected symbol near 'end'" in running.log
    assert widths() == (20, 22)


@pytest.mark.parametrize("by", ["serve", "processes", "gunicorn"])
def test_a_broken_script_is_told_in_one_line_and_nothing_is_served(tmp_path: Path, by: str) -> None:
    script = tmp_path / "s.lua"
    script.write_text("\n\nx = = 1\n")
    settings: dict[str, Any] = {"port": 0, "store": f"local:{tmp_path / 'data'}", "workers": 1, "script": script}
    settings |= {"processes": 1} if by == "processes" else {}
    environment = {"PATH": "/usr/bin", "TMPDIR": str(tmp_path)}
    environment |= {f"UVIMG_{name.upper()}": str(value) for name, value in settings.items()}
    command = ["gunicorn", "-c", str(ROOT / "conf/gunicorn.py"), "-w", "1"] if by == "gunicorn" else ["uvimg", "serve"]
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert len([line for line in done.stderr.splitlines() if "script s.lua:3: unexpected symbol near '='" in line]) == 1
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert done.returncode == (3 if by == "gunicorn" else 1)
    if by != "gunicorn":
        assert "uvimg: script s.lua:3: unexpected symbol near '='" in done.stderr.splitlines()


async def test_a_script_that_does_not_end_while_it_is_read_starts_no_worker() -> None:
    endless = Learn("s.lua", 6, Rules()), b"while true do end"
    pool = Pool(pool_settings(timeout_s=0.5, formats=("jpeg",), script=endless))
    with pytest.raises(WorkerDied, match=r"script s\.lua: it was not read to its end in 0\.5 s"):
        await pool.start()
    assert pool.pids == []


async def test_a_script_that_cannot_be_read_or_is_too_long_is_told(tmp_path: Path) -> None:
    script = tmp_path / "s.lua"
    script.write_bytes(b"-" * ((1 << 20) + 1))
    settings = load({"store": "memory:", "script": str(script)}, {})
    with pytest.raises(CannotStart, match="1048577 bytes, where at most 1048576 are read"):
        async with assemble(settings):
            pass
    script.unlink()
    with pytest.raises(CannotStart, match="No such file"):
        async with assemble(settings):
            pass


async def test_whatever_a_scripts_file_is_called_its_error_is_one_line(tmp_path: Path) -> None:
    for name in ("line\nbreak.lua", "\udcff.lua"):
        script = tmp_path / name
        script.write_text("\nx = = 1\n")
        settings = load({"store": "memory:", "script": str(script), "workers": 1}, {})
        with pytest.raises(WorkerDied, match=r"lua':2: unexpected symbol") as caught:
            async with assemble(settings):
                pass
        assert str(caught.value).isprintable()
