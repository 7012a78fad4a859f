"""Makes Python on Linux look like Python on macOS, as far as Python code can tell: imported first by every interpreter.

Torch, numpy and the C library stay Linux's. What is taken away here is missing in macOS' Python, so code that uses it
fails here as it would there. Whoever starts the process hides /proc, and leaves it in the folder $STAND_IN_PROC.
"""

import ctypes
import os
import select
import signal
import socket
import sys
import sysconfig
from types import ModuleType

import psutil  # Linux' psutil, since that of macOS cannot be loaded here; it reads /proc where it was moved to

MISSING = {
    os: "sched_getaffinity sched_setaffinity sched_getscheduler sched_setscheduler pidfd_open memfd_create eventfd "
    "posix_fadvise posix_fallocate copy_file_range splice getrandom getxattr setxattr listxattr removexattr pipe2 "
    "unshare setns getresuid setresuid getresgid setresgid",
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo SIGRTMIN SIGRTMAX SIGPWR SIGSTKFLT",
    select: "epoll",
    socket: "SO_PEERCRED SO_BINDTODEVICE SO_MARK TCP_INFO TCP_CONGESTION TCP_QUICKACK TCP_USER_TIMEOUT AF_NETLINK "
    "AF_PACKET AF_VSOCK AF_ALG SOCK_CLOEXEC SOCK_NONBLOCK MSG_CMSG_CLOEXEC",
}
MISSING_IN_C = ("prctl", "mallinfo2", "mallopt", "malloc_trim", "unshare", "setns", "mount")

psutil.PROCFS_PATH = os.environ["STAND_IN_PROC"]
psutil._pslinux.ntp.scputimes = psutil._pslinux._scputimes_ntuple(psutil.PROCFS_PATH)  # type: ignore[attr-defined]
sysconfig.get_config_vars()  # read now, since the file has the platform in its name
for module, names in MISSING.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
sys.platform = "darwin"
sys.modules["_scproxy"] = scproxy = ModuleType("_scproxy")  # the proxies of macOS' settings, which urllib asks for
vars(scproxy).update(_get_proxy_settings=dict, _get_proxies=dict)
find = ctypes.CDLL.__getattr__


def find_in_macos(library: ctypes.CDLL, name: str) -> object:
    if name in MISSING_IN_C:
        raise AttributeError(f"dlsym({name}): symbol not found")
    return find(library, name)


ctypes.CDLL.__getattr__ = find_in_macos  # type: ignore[method-assign, assignment]
if os.environ.get("STAND_IN_FORK") == "fails":  # as with some of Apple's frameworks
    os.register_at_fork(after_in_child=os.abort)
