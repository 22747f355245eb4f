"""The seccomp filter, interpreted as the kernel does, also for other architectures."""

from __future__ import annotations

import os
import struct

from expert.core.process import clean_environment
from expert.judging.confinement import _ARCHITECTURES, _filter
from tests.each import each

ALLOW = 0x7FFF0000
# By the tables of the kernel: read, write, mmap, futex, exit_group, getrandom.
USUAL = {"x86_64": (0, 1, 9, 202, 231, 318), "aarch64": (63, 64, 222, 98, 94, 278)}
SOCKET = {"x86_64": 41, "aarch64": 198}
EXECVE = {"x86_64": 59, "aarch64": 221}
OPENAT = {"x86_64": 257, "aarch64": 56}
CLONE = {"x86_64": 56, "aarch64": 220}
UNLINKAT = {"x86_64": 263, "aarch64": 35}
TGKILL = {"x86_64": 234, "aarch64": 131}
MACHINES = tuple(_ARCHITECTURES)


def asked(code: bytes, architecture: int, number: int, *arguments: int) -> int:
    """The filter's answer to a call; it uses six instructions only."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *(*arguments, *[0] * 6)[:6])
    lines = list(struct.iter_unpack("HBBI", code))
    place, held = 0, 0
    while True:
        kind, yes, no, value = lines[place]
        if kind == 0x06:
            return int(value)
        if kind == 0x20:
            (held,) = struct.unpack_from("<I", data, value)
            place += 1
            continue
        holds = {0x15: held == value, 0x45: bool(held & value), 0x35: held >= value}[kind]
        place += 1 + (yes if holds else no)


@each("machine", MACHINES)
def test_the_filter_allows_and_refuses_system_calls(machine):
    code = _filter(machine)
    assert 0 < len(code) // 8 <= 4096  # the kernel's limit

    def call(number: int, *arguments: int) -> bool:
        return asked(code, _ARCHITECTURES[machine], number, *arguments) == ALLOW

    assert all(call(number) for number in USUAL[machine])
    assert not call(SOCKET[machine])
    assert not call(UNLINKAT[machine])
    assert call(OPENAT[machine], 0, 0, os.O_RDONLY | os.O_CLOEXEC)
    for flag in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC, os.O_CREAT, os.O_APPEND):
        assert not call(OPENAT[machine], 0, 0, flag)
    assert call(CLONE[machine], 0x3D0F00)  # starts a thread
    assert not call(CLONE[machine], 0x11)  # starts a process
    assert not call(EXECVE[machine])
    assert call(TGKILL[machine], os.getpid())
    assert not call(TGKILL[machine], 1)
    [other] = [value for name, value in _ARCHITECTURES.items() if name != machine]
    assert asked(code, other, USUAL[machine][0]) != ALLOW
    if machine == "x86_64":  # its x32 ABI
        assert not call(0x40000000 + USUAL[machine][0])


def test_a_clean_environment_holds_no_secret_and_finds_what_python_finds(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:secret@proxy")
    monkeypatch.setenv("PYTHONPATH", "src")
    monkeypatch.chdir(tmp_path)
    found = clean_environment()
    assert "secret" not in str(found)
    assert found["PYTHONPATH"] == str(tmp_path / "src")
