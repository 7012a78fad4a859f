"""What of this machine every rank may read, whatever it grades: Python, the system's libraries, a few files.

Only folders that belong to the interpreter or the system are listed, never what may lie beside them. Nothing of common/
is imported here: a rank reads this file's list before it imports the common/ of its own tree.
"""

import sys
from pathlib import Path

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
