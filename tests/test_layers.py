"""Who may import whom: downwards only, decisions without doing, and no libvips in the server."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
FILES = sorted(SOURCE.rglob("*.py"))

# What each room may import beside itself. Rooms of one line of the architecture do not know each other.
BACK = {"cache", "coders", "imaging", "store", "metrics"}
ROOMS: dict[str, set[str]] = {
    "core": set(),
    **{room: {"core"} for room in BACK},
    "apps": BACK | {"core"},
    "service": BACK | {"apps", "core"},
    "assembly": BACK | {"service", "apps", "core", "config", "cores", "logs"},
    # config for the type alone: web hands the settings on to assembly.
    "web": BACK | {"assembly", "service", "apps", "core", "config", "systemd"},
    "supervisor": {"web", "core", "config", "cores", "logs", "systemd"},
    "app": BACK | {"supervisor", "web", "assembly", "service", "apps", "core", "config", "logs", "systemd"},
    # What `uvimg put` does.
    "put": BACK | {"apps", "core"},
    # What `uvimg import-zimg` does.
    "zimg": BACK | {"apps", "core"},
    "cli": BACK | {"app", "put", "zimg", "supervisor", "web", "assembly", "service", "apps", "core", "config", "logs"},
    "gunicorn": BACK | {"app", "web", "assembly", "core", "config", "logs"},
    "__main__": {"cli"},
    # Beside the rooms; assembly and what stands above it alone look into these.
    "config": {"core"},
    "cores": {"core"},
    "logs": {"core"},
    "systemd": {"core"},
}
# It waits, it looks at the clock or the machine, or it does things.
DOING = {
    *("asyncio", "concurrent", "multiprocessing", "queue", "sched", "select", "selectors", "signal", "subprocess"),
    *("threading", "_thread", "time", "random", "secrets", "uuid", "locale", "os", "posix", "platform", "resource"),
    *(
        "fcntl",
        "mmap",
        "glob",
        "io",
        "pathlib",
        "shutil",
        "tempfile",
        "fileinput",
        "zipfile",
        "tarfile",
        "sqlite3",
        "dbm",
    ),
    *(
        "shelve",
        "socket",
        "socketserver",
        "ssl",
        "http.client",
        "http.server",
        "ftplib",
        "smtplib",
        "xmlrpc",
        "logging",
        "ctypes",
        "sys",
    ),
    *("urllib.request", "importlib"),
}
# From other hands core takes only what parses and checks values.
PURE = {"msgspec", "python_multipart"}


def room_of(file: Path) -> str:
    """The room a file belongs to; the package's own __init__ is "uvimg"."""
    parts = file.relative_to(SOURCE / "uvimg").with_suffix("").parts
    return "uvimg" if parts == ("__init__",) else parts[0]


@cache
def imports(file: Path) -> tuple[str, ...]:
    """The full names of all that a file imports anywhere in it."""
    return tuple(_imports(file))


def _imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file.name} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_of(name: str, packages: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:count]) in packages for count in range(1, len(parts) + 1))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_a_file_imports_only_from_rooms_below_its_own(file: Path) -> None:
    room = room_of(file)
    assert room == "uvimg" or room in ROOMS, f"{room} has no place in the layers yet"
    ours = {name.split(".")[1] for name in imports(file) if name.startswith("uvimg.")} - {"__version__"}
    assert ours <= ROOMS.get(room, set()) | {room}


@pytest.mark.parametrize(
    "file", [file for file in FILES if room_of(file) == "core"], ids=lambda file: str(file.relative_to(SOURCE))
)
def test_core_decides_and_does_nothing(file: Path) -> None:
    assert not [name for name in imports(file) if is_of(name, DOING)]
    foreign = {name.split(".")[0] for name in imports(file)} - sys.stdlib_module_names - {"uvimg"}
    assert foreign <= PURE
    called = {node.id for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Name)}
    assert not called & {"open", "print", "input", "exec", "eval", "__import__"}


def test_pyvips_is_imported_by_the_worker_alone() -> None:
    users = [str(file.relative_to(SOURCE)) for file in FILES if any(is_of(name, {"pyvips"}) for name in imports(file))]
    assert users == ["uvimg/imaging/worker.py"]


def test_what_decodes_in_python_is_imported_by_the_jpeg_engine_alone() -> None:
    codecs = {"PIL", "cykooz_resizer"}
    users = [str(file.relative_to(SOURCE)) for file in FILES if any(is_of(name, codecs) for name in imports(file))]
    assert users == ["uvimg/imaging/jpeg.py"]


def test_lupa_is_imported_by_the_scripts_alone_and_those_by_the_worker_alone() -> None:
    for name, user in (("lupa", "imaging/scripts.py"), ("uvimg.imaging.scripts", "imaging/worker.py")):
        users = [file for file in FILES if any(is_of(imported, {name}) for imported in imports(file))]
        assert users == [SOURCE / "uvimg" / user]


def test_nobody_imports_the_worker() -> None:
    assert not [file for file in FILES if any(is_of(name, {"uvimg.imaging.worker"}) for name in imports(file))]


def test_the_server_does_not_load_libvips() -> None:
    code = (
        "import sys, uvimg.app, uvimg.cli; "
        "print(*(name for name in sys.modules if name.startswith(('pyvips', '_libvips', 'PIL', 'cykooz', 'lupa'))))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert loaded.split() == []
    code = "import sys, uvimg.imaging.worker; print('pyvips' in sys.modules, 'lupa' in sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    # A worker loads the latter once it is told that there is a script.
    assert loaded.split() == ["True", "False"]


def test_the_supervisor_loads_nothing_that_serves() -> None:
    code = "import sys, uvimg.cli, uvimg.supervisor; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    heavy = {"prometheus_client", "aiohttp", "uvloop", "lmdb", "pyvips", "uvimg.service", "uvimg.app", "uvimg.imaging"}
    assert heavy.intersection(loaded) == set()
