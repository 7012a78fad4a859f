"""What a rank could read in its own memory, and in that of the process it is forked from.

A word is planted in every region, judge and bank of a checkout, another one in a hand-in, which the checkout's graders
grade. Every rank stops at the end of its probe. It and its parent are searched for both words, from outside.
"""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.paths import ROOT
from grader.wire.processes import descendants
from staff.proofs.bank import copy_tree

LAST_WORD = "        wire.send(message | never_waited)\n"
STOP = "        import os, signal; os.kill(os.getpid(), signal.SIGSTOP)\n"
BEGIN = re.compile(r"^( *)# BEGIN SOLUTION .*$", re.MULTILINE)
JUDGES = ("grader/[a-z]*.py", "tests/**/*.py", "staff/hidden/*.py")
SENT = "*_in_rank.py"  # files of tests/ that ranks are sent whole


def planted_checkout(folder: Path, word: str) -> int:
    """Copy the repository into `folder` with `word` in every region, judge and bank; return in how many places."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    count = 0
    for path in [path for path in folder.rglob("*.py") if "BEGIN SOLUTION" in path.read_text()]:
        if path.is_relative_to(folder / "staff") or path.is_relative_to(folder / "tests"):
            continue
        text, replacements = BEGIN.subn(rf'\g<0>\n\g<1>_ = "{word}"', path.read_text())
        path.write_text(text)
        count += replacements
    for path in [path for pattern in JUDGES for path in folder.glob(pattern) if not path.match(SENT)]:
        path.write_text(path.read_text() + f'\nPLANTED = "{word}"\n')
        count += 1
    for path in (folder / "staff/banks").rglob("*.toml"):
        path.write_text(path.read_text() + f"\n# {word}\n")
        count += 1
    return count


def stop_at_the_end_of_a_probe(checkout: Path) -> None:
    file = checkout / "grader/inside/run_source.py"
    text = file.read_text()
    assert text.count(LAST_WORD) == 1, "the line that sends a rank's last message has changed"
    file.write_text(text.replace(LAST_WORD, STOP + LAST_WORD))


def state_and_parent(pid: int) -> tuple[str, int]:
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "gone", 0
    return state, int(parent)


def words_in_memory(pid: int, words: list[str]) -> set[str]:
    """Return which of the words a process has in its writable memory: the heap, and all that was read into it."""
    present = set[str]()
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for row in maps:
            span, rights = row.split()[:2]
            if rights.startswith("rw"):
                begin, end = (int(address, 16) for address in span.split("-"))
                memory.seek(begin)
                content = memory.read(end - begin)
                present |= {word for word in words if word.encode() in content}
    return present


def search_while_grading(checkout: Path, tree: Path, words: list[str]) -> tuple[int, set[tuple[str, str]]]:
    """Grade `tree` with a planted checkout; return how many ranks were stopped, and who had which word."""
    command = [sys.executable, "-m", "pytest", "-q", f"--tree={tree}", *TESTS]
    environment = os.environ | {"COS598D_SLOWNESS": "20"}
    stopped, holders = 0, set[tuple[str, str]]()
    with subprocess.Popen(command, cwd=checkout, env=environment, stdout=subprocess.DEVNULL) as graders:
        while graders.poll() is None:
            for pid in descendants(graders.pid, set()):
                state, parent = state_and_parent(pid)
                if state == "T":
                    holders |= {("a rank", word) for word in words_in_memory(pid, words)}
                    holders |= {("the process that forks it", word) for word in words_in_memory(parent, words)}
                    stopped += 1
                    os.kill(pid, signal.SIGCONT)
            time.sleep(0.002)
    assert graders.returncode in (0, 1), "the graders themselves have failed"
    return stopped, holders


TESTS = [
    "tests/task1/test_bert.py::test_the_pretrained_weights_are_loaded",  # its ranks write a traceback
    "tests/gradients/test_averaging.py::test_all_reduce_leaves_out_what_has_no_gradient",
    "tests/pipeline/test_schedule.py::test_the_schedule_is_as_short_as_it_can_be",
    "tests/pipeline/test_compute.py::test_all_partitions_of_a_clock_cycle_work_at_the_same_time",
]


@pytest.mark.medium
def test_ranks_have_in_memory_what_was_handed_in_and_no_line_of_a_solution_a_judge_or_a_bank(tmp_path):
    secret, own = secrets.token_hex(8), secrets.token_hex(8)
    tree, checkout = tmp_path / "tree", tmp_path / "checkout"
    copy_tree(tree)
    with open(tree / "common/schedule.py", "a") as file:
        file.write(f'\nWORD = "{own}"\n')
    assert planted_checkout(checkout, secret) > 100
    stop_at_the_end_of_a_probe(checkout)

    stopped, holders = search_while_grading(checkout, tree, [secret, own])

    assert stopped >= len(TESTS)
    assert holders == {("a rank", own)}, "the search finds a word that is there"
