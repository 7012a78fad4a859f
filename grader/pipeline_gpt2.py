"""Judges GPT-2 in a pipeline: plain, model parallel and piped agree, and the blocks really go through the Pipe."""

from typing import Any

import numpy as np

from grader.grading import Grade
from grader.pipeline_pipe import split_sizes
from grader.pipeline_waits import DEADLINE

BLOCKS, TOKENS, VOCABULARY = 4, 8, 30
TOLERANCE = 1e-8  # of the norm of all gradients; everything is float64
BATCH, SPLIT_SIZE = 5, 2
NOT_PIPED = 0


def _inputs(grade: Grade, masked: bool) -> dict[str, Any]:
    """Drawn tokens, labels with a different number of holes in each example, and a mask of its own for each."""
    draw = np.random.default_rng(grade.seed)
    tokens = draw.integers(0, VOCABULARY, (BATCH, TOKENS))
    labels, mask = tokens.copy(), np.ones_like(tokens)
    for example in range(BATCH):
        if example % 2:
            mask[example, TOKENS - example :] = 0
        else:
            mask[example, :example] = 0
        labels[example, : int(draw.integers(0, TOKENS - 3))] = -100
    labels[0] = tokens[0]  # micro-batches do not weigh the same
    if masked:  # no loss from padding, nor from what a place of padding says of the next token
        labels[mask == 0] = -100
        labels[:, 1:][mask[:, :-1] == 0] = -100
    rows = {"tokens": tokens.tolist(), "labels": labels.tolist(), "mask": mask.tolist() if masked else None}
    return rows | {"blocks": BLOCKS, "vocabulary": VOCABULARY}


def spread(
    grade: Grade, split_size: int, masked: bool = False, step: bool = True, devices: int = 2
) -> tuple[dict[str, Any], list[Any]]:
    """The student's model: what it gave, and the events."""
    result = grade.run(
        "grader.probes_pipeline_gpt2:spread",
        1,
        DEADLINE,
        split_size=split_size,
        step=step,
        devices=devices,
        **_inputs(grade, masked),
    )
    grade.must_return(result)
    return result.values[0], result.ranks[0].events


def check_blocks(grade: Grade) -> None:
    """h_pp is a Pipe of the blocks themselves, in order, each on its device; nothing is registered twice."""
    for devices, split_size in ((2, SPLIT_SIZE), (3, int(grade.draw.integers(3, 9)))):
        told, _ = spread(grade, split_size, step=False, devices=devices)
        pipe = told["pipe"]
        expected = [[i for i in range(BLOCKS) if i * devices // BLOCKS == j] for j in range(devices)]
        if pipe["type"] != "Pipe":
            kind = "None" if pipe["type"] == "NoneType" else f"a {pipe['type']}"
            grade.fail(f"expected a Pipe in self.h_pp after _prepare_pipeline_parallel, got {kind}")
        if pipe["partitions"] != expected or pipe["strangers"]:
            grade.fail(_wrong_blocks(pipe, expected))
        if pipe["split_size"] != split_size:
            grade.fail(f"split_size={split_size} was asked for, and the Pipe has {pipe['split_size']}: hand it on")
        if told["lost"]:
            grade.fail(f"{told['lost'][0]} is no longer saved under this name: the blocks stay in self.h as they are")
        if told["parameters"]:
            grade.fail(f"the model has a new parameter, {told['parameters'][0]}: a pipeline has none of its own")
        if told["added"]:
            grade.fail(f"{told['added'][0]} would be saved twice: the Pipe is kept as self.h_pp and nowhere else")


def _wrong_blocks(pipe: dict[str, Any], expected: list) -> str:
    got, flat = pipe["partitions"], [number for part in pipe["partitions"] for number in part]
    start = f"expected the blocks {expected} in the partitions, got {got}"
    if pipe["strangers"] and not flat:
        return f"{start}: they are copies of the blocks (a {pipe['strangers'][0]}); the model trains its own"
    if pipe["strangers"]:
        return f"{start} and a {pipe['strangers'][0]}: the Pipe is of the blocks, and of nothing else"
    if sorted(flat) != list(range(BLOCKS)):
        return f"{start}: every block of self.h once"
    if flat != sorted(flat):
        return f"{start}: in the order of self.h"
    if len(got) == 1:
        return f"{start}: label each block with its device, torch takes cpu:0 and cpu:1 for one"
    return f"{start}, on {pipe['devices']}: each block on its device in self.block_devices"


def check_used(grade: Grade) -> None:
    """forward goes through the pipe: every block sees the micro-batches, in a worker."""
    told, events = spread(grade, SPLIT_SIZE)
    seen: dict[int, list[int]] = {number: [] for number in range(BLOCKS)}
    in_caller = False
    for event in events:
        if event.name == "block":
            seen[event.data["number"]].append(event.data["examples"])
            in_caller |= event.data["in_caller"]
    expected = split_sizes(BATCH, SPLIT_SIZE)
    for number, sizes in seen.items():
        if sizes == [BATCH]:
            switch = "" if told["on"] else ", and self.pipeline_parallel is not set"
            grade.fail(f"block {number} got the whole batch of {BATCH}: the blocks work one after another{switch}")
        if sizes != expected:
            grade.fail(f"block {number}: expected micro-batches of {expected} examples, got {sizes}")
    if in_caller:
        grade.fail("a block works in the caller's thread: the Pipe hands it to a worker")


def check_agree(grade: Grade) -> None:
    """Loss and every gradient of the plain, the model-parallel and the piped GPT-2, without and with a mask."""
    for masked in (False, True):
        inputs = _inputs(grade, masked)
        result = grade.session.run("grader.probes_pipeline_gpt2:plain", 1, {"seed": grade.seed} | inputs)
        (expected,) = result.values
        for name, split_size in (("model-parallel", NOT_PIPED), ("piped", SPLIT_SIZE)):
            told, _ = spread(grade, split_size, masked)
            if words := _differ(told, expected):
                given = "with an attention mask and position ids" if masked else "without a mask"
                grade.fail(f"{name} GPT-2, {given}: {words}")


def _differ(told: dict[str, Any], expected: dict[str, Any]) -> str:
    got, right = float(told["loss"]), float(expected["loss"])
    if not abs(got - right) <= 1e-8 * abs(right):
        return f"expected the plain model's loss {right:.8f}, got {got:.8f}"
    total = float(np.sqrt(sum((gradient**2).sum() for gradient in expected["gradients"].values())))
    for name, gradient in expected["gradients"].items():
        mine = told["gradients"].get(name)
        if mine is None:
            return f"{name} has no gradient, though the loss is right"
        if mine.shape != gradient.shape or not np.abs(mine - gradient).max() <= TOLERANCE * total:
            return f"the gradient of {name} is not the plain model's, though the loss is right"
    return ""


def check_chunks(grade: Grade) -> None:
    """--n_chunk is a number of micro-batches: split_size is the batch divided by it, rounded up."""
    settings = [[10, 4], [8, 2], [7, 7], [64, 1], [9, 2]]
    (told,) = grade.values("grader.probes_pipeline_gpt2:chunks", 1, file="pipeline/run_gpt2.py", settings=settings)
    for (batch, n_chunk), asked in zip(settings, told, strict=True):
        expected = -(-batch // n_chunk)
        if asked != [expected]:
            got = f"split_size={asked[0]}" if len(asked) == 1 else f"{len(asked)} calls of _prepare_pipeline_parallel"
            grade.fail(f"a batch of {batch} with --n_chunk {n_chunk}: expected split_size={expected}, got {got}")
