"""A worker's cage: resource limits, no new privileges, an empty Landlock ruleset, and no life after its parent.

Called before libvips starts a thread, for Landlock confines the calling thread and what it starts later.
After it no file can be opened and no connection made; what was opened before stays usable.
ctypes is enough: the C library has no wrappers for these calls.
"""

import ctypes
import os
import resource
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_LANDLOCK_CREATE_RULESET = 444
_LANDLOCK_RESTRICT_SELF = 446
_LANDLOCK_VERSION_FLAG = 1

_libc = ctypes.CDLL(None, use_errno=True)


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL when the parent goes, however it goes. Exits at once if it has gone already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit(1)


def confine(memory_bytes: int, *, landlock: bool) -> tuple[str, ...]:
    """Give up what an image decoder has no use for; the names of what is in force.

    `memory_bytes` bounds the address space, 0 leaves it unbounded. What the kernel does not have is left
    out of the answer; the caller decides whether that will do.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The socket, an original's descriptor, libvips' copy of it, and stderr.
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    in_force = ["limits"]
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        in_force.append("no_new_privs")
        if landlock and _restrict_by_landlock():
            in_force.append("landlock")
    return tuple(in_force)


def _restrict_by_landlock() -> bool:
    """Deny every right that this kernel's Landlock knows (linux/landlock.h, by ABI version)."""
    abi = _libc.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_LANDLOCK_VERSION_FLAG))
    if abi < 1:
        return False
    rights = 13 + (abi >= 2) + (abi >= 3) + (abi >= 5)
    attributes = _RulesetAttributes(
        fs=(1 << rights) - 1,
        net=0b11 if abi >= 4 else 0,
        scoped=0b11 if abi >= 6 else 0,
    )
    # An older kernel refuses a structure that is longer than the one it knows.
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _libc.syscall(
        _LANDLOCK_CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(size), ctypes.c_uint32(0)
    )
    if ruleset < 0:
        return False
    try:
        return bool(_libc.syscall(_LANDLOCK_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0)) == 0)
    finally:
        os.close(ruleset)
