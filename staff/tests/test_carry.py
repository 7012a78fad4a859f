"""`submit.py carry` on the real handout: solved home files are all a student needs to write."""

import subprocess
import sys

import pytest

from course.table import load_course
from course.todo import find_blocks
from handin.carry import carry
from staff.grade.submissions import write_files
from staff.tests.handouts import open_handout, solved_handout


@pytest.mark.medium
def test_home_files_solved_and_carried_give_the_solved_handout(tmp_path):
    course = load_course()
    unsolved, solved = open_handout().files, solved_handout()
    homes = {row.file for row in course.regions.values()} & unsolved.keys()
    scripts = [name for name in unsolved if name.endswith(".py") and (name.startswith(("task", "pipeline/")))]
    write_files({name: unsolved[name] for name in scripts}, tmp_path)
    for name in homes:  # in home files, what is at home there is solved, and nothing else
        text = unsolved[name].decode()
        for block in reversed(find_blocks(text)):
            if course.regions[block.id].file == name:
                lines, want = text.split("\n"), find_blocks(solved[name].decode())
                other = next(w for w in want if (w.id, w.part) == (block.id, block.part))
                new = solved[name].decode().split("\n")[other.line : other.end_line - 1]
                text = "\n".join(lines[: block.line] + new + lines[block.end_line - 1 :])
        write_files({name: text.encode()}, tmp_path)

    messages = list(carry(tmp_path, course))

    assert all("carried" in line for line in messages)
    assert {name: (tmp_path / name).read_text() for name in scripts} == {
        name: solved[name].decode() for name in scripts
    }


@pytest.mark.medium
def test_the_demo_of_an_untouched_handout_says_what_comes_first(tmp_path):
    write_files(open_handout().files, tmp_path)
    command = [sys.executable, "-m", "cluster.ladder", "--workers", "2", "--iterations", "2"]

    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert process.returncode == 0, process.stderr
    assert "task 1 one worker: not written yet: 1.1, 1.2, 1.3, 1.4; the table ends here" in process.stdout
    assert process.stdout.splitlines()[-1].startswith("next: 1.1 ")
