"""What a rank could read in its own memory, and in that of the process it is forked from.

A word is planted in every region, judge and bank of a checkout, and the checkout's graders grade a hand-in. Every rank
stops at the end of its probe; then its memory and its parent's are searched for the word, from outside.
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
from staff.handout.assemble import Handout
from staff.tests.handouts import open_handout, solved_handout

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
        text, found = BEGIN.subn(rf'\g<0>\n\g<1>_ = "{word}"', path.read_text())
        path.write_text(text)
        count += found
    for path in [path for pattern in JUDGES for path in folder.glob(pattern) if not path.match(SENT)]:
        path.write_text(path.read_text() + f'\nPLANTED = "{word}"\n')
        count += 1
    for path in (folder / "staff/banks").rglob("*.toml"):
        path.write_text(path.read_text() + f"\n# {word}\n")
        count += 1
    return count


def stop_at_the_end_of_a_probe(checkout: Path) -> None:
    context = checkout / "grader/inside/context.py"
    text = context.read_text()
    assert text.count(LAST_WORD) == 1, "the line that sends a rank's last message has changed"
    context.write_text(text.replace(LAST_WORD, STOP + LAST_WORD))


def state_and_parent(pid: int) -> tuple[str, int]:
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "gone", 0
    return state, int(parent)


def holds(pid: int, word: str) -> bool:
    """Whether a process has the word anywhere in memory of its own, which the heap and all that was read into it is."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for row in maps:
            span, rights = row.split()[:2]
            if rights.startswith("rw"):
                begin, end = (int(address, 16) for address in span.split("-"))
                memory.seek(begin)
                if word.encode() in memory.read(end - begin):
                    return True
    return False


def search_while_grading(tmp_path: Path, tree: Path, *flags: str, word: str) -> tuple[int, set[str]]:
    """Grade `tree` with a planted checkout; return how many ranks were searched, and who had the word."""
    checkout = tmp_path / "checkout"
    assert planted_checkout(checkout, word) > 100
    stop_at_the_end_of_a_probe(checkout)
    command = [sys.executable, "-m", "pytest", "-q", f"--tree={tree}", *flags, "tests", "--ignore", "tests/own"]
    environment = os.environ | {"COS598D_SLOWNESS": "20"}
    searched, found = 0, set[str]()
    with subprocess.Popen(command, cwd=checkout, env=environment, stdout=subprocess.DEVNULL) as graders:
        while graders.poll() is None:
            for pid in descendants(graders.pid, set()):
                state, parent = state_and_parent(pid)
                if state == "T":
                    found |= {"a rank"} if holds(pid, word) else set()
                    found |= {"the process that forks the ranks"} if holds(parent, word) else set()
                    searched += 1
                    os.kill(pid, signal.SIGCONT)
            time.sleep(0.002)
    assert graders.returncode in (0, 1), "the graders themselves have failed"
    return searched, found


def tree_of(handout: Handout, folder: Path) -> Path:
    for name, content in handout.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.medium
def test_ranks_and_their_parent_hold_no_line_of_a_solution_a_judge_or_a_bank(tmp_path):
    tests = "leave_the_mean or shares_add_up or as_short_as or at_the_same_time or at_most_two_blocks"
    tree = tree_of(solved_handout(), tmp_path / "tree")

    searched, found = search_while_grading(tmp_path, tree, "-k", tests, word=secrets.token_hex(8))

    assert searched > 20
    assert found == set()


@pytest.mark.medium
def test_a_word_that_the_hand_in_itself_has_is_found_in_its_ranks(tmp_path):
    """The search can fail: the same search finds a word that is there."""
    word = secrets.token_hex(8)
    tree = tree_of(solved_handout(), tmp_path / "tree")
    with open(tree / "common/schedule.py", "a") as file:
        file.write(f'\nWORD = "{word}"\n')

    _, found = search_while_grading(tmp_path, tree, "--region", "p.2", word=word)

    assert found == {"a rank"}


@pytest.mark.proof
@pytest.mark.parametrize("handout", [open_handout, solved_handout], ids=["untouched", "solved"])
def test_no_probe_of_any_region_ends_with_a_planted_word_in_memory(tmp_path, handout):
    _, found = search_while_grading(tmp_path, tree_of(handout(), tmp_path / "tree"), word=secrets.token_hex(8))

    assert found == set()
