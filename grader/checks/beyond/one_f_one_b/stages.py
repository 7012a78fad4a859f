"""Judges a schedule by running it: losses, gradients, and the order of messages that the broker has seen."""

from dataclasses import dataclass

import numpy as np

from grader.arithmetic import difference
from grader.checks import reference
from grader.checks.beyond.cut_model import Model, Part
from grader.checks.beyond.one_f_one_b.orders import most_alive
from grader.grading import Grade
from grader.ranks.calls import Call
from grader.ranks.outcome import RankResult
from grader.verdicts import Crashed
from grader.wire.values import Fields

STEPS = 2
SLACK = 20.0  # float32 against float64, through several layers
AHEAD = 1  # micro-batches: the runner posts each receive while the action before it runs


@dataclass(frozen=True)
class PipelineSetting:
    """A pipeline: its stages, micro-batches in a batch, and examples in a micro-batch."""

    stages: int
    micro_batches: int
    examples: int = 2


SETTINGS = (
    PipelineSetting(2, 5),
    PipelineSetting(4, 6, 1),
    PipelineSetting(4, 3, 1),
    PipelineSetting(3, 3),
    PipelineSetting(1, 3),
    PipelineSetting(2, 1),
)


def check(grade: Grade, setting: PipelineSetting) -> None:
    """Two steps on real ranks: as one worker's, with as few micro-batches alive as the lesson says."""
    n, m = setting.stages, setting.micro_batches
    where = f"{m} micro-batches on {n} stages"
    model = Model(grade, n if n > 1 else 2, m * setting.examples, STEPS, {"rate": 0.0, "momentum": 0.0})
    parts = [Part(stage, n) for stage in range(n)]
    each = [model.mine(part, rank) for rank, part in enumerate(parts)]
    probe = "grader.probes.beyond.stages:stages"
    result = grade.run(probe, n, each=each, micro_batches=m, examples=setting.examples, **model.told())
    verdict = grade.verdict(result)
    if isinstance(verdict, Crashed) and "KeyError" in str(verdict):
        raise Crashed(f"{where}: a backward comes before its forward, or comes twice\n{verdict}")
    if verdict:
        raise type(verdict)(f"{where}: {verdict}")
    for rank, steps in zip(result.ranks, result.values, strict=True):
        for step, told in enumerate(steps):
            _check_order(grade, rank, step, told, setting, where)
            at = f"{where}, step {step}, stage {rank.rank}"
            right = model.right["steps"][step]
            _check_loss(grade, told, float(right["loss"]) if rank.rank == n - 1 else 0.0, at)
            for name, got in told["gradients"].items():
                expected = model.expected(parts[rank.rank], right["gradients"], name)
                if expected is None or not reference.close(got, expected, 0.1, SLACK):
                    words = name if expected is None else difference(name, got, expected)
                    grade.fail(f"{at}: the gradient is not that of one worker; {words}")


def _check_loss(grade: Grade, told: Fields, right: float, at: str) -> None:
    got = float(np.ravel(told["loss"])[0])
    if not abs(got - right) <= 1e-4 * max(1.0, abs(right)):
        grade.fail(f"{at}: expected the loss {right:.6f} of one worker, got {got:.6f}")


def _check_order(grade: Grade, rank: RankResult, step: int, told: Fields, setting: PipelineSetting, where: str) -> None:
    """How many micro-batches were alive: as the runner has counted, and as the messages show."""
    at = f"{where}, step {step}, stage {rank.rank}"
    if told["left"]:
        grade.fail(f"{at}: {told['left']} micro-batches are still alive at the end")
    check_alive(grade, told["most_alive"], rank.rank, setting, f"{at}, as the runner counts")
    if setting.stages > 1:
        check_messages(grade, seen(rank, step), rank.rank, setting, f"{at}, as its messages show")


def check_messages(grade: Grade, kinds: list[str], stage: int, setting: PipelineSetting, at: str) -> None:
    """The forwards and backwards that the broker has seen; the runner itself cannot be trusted, as it shares a process
    with the student's code."""
    counts = [kinds.count(kind) for kind in ("forward", "backward")]
    if counts != [setting.micro_batches] * 2:
        wanted = "a forward and a backward of every micro-batch"
        grade.fail(f"{at}: expected {wanted}, got {counts[0]} forwards and {counts[1]} backwards")
    check_alive(grade, most_alive(kinds), stage, setting, at, AHEAD)


def check_alive(grade: Grade, alive: int, stage: int, setting: PipelineSetting, at: str, tolerance: int = 0) -> None:
    limit = min(setting.stages - stage, setting.micro_batches)
    if abs(alive - limit) <= tolerance:
        return
    reason = ""
    if alive < limit:
        reason = ": backward begins too early, so that the next stage has no work"
    elif alive == setting.micro_batches:
        reason = ": all forwards come before the first backward, as in GPipe"
    grade.fail(f"{at}: {alive} micro-batches are alive at once, expected {limit}{reason}")


def seen(rank: RankResult, step: int) -> list[str]:
    """The forwards and backwards of a step, in order: each receives from the left or sends to it. The first stage has
    nobody there; it sends to the right, and receives from it."""
    found, number, running = list[str](), -1, False
    for event in rank.events:
        if event.name in ("run", "finish"):
            running = event.name == "run"
            number += running
        elif isinstance(event, Call) and event.point_to_point and running and number == step:
            if rank.rank == 0:
                found.append("forward" if event.name == "send" else "backward")
            elif event.root == rank.rank - 1:
                found.append("forward" if event.name == "recv" else "backward")
    return found
