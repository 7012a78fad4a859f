"""What only Linux tells a process about itself, all of it in one file.

Elsewhere, each function returns what its docstring names, and the caller leaves a column empty or says what is
missing. (The graders' processes have grader/wire/processes.py; nodes are emulated by cluster/emulate.py.)
"""

import contextlib
import ctypes
import os
import re
import socket
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

HERE = sys.platform == "linux"
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # changes at every boot
_ACKNOWLEDGED_AND_RECEIVED = 120  # offset of tcpi_bytes_acked and tcpi_bytes_received in struct tcp_info
_M_MMAP_THRESHOLD = -3  # from glibc's malloc.h


class _MallInfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


# glibc's function; None for another C library, or a glibc before 2.33.
_mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None) if HERE else None
if _mallinfo2 is not None:
    _mallinfo2.restype = _MallInfo2


def allocated_bytes() -> int | None:
    """Return the bytes that torch, gloo and Python's C code have allocated; None if the C library does not say."""
    if _mallinfo2 is None:
        return None
    info = _mallinfo2()
    return info.uordblks + info.hblkhd  # on the heaps, and in mappings of their own


def give_back_blocks_from(size: int) -> None:
    """Let freed blocks of `size` bytes or more leave the process; another C library than glibc does as it likes."""
    if _mallinfo2 is not None:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, size)


def status_bytes(name: str) -> int | None:
    """Return an entry of this process's status, such as VmHWM, its largest size; None elsewhere."""
    if not HERE:
        return None
    match = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match, name
    return 1024 * int(match[1])


def forget_largest_size() -> bool:
    """Let the largest size of this process count from now on; return False where that is not possible."""
    with contextlib.suppress(OSError):  # not Linux, or forbidden
        Path("/proc/self/clear_refs").write_text("5")
        return True
    return False


def boot_id() -> str:
    """Return a name that no other machine has, nor this one after another boot; "" elsewhere."""
    return _BOOT.read_text().strip() if _BOOT.exists() else ""


def bytes_moved(but: Iterable[int]) -> int:
    """Return the bytes sent and received on this process's TCP connections but these descriptors; 0 elsewhere.

    On a slow link, a thread that waits for a large tensor uses no more of the CPU than in a deadlock.
    """
    moved = 0
    for entry in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError, struct.error):
            if int(entry.name) not in set(but) and os.readlink(entry).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    if connection.family != socket.AF_UNIX and connection.type == socket.SOCK_STREAM:
                        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                        moved += sum(struct.unpack_from("QQ", info, _ACKNOWLEDGED_AND_RECEIVED))
    return moved
