"""Puts a process's memory into pages of 2 MB, so that forking it costs a quarter.

A fork copies one entry for every page of 4 KB, 70,000 of them once torch and transformers are loaded, and the end of
the child frees them: 20 ms for a rank that does nothing. With huge pages it is 5 ms, and what a rank then writes to is
still copied by 4 KB: grading a solved hand-in takes a tenth less time (51 s instead of 57 s). Moving 230 MB takes 0.2
to 0.6 s, so it is done page by page while nobody waits, and not for a few ranks.
"""

import ctypes
import sys
from pathlib import Path

MADV_COLLAPSE = 25  # Linux 6.1; needs no setting of the system's, and changes nothing for memory taken later
WORTH_FROM = 24  # ranks: after so many, as many again will probably follow
SIZE = 2 << 20  # bytes of a huge page: one takes some milliseconds


class HugePages:
    """The parts of this process's memory that could be a huge page each and have not been tried."""

    def __init__(self) -> None:
        self.left: list[int] = []  # addresses
        self.tried: set[int] = set()
        self.madvise = ctypes.CDLL(None, use_errno=True).madvise if sys.platform == "linux" else None
        if self.madvise:
            self.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def look(self) -> None:
        """List the memory that was taken since the last look: the heap, and memory that belongs to no file."""
        if self.madvise:
            self.left = [address for address in _addresses() if address not in self.tried]

    def collapse_one(self) -> None:
        """Put one of them into a huge page. What the system refuses stays in small pages, which costs only time."""
        assert self.madvise
        address = self.left.pop()
        self.tried.add(address)
        self.madvise(address, SIZE, MADV_COLLAPSE)


def _addresses() -> list[int]:
    """Return the addresses of possible huge pages: private memory of this process that belongs to no file."""
    addresses: list[int] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, *_, name = (line.split(maxsplit=5) + [""])[:6]
        if rights == "rw-p" and name in ("", "[heap]"):
            begin, end = (int(address, 16) for address in span.split("-"))
            addresses += range((begin + SIZE - 1) // SIZE * SIZE, end - SIZE + 1, SIZE)
    return addresses
