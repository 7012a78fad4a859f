"""The zygote's memory on large pages: only memory of its own, and nothing in it changes."""

import hashlib
import multiprocessing
import os

from grader.inside.large_pages import anonymous, use_large_pages

MAPS = """\
55d0c0000000-55d0c0800000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
7f0000400000-7f0000500000 r--p 00000000 00:00 0
7f0000500000-7f0000600000 rw-s 00000000 00:01 12                         /dev/shm/a name (deleted)
7f0000600000-7f0000700000 rw-p 00001000 fe:00 99                         /usr/lib/libc.so.6
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0                          [stack]
"""


def test_memory_of_files_shared_memory_and_the_stack_are_left_alone():
    assert anonymous(MAPS) == [(0x55D0C0000000, 0x55D0C0800000), (0x7F0000000000, 0x7F0000400000)]


def test_what_is_in_memory_stays_as_it_is():
    content = os.urandom(9 << 20)
    wanted = hashlib.sha256(content).hexdigest()
    results = multiprocessing.get_context("fork").SimpleQueue()

    def collapse() -> None:  # in a process of its own: other tests keep the pages that they have
        use_large_pages()
        results.put(hashlib.sha256(content).hexdigest())

    child = multiprocessing.get_context("fork").Process(target=collapse)
    child.start()

    assert results.get() == wanted
    child.join()
    assert child.exitcode == 0
