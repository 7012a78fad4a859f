"""Landlock: a process gives up all files but those it names, for itself and its children. Needs no rights, Linux 5.13.

It also keeps signals (from version 6) and tracing inside the same limits. See the kernel's userspace-api/landlock.
"""

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path

from staff.sandbox.kernel import syscall

CREATE, ADD, RESTRICT = 444, 445, 446  # system calls, the same on every machine
ASK_VERSION, BENEATH = 1, 1
EXECUTE, WRITE, READ, LIST = 1, 2, 4, 8
DEVICES = 1 << 6 | 1 << 11  # may make character and block devices
OF_FILES = EXECUTE | WRITE | READ | 1 << 14 | 1 << 15  # truncate and ioctl apply to files, too
RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # version -> how many rights it knows; later ones as 5
ABSTRACT_SOCKETS, SIGNALS = 1, 2
TCP = 3  # bind and connect


def version() -> int:
    """Which version the kernel has, 0 for none."""
    try:
        return syscall(CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(ASK_VERSION))
    except OSError:
        return 0


def restrict(readable: Iterable[str | Path], writable: Iterable[str | Path], tcp: bool) -> None:
    """From here on only these files and folders, with what lies below them. What is not there is left out.

    Needs no_new_privs. Without `tcp` no connection is made or taken (from version 4).
    """
    known = version()
    everything = (1 << RIGHTS[min(known, 5)]) - 1
    attributes = struct.pack("QQQ", everything, 0 if tcp else TCP, ABSTRACT_SOCKETS | SIGNALS)
    size = 8 if known < 4 else 16 if known < 6 else 24
    rules = syscall(CREATE, attributes[:size], ctypes.c_size_t(size), ctypes.c_uint(0))
    try:
        for path in readable:
            _allow(rules, path, EXECUTE | READ | LIST)
        for path in writable:
            _allow(rules, path, everything & ~DEVICES)
        syscall(RESTRICT, ctypes.c_int(rules), ctypes.c_uint(0))
    finally:
        os.close(rules)


def _allow(rules: int, path: str | Path, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # missing on this machine, or not readable anyway; what is left out here stays forbidden
    try:
        rights &= -1 if Path(path).is_dir() else OF_FILES
        syscall(ADD, ctypes.c_int(rules), ctypes.c_int(BENEATH), struct.pack("=Qi", rights, place), ctypes.c_uint(0))
    finally:
        os.close(place)
