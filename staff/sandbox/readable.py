"""What of this machine every rank may read, whatever it grades: Python, the system's libraries, a few files.

Only folders that belong to the interpreter or the system are listed, never what may lie beside them: a course or a
hand-in below one of them could be read by every submission, and `refuse_exposed` says so before anything is graded.
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from common.errors import InputError

OF_THE_SYSTEM = (
    "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/bin", "/usr/sbin", "/usr/share", "/usr/include",
    "/usr/local/lib", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/hosts", "/etc/nsswitch.conf",
    "/etc/resolv.conf", "/etc/host.conf", "/etc/gai.conf", "/etc/passwd", "/etc/localtime", "/etc/ssl", "/etc/fonts",
    "/sys/devices", "/sys/class/net", "/sys/bus/pci/devices", "/proc/self", "/proc/cpuinfo", "/proc/meminfo",
    "/proc/stat", "/proc/sys/kernel", "/dev/zero", "/dev/urandom", "/dev/random",
)  # fmt: skip
OF_PYTHON = (
    "lib",
    "lib64",
    "bin",
    "include",
    "pyvenv.cfg",
)  # in a prefix, beside which a course may lie


def readable() -> list[Path]:
    """Return the files and folders that a rank may read beside its own tree."""
    prefixes = dict.fromkeys((sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix))
    return [*map(Path, OF_THE_SYSTEM), *(Path(prefix, name) for prefix in prefixes for name in OF_PYTHON)]


def refuse_exposed(paths: Iterable[Path]) -> None:
    """Raise InputError if one of these lies in or below what every rank may read."""
    folders = [Path(os.path.realpath(path)) for path in readable()]
    for path in paths:
        real = Path(os.path.realpath(path))
        for folder in folders:
            if folder == real or folder in real.parents:
                raise InputError(
                    f"{path}: expected a place that submissions cannot read, but it is in {folder}, which every "
                    "submission can read (Python and the system's libraries); move it, for example to /srv/course"
                )
