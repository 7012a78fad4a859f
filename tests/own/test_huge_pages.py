"""The zygote's memory in huge pages: forking is cheaper, and what is in memory stays as it was."""

import mmap
import re
import sys
from pathlib import Path

import pytest

from grader.inside.huge_pages import SIZE, HugePages

SMALL = 4096  # bytes of a page
MARK = b"here"


@pytest.fixture
def block():
    """Memory for 16 huge pages, filled page by page, as a program fills its memory."""
    with mmap.mmap(-1, 16 * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for at in range(0, len(memory), SMALL):
            memory[at : at + len(MARK)] = MARK
        yield memory


def in_huge_pages() -> int:
    """Bytes of this process's memory that are in huge pages."""
    return int(re.findall(r"AnonHugePages: *(\d+)", Path("/proc/self/smaps_rollup").read_text())[0]) << 10


def collapse_all() -> None:
    pages = HugePages()
    pages.look()
    while pages.left:
        pages.collapse_one()


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux only")
def test_memory_is_put_into_huge_pages_and_keeps_what_is_in_it(block):
    before = in_huge_pages()
    collapse_all()
    if in_huge_pages() == before:
        pytest.skip("this system gives no huge pages: before Linux 6.1, or none are free")
    assert in_huge_pages() - before >= 8 * SIZE
    assert all(block[at : at + len(MARK)] == MARK for at in range(0, len(block), SMALL))


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux only")
def test_memory_that_was_tried_is_not_tried_again(block):
    pages = HugePages()
    pages.look()
    assert len(pages.left) >= 15
    while pages.left:
        pages.collapse_one()
    pages.look()
    assert not pages.tried.intersection(pages.left)
