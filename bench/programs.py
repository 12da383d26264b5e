"""Programs that measuring needs: where they are, or how to get those that are not there.

Those of Debian are in PATH, those of a package index where scripts/bench-rivals puts them: apart from what uvimg runs
with, and thumbor apart from the others, because it asks for versions of what they use.
"""

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

# Program → the Debian package that has it.
PACKAGES = {
    "nginx": "nginx",
    "memcached": "memcached",
    "redis-server": "redis-server",
    "wrk": "wrk",
    "ab": "apache2-utils",
    "taskset": "util-linux",
    "ss": "iproute2",
    "cc": "gcc libc6-dev",
    "go": "golang-go",
    "node": "nodejs",
}
_RIVALS = Path(__file__).parent.parent / ".rivals"
PYTHON = _RIVALS / "bin" / "python"
THUMBOR = _RIVALS / "thumbor" / "bin" / "thumbor"

_PACKAGES = ("curio", "gevent", "tornado", "twisted")
_VERSIONS = "import sys; from importlib import metadata; print(*map(metadata.version, sys.argv[1:]))"


def find_missing(*programs: str) -> str:
    """How to install the first of the programs that is not there; "" when all are."""
    for program in programs:
        if program and not shutil.which(program):
            return (
                f"{program} is not installed: scripts/bench-rivals, or apt-get install {PACKAGES.get(program, program)}"
            )
    return ""


@cache
def lacks_package(package: str) -> str:
    """Why this package for Python is not there; "" when it is."""
    if PYTHON.exists() and not subprocess.run([PYTHON, "-c", f"import {package}"], capture_output=True).returncode:
        return ""
    return f"{package} is not installed: scripts/bench-rivals"


def read_versions() -> dict[str, str]:
    """Of those packages for Python that are measured beside."""
    if not PYTHON.exists():
        return {}
    done = subprocess.run([PYTHON, "-c", _VERSIONS, *_PACKAGES], capture_output=True, text=True, check=False)
    return dict(zip(_PACKAGES, done.stdout.split(), strict=False))


def lacks_thumbor() -> str:
    """Why thumbor is not there, in pip's words where it was tried; "" when it is."""
    if THUMBOR.exists():
        return ""
    failed = _RIVALS / "thumbor.failed"
    said = failed.read_text(errors="replace").strip() if failed.exists() else ""
    return f"thumbor could not be installed: {said}" if said else "thumbor is not installed: scripts/bench-rivals"


def find_fpm() -> str:
    """PHP's server, whose name has its version in it on Debian. "" where there is none."""
    folders = map(Path, os.environ["PATH"].split(os.pathsep))
    names = sorted(file.name for folder in folders for file in folder.glob("php-fpm*"))
    return next((name for name in names if re.fullmatch(r"php-fpm[\d.]*", name) and shutil.which(name)), "")


@cache
def lacks_php(module: str) -> str:
    """Why PHP cannot do what this module does; "" when it can."""
    if not find_fpm():
        return "php-fpm is not installed: scripts/bench-rivals, or apt-get install php-fpm"
    told = subprocess.run([find_fpm(), "-m"], capture_output=True, text=True, check=False).stdout
    if module not in told.split():
        return f"PHP has no {module}: scripts/bench-rivals, or apt-get install php-{module}"
    return ""
