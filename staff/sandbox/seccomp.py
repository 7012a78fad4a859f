"""Seccomp: a filter that answers system calls which no lesson needs with "not permitted". Costs nothing measurable.

A list of what is refused, not of what is allowed: torch and Python use most calls there are. The filter sees numbers
only, never what a pointer points to.
"""

import ctypes
import errno
import os
import struct

from grader.wire.processes import prctl
from staff.sandbox.kernel import NO_NEW_PRIVS, SECCOMP

# name -> number on (x86_64, aarch64)
REFUSED = {
    # other processes' memory and files
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "move_pages": (279, 239), "migrate_pages": (256, 238),
    # the system as a whole
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "setns": (308, 268),
    "unshare": (272, 97), "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430),
    "mount_setattr": (442, 442), "swapon": (167, 224), "reboot": (169, 142), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "acct": (163, 89),
    "open_by_handle_at": (304, 265), "quotactl": (179, 60), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "setpriority": (141, 140), "fanotify_init": (300, 262),
    # what outlives every process: keys, System V memory, message queues
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "shmget": (29, 194), "semget": (64, 190),
    "msgget": (68, 186), "mq_open": (240, 180),
    # the kernel's memory, which nobody counts: local sockets, files without a name, watches
    "socketpair": (53, 199), "memfd_create": (319, 279), "memfd_secret": (447, 447), "inotify_add_watch": (254, 27),
    # which pages of a file are in memory, that all can read: a message between ranks
    "preadv2": (327, 286), "cachestat": (451, 451), "mincore": (27, 232), "fadvise64": (221, 223),
    # a lock on a file that all can read is seen by other ranks; a processor may be another hand-in's
    "flock": (73, 32), "sched_setaffinity": (203, 122),
    # what a process may set of itself, and every other one may ask for by number
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
}  # fmt: skip
OUT_OF_MEMORY = {  # what holds bytes that no process's memory has: pipes, links, attributes of files
    "pipe": (22, 59), "pipe2": (293, 59), "symlink": (88, 36), "symlinkat": (266, 36), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
}  # fmt: skip
ONLY_MYSELF = {  # 0 as the first argument means the caller
    "prlimit64": (302, 261), "sched_getscheduler": (145, 120), "sched_getattr": (315, 275), "getpgid": (121, 155),
}  # fmt: skip
SIGNALS = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
}  # fmt: skip
CLONE3, CLONE, SOCKET = (435, 435), (56, 220), (41, 198)
FCNTL, SETSOCKOPT = (72, 25), (54, 208)
LOCKS = [6, 7, 37, 38]  # F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW
NOTICES = [1024, 1026, 1031]  # F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ
BUFFERS = [7, 8, 32, 33]  # SO_SNDBUF, SO_RCVBUF and both with FORCE
NAMESPACES, THREAD = 0x7E020080, 0x00010000  # the CLONE_NEW... bits, CLONE_THREAD
FORKS = [57, 58]  # fork and vfork, which are calls of their own on x86_64 alone
AF_INET, AF_INET6, AF_NETLINK = 2, 10, 16
KIND, DATAGRAM = 0xF, 2  # of the second argument of socket(2)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

LOAD, EQUAL, AT_LEAST, ANY_BIT, AND, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06  # of classic BPF
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, MACHINE, FIRST, SECOND, THIRD = 0, 4, 16, 24, 32  # offsets in what the filter sees; of arguments the lower half
X32 = 0x40000000  # a second set of numbers on x86_64
Line = tuple[int, int, int, int]


def install(sockets: bool, signals_to: int | None, processes: bool = False, measured: bool = False) -> None:
    """Filter this process and its children for good. Sets no_new_privs.

    `sockets`: internet sockets may be made (inside a network of one's own); others never. `signals_to`: the only
    process that may be sent a signal, besides "my group"; None leaves signals alone. `processes`: other processes may
    be started, and not only threads. `measured`: nothing may be kept outside of this process's memory.
    """
    lines = program(sockets, signals_to, processes, measured)
    code = b"".join(struct.pack("=HBBI", *line) for line in lines)
    buffer = ctypes.create_string_buffer(code)
    header = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(buffer))
    prctl(NO_NEW_PRIVS, 1)
    prctl(SECCOMP, 2, ctypes.c_char_p(header))


def available() -> bool:
    """Whether this machine is one whose numbers are known here, and the kernel has seccomp."""
    try:
        return os.uname().machine in MACHINES and prctl(21) >= 0
    except OSError:
        return False


def program(sockets: bool, signals_to: int | None, processes: bool, measured: bool) -> list[Line]:
    """The filter's lines: code, how far to jump if true, how far if not, value."""
    column, machine = MACHINES[os.uname().machine]
    refuse = (RETURN, 0, 0, REFUSE | errno.EPERM)
    lines: list[Line] = [(LOAD, 0, 0, MACHINE), (EQUAL, 1, 0, machine), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    if column == 0:
        lines += [(AT_LEAST, 0, 1, X32), refuse]
    for numbers in [*REFUSED.values(), *(OUT_OF_MEMORY.values() if measured else ())]:
        lines += [(EQUAL, 0, 1, numbers[column]), refuse]
    lines += [(EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, REFUSE | errno.ENOSYS)]  # libc then uses clone
    only_threads = [] if processes else [(ANY_BIT, 1, 0, THREAD), refuse]
    lines += _on(CLONE[column], FIRST, [(ANY_BIT, 0, 1, NAMESPACES), refuse, *only_threads])
    if column == 0 and not processes:
        lines += [line for number in FORKS for line in [(EQUAL, 0, 1, number), refuse]]
    families = [AF_INET, AF_INET6, AF_NETLINK] if sockets else []  # netlink: getaddrinfo asks it
    no_datagrams = [(LOAD, 0, 0, SECOND), (AND, 0, 0, KIND), *_none_of([DATAGRAM])]  # unread ones fill 25 MiB a process
    lines += _on(SOCKET[column], FIRST, [*_one_of(families), *no_datagrams])
    lines += _on(FCNTL[column], SECOND, _none_of([*LOCKS, *NOTICES]))
    lines += _on(SETSOCKOPT[column], THIRD, _none_of(BUFFERS))
    for numbers in ONLY_MYSELF.values():
        lines += _on(numbers[column], FIRST, _one_of([0]))
    if signals_to is not None:
        for numbers in SIGNALS.values():
            lines += _on(numbers[column], FIRST, _one_of([0, signals_to]))
    return [*lines, (RETURN, 0, 0, ALLOW)]


def _on(number: int, argument: int, then: list[Line]) -> list[Line]:
    """For this call look at one of its arguments; otherwise the number stays loaded for what follows."""
    body = [(LOAD, 0, 0, argument), *then, (RETURN, 0, 0, ALLOW)]
    return [(EQUAL, 0, len(body), number), *body]


def _one_of(values: list[int]) -> list[Line]:
    """Refuse, unless the loaded value is one of these."""
    refuse = (RETURN, 0, 0, REFUSE | errno.EPERM)
    tests = [(EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
    return [*tests, refuse]


def _none_of(values: list[int]) -> list[Line]:
    """Refuse if the loaded value is one of these."""
    refuse = (RETURN, 0, 0, REFUSE | errno.EPERM)
    return [line for value in values for line in [(EQUAL, 0, 1, value), refuse]]
