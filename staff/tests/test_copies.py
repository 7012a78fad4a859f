"""Copies of earlier regions in later scripts: what works is silent, what does not is a warning with file and line; and
`submit.py carry` makes them from the home files."""

import subprocess
import sys
from pathlib import Path

import pytest

from course.table import load_course
from course.todo import find_blocks, replace_block
from handin.carry import carry
from staff.grade.submissions import write_files
from staff.proofs.grading_pool import grade
from staff.tests.handouts import open_handout, solved_handout

COPIES = "tests/test_copies.py"
# Of two scripts; make bank looks at the copies of the others, too.
OF_TASK_4 = f"{COPIES}::test_what_task_4_has_of_earlier_tasks_works"
OF_TASK_3 = f"{COPIES}::test_what_gpt2_of_task_3_has_of_earlier_tasks_works"
GLUE, TRAFFIC, PIPELINE = "task1_single/run_glue.py", "task4_traffic/run_glue.py", "pipeline/run_gpt2.py"
COURSE = load_course()


@pytest.fixture
def tree(tmp_path) -> Path:
    """A student's tree with every region solved."""
    write_files(solved_handout(), tmp_path / "tree")
    return tmp_path / "tree"


def change(tree: Path, file: str, region: str, body: str, part: int = 1) -> int:
    """Put other lines into a region; returns the line of its TODO."""
    text = (tree / file).read_text(encoding="utf-8")
    block = next(block for block in find_blocks(text, file) if (block.id, block.part) == (region, part))
    (tree / file).write_text(replace_block(text, block, body), encoding="utf-8")
    return block.line


@pytest.mark.proof
def test_copies_that_differ_and_work_give_no_warning(tree):
    solved = find_blocks((tree / GLUE).read_text(encoding="utf-8"), GLUE)
    own = {(block.id, block.part): f"# my own words\n{block.body}" for block in solved}
    for script in (TRAFFIC, "task2b_allreduce/run_glue.py", "task3_ddp/run_gpt2.py", "beyond/run_gpt2.py", PIPELINE):
        change(tree, script, "1.3", own["1.3", 1])

    assert grade(tree, [COPIES], 1).warned == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "region", "part", "body", "words"),
    [
        (TRAFFIC, "2a.2", 1, "loader = DataLoader(data.train, batch_size=4)", "NameError"),
        (TRAFFIC, "2a.2", 2, "pass", "the same order in every epoch"),
        (TRAFFIC, "1.1", 1, "model = BertForSequenceClassification(bert_config)", "random weights"),
        (TRAFFIC, "1.4", 1, "evaluate(config, worker, model, data)", "record.evaluation"),
        (TRAFFIC, "2a.1", 1, "dist.init_process_group('gloo', 'tcp://127.0.0.1:1', None, 2, 0)", "ranks would wait"),
        ("task2a_gather_scatter/run_glue.py", "1.1", 1, "model = None", "NoneType"),
        ("beyond/run_gpt2.py", "1.3", 1, "optimizer.step()\noptimizer.step()", "steps again"),
        (PIPELINE, "1.2", 1, "loss.backward(retain_graph=True)\nloss.backward()", "2.000 times"),
    ],
)
def test_a_copy_that_does_not_work_is_named_with_its_line_and_what_to_do(tree, file, region, part, body, words):
    line = change(tree, file, region, body, part)

    (warning,) = grade(tree, [COPIES], 1).warned
    assert warning.startswith(f"{file}:{line}: ") and warning.endswith("run `python submit.py carry --force`")
    assert words in warning and f"these of your lines differ from the original ones: {region} (line " in warning


@pytest.mark.medium
def test_a_copy_that_is_still_open_is_named_and_costs_nothing_and_nothing_is_said_while_its_home_is_open(tree):
    line = change(tree, TRAFFIC, "1.3", 'raise NotImplementedError("TODO 1.3: one step")')

    of_the_script = "tests/task4/test_expected.py::test_gather_and_scatter_cost_rank_0_more"
    graded = grade(tree, [OF_TASK_4, OF_TASK_3, of_the_script], 1)
    change(tree, GLUE, "1.3", 'raise NotImplementedError("TODO 1.3: one step")')

    (warning,) = graded.warned
    assert warning.startswith(f"{TRAFFIC}:{line}: region 1.3 is not written here, but it is in {GLUE}:")
    assert warning.endswith("run `python submit.py carry`")
    assert set(graded.statuses.values()) == {"passed"} and graded.points_lost == {}
    assert grade(tree, [OF_TASK_4], 1).warned == []


@pytest.mark.medium
def test_home_files_solved_and_carried_give_the_solved_handout(tmp_path):
    unsolved, solved = open_handout().files, solved_handout()
    scripts = [name for name in unsolved if name.endswith(".py") and (name.startswith(("task", "pipeline/")))]
    write_files({name: unsolved[name] for name in scripts}, tmp_path)
    for row in COURSE.regions.values():
        for block in find_blocks(solved[row.file].decode()) if row.file in scripts else ():
            if block.id == row.id:
                change(tmp_path, row.file, row.id, block.body, block.part)

    messages = list(carry(tmp_path, COURSE))

    assert all("carried" in line for line in messages)
    assert {name: (tmp_path / name).read_text() for name in scripts} == {
        name: solved[name].decode() for name in scripts
    }


@pytest.mark.medium
def test_the_demo_of_an_untouched_handout_says_what_comes_first(tmp_path):
    write_files(open_handout().files, tmp_path)
    command = [sys.executable, "-m", "cluster.demo.ladder", "--workers", "2", "--iterations", "2"]

    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert process.returncode == 0, process.stderr
    assert "task 1 one worker: not written yet: 1.1, 1.2, 1.3, 1.4; the table ends here" in process.stdout
    assert process.stdout.splitlines()[-1].startswith("next: 1.1 ")
