"""The system calls of the sandbox that Python has no function for, Linux only. Each raises OSError where it may not."""

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

from grader.wire.processes import DUMPABLE, prctl

NO_NEW_PRIVS, SECCOMP = 38, 22  # of prctl(2)
MOUNT_SETATTR, HERE, ALL_BELOW, READ_ONLY = 442, -100, 0x8000, 1  # of mount_setattr(2), on every machine
NEW_MOUNTS, NEW_USER, NEW_NETWORK = 0x00020000, 0x10000000, 0x40000000  # of unshare(2)
NO_SUID, NO_DEVICES, NO_EXEC, BIND, RECURSIVE, PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18  # of mount(2)
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
CAPABILITY_VERSION = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> int:
    """The result of a call into the C library; OSError for -1."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: object) -> int:
    return checked(_libc.syscall(ctypes.c_long(number), *arguments), f"system call {number}")


def unshare(flags: int) -> None:
    checked(_libc.unshare(flags), "unshare")


def mount(source: str, target: str | Path, kind: str = "", flags: int = 0, options: str = "") -> None:
    encoded = [os.fsencode(text) for text in (source, target, kind)]
    checked(_libc.mount(*encoded, ctypes.c_ulong(flags), options.encode() or None), f"mount on {target}")


def only_read() -> None:
    """In mounts of one's own: nothing that is mounted now can be written, not even the time of the last access."""
    attributes = struct.pack("QQQQ", READ_ONLY, 0, 0, 0)
    syscall(MOUNT_SETATTR, ctypes.c_int(HERE), b"/", ctypes.c_uint(ALL_BELOW), attributes, ctypes.c_size_t(32))


def own_namespaces(flags: int) -> None:
    """Leave the network, the mounts or both of the others; without root inside a new user namespace, as the same user.

    Costs a few milliseconds. What is mounted later is seen here alone, and is gone with the last process in here.
    """
    uid, gid = os.geteuid(), os.getegid()
    if uid != 0:
        prctl(DUMPABLE, 1)  # or /proc/self belongs to root, and nobody else may write the map below
        unshare(flags | NEW_USER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    else:
        unshare(flags)
    if flags & NEW_MOUNTS:
        mount("none", "/", "", RECURSIVE | PRIVATE)
    if flags & NEW_NETWORK:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            name = b"lo".ljust(16, b"\0")
            flags_now = struct.unpack("16xH", fcntl.ioctl(any_socket, SIOCGIFFLAGS, name + bytes(2))[:18])[0]
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, name + struct.pack("H", flags_now | IFF_UP) + bytes(14))


def drop_capabilities() -> None:
    """What a new user namespace has given; a change of the user away from root drops them by itself."""
    header = struct.pack("Ii", CAPABILITY_VERSION, 0)
    syscall(SYS_CAPSET[os.uname().machine], header, bytes(24))


def kill_user(uid: int) -> None:
    """As root: kill all processes of a user who is nobody else. One call ends them all, however fast they fork."""
    pid = os.fork()
    if pid == 0:
        is_user = False
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setresuid(uid, uid, uid)
            is_user = True
            os.kill(-1, 9)  # an error if there is no process of this user: nothing is left to end
        os._exit(0 if is_user else 1)
    if os.waitpid(pid, 0)[1]:
        print(f"warning: could not end the processes of user {uid}; some may still run", file=sys.stderr)
