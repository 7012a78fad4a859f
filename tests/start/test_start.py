"""Starting the workers of run_gpt2.py, 2b.9: start_workers() alone, and the whole script with real processes.

The grader sees the collectives of ranks that it starts itself. Here a rank starts processes of its own, so the files
and records that they leave say what they do, see start_in_rank.py.
"""

from __future__ import annotations

import ast
import re
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from grader.arithmetic import Tolerance
from grader.compare import Expected, check
from grader.grading import Grade
from grader.in_rank import in_rank, run, run_alone, run_to_any_end
from grader.verdicts import builds_on, last_words, not_attempted
from grader.wire.values import Fields
from tests.start.test_joining import OF_A_SCHEDULER
from tests.training import loop_shared, small_models

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, start_afresh, torch
    from tests.start.start_in_rank import (
        GPT2LMHeadModel,
        make_work,
        multiprocessing,
        notes_of_workers,
        os,
        recorded_losses,
        save_tiny_gpt2,
        set_command_line,
        watch_joins,
    )

graded = pytest.mark.graded
CRASHES = loop_shared.CRASHES
GLUE, GPT2 = "task2b_allreduce/run_glue.py", "task2b_allreduce/run_gpt2.py"
IN_RANK, PRELOAD = "tests/start/start_in_rank.py", ("scripts", "steps", "models")
STEPS, BLOCKS = 3, 24  # of the whole script; every step trains on all blocks
WORKERS = 2
PATIENCE = 3.0  # seconds in which all processes must run at once
LOSS_ERROR = 1e-4  # relative: workers add gradients up in another order than one worker does


# --- what a rank does ---


@in_rank(uses=[IN_RANK], preload=PRELOAD, join=False, allows=["processes"])
def start_workers(context: Context, lesson: Any, inputs: Fields) -> Fields:
    """Call start_workers(config), with work() replaced, and return what its processes have noted."""
    from dataclasses import fields

    from common.config import Gpt2Config

    here = os.getpid()
    os.environ |= context.arguments["environment"]
    multiprocessing.set_start_method("forkserver", force=True)
    work = make_work(context.arguments)
    work.__module__, work.__qualname__ = lesson.__name__, "work"  # pickled by name, as the student's is
    watch_joins()
    start_afresh(lesson, lambda: setattr(lesson, "work", work))
    lesson.work = work
    values: Fields = {field.name: None for field in fields(Gpt2Config)}
    values |= {"join_seconds": 300.0, "hang_seconds": 300.0}  # a join may have one of them as its time limit
    returned = lesson.start_workers(Gpt2Config(**values | {"world_size": context.arguments["workers"]}))
    running = multiprocessing.active_children()
    for child in running:
        child.join()
    items = returned if isinstance(returned, list | tuple) else []
    kinds = ["process" if hasattr(item, "exitcode") else type(item).__name__ for item in items]
    return notes_of_workers(here) | {"running": len(running), "returned": kinds}


@in_rank(
    uses=[IN_RANK], preload=PRELOAD, first="replace_surroundings", join=False, allows=["processes", "network"]
)  # fmt: skip
def run_script(context: Context, lesson: ModuleType, inputs: Fields) -> Fields:
    """Run main() on two workers. Return its error, and the losses in their records. What surrounds the script:
    replace_surroundings."""
    from common.errors import InputError

    start_afresh(lesson)
    set_command_line(context)
    error = ""
    try:
        lesson.main()
    except InputError as caught:
        error = str(caught)
    return {"error": error, "losses": recorded_losses()}


@in_rank(uses=[IN_RANK], preload=PRELOAD, join=False)
def train_alone(context: Context, lesson: ModuleType, inputs: torch.Tensor) -> list[float]:
    """Return the losses of one worker that trains on all blocks in every step. Runs beside no student's file."""
    from common.arguments import parse_gpt2_arguments
    from common.optim import build_optimizer

    save_tiny_gpt2(context)
    set_command_line(context)
    config = parse_gpt2_arguments("task2b_allreduce", world_size=2)
    model = GPT2LMHeadModel.from_pretrained("pretrained")
    optimizer, schedule = build_optimizer(config, model, 1)
    tokens, losses = inputs[: context.arguments["blocks"]], []
    for _ in range(context.arguments["steps"]):
        loss = model(input_ids=tokens, labels=tokens).loss
        model.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step(None)
        schedule.step()
        losses.append(float(loss))
    return losses


# --- start_workers() ---


def check_started(grade: Grade, count: int, slowest: int) -> None:
    """Check that the script starts a process for every rank before it waits for the first one, and waits for all."""
    refuse_work_at_import(grade)
    patience = PATIENCE * grade.session.slowness
    arguments: Fields = {"workers": count, "slowest": slowest, "patience": patience, "environment": OF_A_SCHEDULER}
    got = run(grade, start_workers, [None], **arguments).values[0]
    expected = {
        "in_this_process": Expected(
            False, "work() runs in the script's own process, but every rank, 0 as well, has one of its own: pass "
            "target=work, not target=work(...), and start() it"
        ),
        "running": Expected(
            0, "{got} processes still run when start_workers returns: join all of them, without a time-out"
        ),
        "ranks": Expected(
            list(range(count)),
            f"expected work(rank, config) in {count} processes, ranks 0 to {count - 1}, got {{got}}",
            mistakes={
                "work(rank, config) got something other than a rank first: pass args=(rank, config), in this order":
                    [-1] * count
            },
        ),
        "together": Expected(count, "the processes run one after the other: start all before you wait for the first"),
        "configs": Expected([str(count)], "work(rank, config): expected the config of the script, got {got}"),
        "returned": Expected(
            ["process"] * count, f"expected start_workers() to return the list of its {count} processes, got {{got}}"
        ),
    }  # fmt: skip
    check(grade, "", got, expected)


def refuse_work_at_import(grade: Grade) -> None:
    """Fail for a call of one of the file's own functions outside of `if __name__ == "__main__":`."""
    try:
        tree = ast.parse((grade.session.tree / grade.file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # running it says what is wrong
    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for statement in tree.body:
        if isinstance(statement, ast.Expr | ast.Assign | ast.For | ast.With | ast.Try):
            calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
            names = {node.id for call in calls for node in ast.walk(call) if isinstance(node, ast.Name)} & own
            if names:
                grade.fail(
                    f"{grade.file}:{statement.lineno} calls {min(names)}() when the file is imported, and every worker "
                    'imports it: put the call under `if __name__ == "__main__":`'
                )


# --- the whole script ---


def check_losses(grade: Grade, losses: list[list[float]], alone: np.ndarray) -> None:
    """Check that the workers' mean loss is that of one worker with all blocks, and that their losses differ."""
    steps = [len(own) for own in losses]
    check(grade, "", {"steps": steps}, {"steps": Expected([STEPS] * WORKERS, name="losses that each worker records")})
    if losses[0] == losses[1]:
        grade.fail(
            f"both workers record the same losses: they train on the same examples, or {loop_shared.CHANGED_LOSS}"
        )
    cause = "do the two together train on all of the data, and do they average gradients?"
    mean = Expected(alone, cause, "the workers' mean loss in each step", tolerance=Tolerance(limit=LOSS_ERROR * alone))
    check(grade, "", {"mean": np.mean(losses, axis=0)}, {"mean": mean})


# --- the graded tests ---


@graded("2b.9")
def test_every_worker_is_started_and_waited_for(grade: Grade) -> None:
    for count, slowest in ((3, 0), (2, 1), (1, 0)):
        check_started(grade, count, slowest)


@graded("2b.9", network=True)
def test_the_script_trains_on_two_workers(grade: Grade) -> None:
    grade.check_written(grade.file, "common/data_partition.py")  # the start alone takes many seconds
    check_started(grade, 3, 0)  # wrongly started, the script's workers would wait for each other first
    slowness = grade.session.slowness
    blocks = small_models.examples(grade.number("blocks", 1 << 30), BLOCKS + 8)[0]
    arguments: Fields = {
        "model_seed": grade.number("gpt2", 1 << 30),
        "blocks": BLOCKS,
        "steps": STEPS,
        "slowness": slowness,
    }
    result = run_to_any_end(grade, run_script, [blocks], payloads=False, deadline=60.0, **arguments)
    stderr = result.ranks[0].stderr
    if todo := re.search(r"NotImplementedError: TODO ([0-9a-z]+\.[0-9]+)", stderr):
        raise not_attempted(grade.region) if todo[1] == grade.region else builds_on(todo[1])
    grade.must_return(result)
    got = result.values[0]
    if got["error"]:
        grade.fail(observed=f"the script ended with an error: {got['error']}\n{last_words(stderr)}")
    check_losses(grade, got["losses"], np.asarray(run_alone(grade, train_alone, [blocks], **arguments)[0]))


@graded("2b.9", absence=True)
def test_task2b_imports_only_what_the_course_allows(grade: Grade) -> None:
    grade.imports_only_allowed(GLUE, GPT2)
