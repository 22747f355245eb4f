"""The sandbox of a judging process: no files, network or programs, set up before it reads a row.

Besides limits (`setrlimit`), where the kernel has them, Landlock allows reading only the folders of
Python, and a seccomp filter refuses sockets, programs and every way to change a file. Neither needs
privileges, and neither can be undone. They come in addition to the parsers that decide what is run
at all.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

MEMORY_BYTES = 4 * 2**30
"""Of address space: the graph database reserves 1.4 GB of it for a graph of a few rows."""
OPEN_FILES = 256
CPU_SECONDS = 60
"""For one case, counted from its start; the parent's wall-clock limit usually ends it earlier."""
SYSTEM_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/urandom", "/proc/meminfo")


def confine(readable: Iterable[Path]) -> list[str]:
    """Restrict this process to reading below `readable`; returns what could not be blocked, in
    words."""
    limits = {
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_AS: MEMORY_BYTES,
    }
    for kind, most in limits.items():
        with contextlib.suppress(ValueError, OSError):
            _, hard = resource.getrlimit(kind)
            allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (allowed, allowed))
    not_blocked = []
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, required by both below
    closing: dict[str, Callable[[], None]] = {
        "reading files": lambda: _landlock(libc, readable),
        "network, programs and writing": lambda: _seccomp(libc),
    }
    for what, close in closing.items():
        try:
            close()
        except OSError as error:
            not_blocked.append(f"{what}: not blocked for judges by this kernel ({error.strerror})")
    return not_blocked


def python_folders() -> list[Path]:
    """Where Python imports from."""
    named = [*sys.path, sys.prefix, sys.base_prefix, sys.exec_prefix, Path(__file__).parents[1]]
    return [Path(name) for name in dict.fromkeys(map(str, named)) if name]


def restart_cpu_limit() -> None:
    """Restart the CPU time limit for another case."""
    with contextlib.suppress(ValueError, OSError):
        used = resource.getrusage(resource.RUSAGE_SELF)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        soft = int(used.ru_utime + used.ru_stime) + CPU_SECONDS
        soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


# --- Landlock -----------------------------------------------------------------------------------

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_ACCESS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Number of file access bits in each ABI version."""


def _landlock(libc: ctypes.CDLL, readable: Iterable[Path]) -> None:
    abi = _checked(libc.syscall(_CREATE_RULESET, None, 0, 1))
    files = (1 << _ACCESS_BY_ABI.get(abi, 16)) - 1
    attributes = struct.pack("=QQQ", files, 3, 3)  # TCP, then signals and abstract sockets
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    rules = _checked(libc.syscall(_CREATE_RULESET, attributes, size, 0))
    try:
        for place in dict.fromkeys([*map(str, readable), *SYSTEM_FOLDERS, *SYSTEM_FILES]):
            try:
                descriptor = os.open(place, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue  # a missing file needs no rule
            try:
                allowed = _READ_FILE | (_READ_DIR if os.path.isdir(place) else 0)
                rule = struct.pack("=Qi", allowed, descriptor)
                _checked(libc.syscall(_ADD_RULE, rules, 1, rule, 0))
            finally:
                os.close(descriptor)
        _checked(libc.syscall(_RESTRICT_SELF, rules, 0))
    finally:
        os.close(rules)


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(result)


# --- seccomp ------------------------------------------------------------------------------------

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Names with their numbers on x86_64 and aarch64; 0: does not exist there.
_CALLS = """
    socket:41:198 io_uring_setup:425:425 ptrace:101:117 process_vm_readv:310:270
    process_vm_writev:311:271 kill:62:129 tkill:200:130 pidfd_send_signal:424:424 bpf:321:280
    perf_event_open:298:241 userfaultfd:323:282 add_key:248:217 keyctl:250:219 mount:165:40
    umount2:166:39 unshare:272:97 setns:308:268 chroot:161:51 open_by_handle_at:304:265
    creat:85:0 truncate:76:45 ftruncate:77:46 fallocate:285:47 rename:82:0 renameat:264:38
    renameat2:316:276 mkdir:83:0 mkdirat:258:34 rmdir:84:0 unlink:87:0 unlinkat:263:35 link:86:0
    linkat:265:37 symlink:88:0 symlinkat:266:36 mknod:133:0 mknodat:259:33 chmod:90:0 fchmod:91:52
    fchmodat:268:53 fchmodat2:452:452 chown:92:0 lchown:94:0 fchown:93:55 fchownat:260:54
    utime:132:0 utimes:235:0 futimesat:261:0 utimensat:280:88 setxattr:188:5 lsetxattr:189:6
    fsetxattr:190:7 removexattr:197:14 lremovexattr:198:15 fremovexattr:199:16
    execve:59:221 execveat:322:281 fork:57:0 vfork:58:0
"""
"""The second half changes files and starts programs; opening for writing is checked below."""
_REFUSED = [
    (int(x86_64), int(aarch64))
    for _, x86_64, aarch64 in (entry.split(":") for entry in _CALLS.split())
]
_OPEN, _OPENAT, _OPENAT2 = (2, 0), (257, 56), (437, 437)
_CLONE, _CLONE3, _TGKILL = (56, 220), (435, 435), (234, 131)
_CLONE_THREAD = 0x10000
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_LOAD, _EQUAL, _SET, _RETURN, _AT_LEAST = 0x20, 0x15, 0x45, 0x06, 0x35
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data; arguments start at 16


def _seccomp(libc: ctypes.CDLL) -> None:
    machine = platform.machine()
    if machine not in _ARCHITECTURES or sys.byteorder != "little":
        raise OSError(errno.ENOSYS, f"its calls are not known for {machine}")
    code = _filter(machine)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    # PR_SET_SECCOMP, SECCOMP_MODE_FILTER; threads started later inherit it.
    _checked(libc.prctl(22, 2, header, 0, 0))


def _filter(machine: str) -> bytes:
    side = list(_ARCHITECTURES).index(machine)
    code: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":  # the x32 ABI
        code += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]

    def refuse(numbers: tuple[int, int], error: int = errno.EPERM) -> None:
        if numbers[side]:
            code.extend([(_EQUAL, 0, 1, numbers[side]), (_RETURN, 0, 0, _ERRNO | error)])

    def refuse_if(
        numbers: tuple[int, int], argument: int, test: int, value: int, *, holds: bool
    ) -> None:
        """Refuse a call if the test of an argument's lower half is true, or if it is false."""
        if numbers[side]:
            yes, no = (0, 1) if holds else (1, 0)
            code.extend(
                [
                    (_EQUAL, 0, 4, numbers[side]),
                    (_LOAD, 0, 0, 16 + 8 * argument),
                    (test, yes, no, value),
                    (_RETURN, 0, 0, _ERRNO | errno.EACCES),
                    (_LOAD, 0, 0, _NUMBER),
                ]
            )

    for numbers in _REFUSED:
        refuse(numbers)
    refuse_if(_OPEN, 1, _SET, _WRITING, holds=True)
    refuse_if(_OPENAT, 2, _SET, _WRITING, holds=True)
    refuse(_OPENAT2, errno.ENOSYS)  # a filter cannot read its flags
    refuse_if(_CLONE, 0, _SET, _CLONE_THREAD, holds=False)
    refuse(_CLONE3, errno.ENOSYS)  # as above; libraries fall back to clone
    refuse_if(_TGKILL, 0, _EQUAL, os.getpid(), holds=False)
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *line) for line in code)
