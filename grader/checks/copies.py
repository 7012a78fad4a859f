"""Runs what the later scripts have of earlier regions once: copies of what is graded in its home file.

A copy that does not work gives a warning. With `carried = "points"` in course.toml, a region of that script counts only
when its copies work; with "warning", the default, no point depends on it.
"""

from collections.abc import Callable
from pathlib import Path

from course.table import Course
from course.todo import Block, find_blocks
from grader.checks import bert, joining
from grader.checks.training import recorded, sampling, steps, updates
from grader.grading import Grade
from grader.verdicts import Verdict

CLIP = 0.05  # below the norm of any gradient here
EPOCHS = 2


def check_glue(grade: Grade) -> None:
    """load_model(), join() and train() of a run_glue.py: who trains on what, then each step and evaluation of one
    worker."""
    bert.check_weights(grade)
    joining.check_join(grade)
    seed = 1000 + grade.number("script", 1000)
    shared = steps.glue(grade, 2, train=13, batch=3, num_train_epochs=EPOCHS, synced=False, seed=seed)
    sampling.check_every_example_once(shared, EPOCHS, 13)
    sampling.check_batch_size(shared, EPOCHS, 3)
    sampling.check_whole_batch(shared, EPOCHS, 3, seed)
    alone = steps.glue(grade, 1, train=6, batch=3, num_train_epochs=EPOCHS, synced=False, do_eval=True)
    updates.check_steps(alone, 4)
    recorded.check_evaluations(alone, EPOCHS, 4)
    clipped = steps.glue(grade, 1, train=6, batch=3, num_train_epochs=EPOCHS, synced=False, max_grad_norm=CLIP)
    updates.check_clipping(clipped, 4, CLIP)


def check_pipeline(grade: Grade) -> None:
    """train() of pipeline/run_gpt2.py, with the whole model on one device."""
    plain = steps.gpt2(grade, 1, train=6, batch=2, n_epochs=EPOCHS, loaded=False)
    updates.check_steps(plain, 6)
    clipped = steps.gpt2(grade, 1, train=6, batch=2, n_epochs=EPOCHS, loaded=False, max_grad_norm=CLIP)
    updates.check_clipping(clipped, 6, CLIP)


def check_beyond(grade: Grade) -> None:
    """join() and train() of beyond/run_gpt2.py for one worker; what the bonus lessons average is judged there."""
    joining.check_join(grade)
    plain = steps.gpt2(grade, 1, train=6, batch=2, n_epochs=EPOCHS)
    updates.check_steps(plain, 6)


def warning(course: Course, tree: Path, script: str, check: Callable[[], None]) -> str:
    """What is wrong with the copies in a script; "" if they work, or if their home files are not solved yet."""
    copies = [(block, home) for block in _blocks(tree, script) if (home := _home(course, tree, script, block))]
    if not copies or not all(home.attempted for _, home in copies):
        return ""
    files = {block.id: course.regions[block.id].file for block, _ in copies}
    for block, home in copies:
        if not block.attempted:
            return (
                f"{script}:{block.line}: region {block.id} is not written here, but it is in {files[block.id]}:"
                f"{home.line}: run `python submit.py carry`"
            )
    try:
        check()
    except Verdict as verdict:
        if verdict.status in ("not attempted", "skipped"):
            return ""
        said = str(verdict).split("\n")[0].split(" (inputs drawn")[0]
        different = [(block, home) for block, home in copies if block.body.strip("\n") != home.body.strip("\n")]
        if not different:
            own = ", ".join(id for id, row in course.regions.items() if row.file == script)
            return f"{script}: {said}; your copies of earlier regions equal the original lines: look at {own} first"
        places = ", ".join(
            f"{block.id} (line {block.line}; {files[block.id]}:{home.line})" for block, home in different
        )
        return (
            f"{script}:{different[0][0].line}: {said}; these of your lines differ from the original ones: {places}; "
            "compare them, or run `python submit.py carry --force`"
        )
    return ""


def _blocks(tree: Path, file: str) -> list[Block]:
    try:
        return find_blocks((tree / file).read_text(encoding="utf-8"), file)
    except (OSError, ValueError):
        return []  # running the file says what is wrong


def _home(course: Course, tree: Path, script: str, block: Block) -> Block | None:
    """The block that this one is a copy of; None if its home is here."""
    row = course.regions.get(block.id)
    if row is None or row.file == script:
        return None
    return next((one for one in _blocks(tree, row.file) if (one.id, one.part) == (block.id, block.part)), None)
