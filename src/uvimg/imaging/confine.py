"""A worker's cage: resource limits, no new privileges, Landlock, a seccomp filter, and no life after its parent.

Called before libvips starts a thread, for Landlock and seccomp confine the calling thread and what it
starts later. With Landlock no file can be opened, with seccomp no socket made, no program run and no other
process signalled or limited; what was opened before stays usable. Landlock alone would leave UDP and named
sockets, and before Linux 6.7 every other connection.
ctypes is enough: the C library has no wrappers for these calls.
"""

import ctypes
import os
import platform
import resource
import signal
import struct

_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_LANDLOCK_CREATE_RULESET = 444
_LANDLOCK_RESTRICT_SELF = 446
_LANDLOCK_VERSION_FLAG = 1

_libc = ctypes.CDLL(None, use_errno=True)


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def die_with_parent(parent_pid: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Get a signal when the parent goes, however it goes. Exits at once if it has gone already."""
    _libc.prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit(1)


def limit(memory_bytes: int) -> None:
    """Bound the address space (0 leaves it unbounded) and descriptors; no core files of other people's pictures."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The socket, an original's descriptor, libvips' copy of it, and stderr.
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def confine() -> tuple[str, ...]:
    """Give up what an image decoder has no use for; the names of what is in force.

    What the kernel does not have is left out of the answer; the caller decides whether that will do.
    """
    in_force = []
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        in_force.append("no_new_privs")
        if _restrict_by_landlock():
            in_force.append("landlock")
        if _restrict_by_seccomp():
            in_force.append("seccomp")
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


# What is denied, by number, for each machine that we know (its AUDIT_ARCH first), in this order: socket, connect,
# bind, listen; execve, execveat; kill, pidfd_open, ptrace, process_vm_readv, process_vm_writev; bpf, userfaultfd,
# perf_event_open, keyctl, io_uring_setup (which would go round all this), unshare, setns; tkill, rt_sigqueueinfo,
# rt_tgsigqueueinfo, prlimit64, which reach other processes of the same user. abort() needs tgkill, so that stays.
_DENIED: dict[str, tuple[int, tuple[int, ...]]] = {
    "x86_64": (
        0xC000003E,
        (41, 42, 49, 50, 59, 322, 62, 434, 101, 310, 311, 321, 323, 298, 250, 425, 272, 308, 200, 129, 297, 302),
    ),
    "aarch64": (
        0xC00000B7,
        (198, 203, 200, 201, 221, 281, 129, 434, 117, 270, 271, 280, 282, 241, 219, 425, 97, 268, 130, 138, 240, 261),
    ),
}
_LOAD_WORD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _EPERM = 0x7FFF0000, 0x80000000, 0x00050001
# Calls of the x32 ABI have their own numbers, from here on, under the same AUDIT_ARCH.
_X32 = 0x40000000


def _restrict_by_seccomp() -> bool:
    """Deny the calls of the table with EPERM; calls of another machine's ABI end the process."""
    if platform.machine() not in _DENIED:
        return False
    architecture, denied = _DENIED[platform.machine()]
    count = len(denied)
    program = [
        # struct seccomp_data: the call's number at 0, the architecture at 4.
        (_LOAD_WORD, 0, 0, 4),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD_WORD, 0, 0, 0),
        (_JUMP_AT_LEAST, count + 1, 0, _X32),
        *((_JUMP_EQUAL, count - index, 0, number) for index, number in enumerate(denied)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _EPERM),
    ]
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    filter_mode = 2
    return bool(_libc.prctl(_PR_SET_SECCOMP, filter_mode, ctypes.byref(_FilterProgram(len(program), code)), 0, 0) == 0)
