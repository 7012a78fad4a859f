"""Judges the whole: GPT-2 on a grid of four ranks trains as one worker does."""

from collections.abc import Mapping

import numpy as np

from grader.arithmetic import difference
from grader.checks import reference
from grader.checks.beyond.cut_model import Model, Part
from grader.checks.beyond.grid.groups import KINDS, words
from grader.grading import Grade
from grader.wire.values import Fields

STEPS, BATCH, MICRO_BATCHES = 2, 8, 2
LIMITS = [1e9, 0.05]  # the second step is clipped
SLACK = 20.0  # float32 against float64, through several layers
# of each rank: its stage, its place on the data axis and on the tensor axis
PLACES: Mapping[tuple[int, int, int], tuple[tuple[int, int, int], ...]] = {
    (1, 2, 2): ((0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)),
    (2, 2, 1): ((0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)),
    (2, 1, 2): ((0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)),
}


def check(grade: Grade, sizes: tuple[int, int, int]) -> None:
    """Two steps of OnGrid: losses, norms, gradients, and the parameters at the end."""
    pipeline, data, tensor = sizes
    model = Model(grade, 2, BATCH, STEPS, limits=LIMITS)
    rows = BATCH // data
    parts, each = [], []
    for rank, (stage, d, t) in enumerate(PLACES[sizes]):
        parts.append(Part(stage, pipeline, t if tensor > 1 else None))
        each.append(model.mine(parts[-1], rank, slice(d * rows, (d + 1) * rows)))
    result = grade.run(
        "grader.probes.beyond.stages:train", len(parts), each=each, limits=LIMITS,
        grid=dict(zip(KINDS, sizes, strict=True)), micro_batches=MICRO_BATCHES if pipeline > 1 else 1,
        **model.told(), **model.options,
    )  # fmt: skip
    where = f"GPT-2 on a grid with {words(sizes)}"
    if verdict := grade.verdict(result):
        raise type(verdict)(f"{where}: {verdict}")
    losses = np.array([[float(np.ravel(step["loss"])[0]) for step in value["steps"]] for value in result.values])
    for rank, value in enumerate(result.values):
        at = f"{where}, rank {rank}"
        for step, (told, right) in enumerate(zip(value["steps"], model.right["steps"], strict=True)):
            mean = np.mean([losses[other][step] for other in _one_of_each_data(sizes)])
            if not abs(mean - float(right["loss"])) <= 1e-4 * abs(float(right["loss"])):
                grade.fail(f"{at}, step {step}: expected the mean loss {float(right['loss']):.6f}, got {mean:.6f}")
            for name, got in told["gradients"].items():
                _compare(grade, model, parts[rank], right["gradients"], (name, got), f"{at}, step {step}: the gradient")
            norm = float(np.ravel(told["norm"])[0])
            if not abs(norm - float(right["norm"])) <= 1e-3 * float(right["norm"]):
                grade.fail(f"{at}, step {step}: expected the norm {float(right['norm']):.6f}, got {norm:.6f}")
        for name, got in value["parameters"].items():
            _compare(grade, model, parts[rank], model.right["parameters"], (name, got), f"{at}: after {STEPS} steps")


def _one_of_each_data(sizes: tuple[int, int, int]) -> list[int]:
    """A rank for each place on the data axis."""
    return [rank for rank, (stage, _, t) in enumerate(PLACES[sizes]) if stage == t == 0]


def _compare(grade: Grade, model: Model, part: Part, arrays: Fields, named: tuple[str, np.ndarray], where: str) -> None:
    name, got = named
    right = model.expected(part, arrays, name)
    if right is None:
        grade.fail(f"{where} has a parameter {name} that does not belong to this stage")
    elif not reference.close(got, right, 0.1, SLACK):
        grade.fail(f"{where} is not that of one worker; {difference(name, got, right)}")
