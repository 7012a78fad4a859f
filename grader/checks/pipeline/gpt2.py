"""Judges GPT-2 in a pipeline: plain, model parallel and piped agree, and the blocks really go through the Pipe.

While it is piped, a referee multiplies what each partition makes by a number of its own (ranks/referee.py): so a
piped model has other values than one whose blocks work one after another, and no other test counts without it.
"""

import numpy as np

from grader.checks.pipeline.forward import split_sizes
from grader.checks.pipeline.waits import (
    PATIENCE,
    draw_permits,
    must_be_in_a_pipe,
    must_end,
    must_have_permits,
    must_meet,
    run_once,
)
from grader.grading import Grade
from grader.ranks.outcome import Result
from grader.ranks.phrases import short
from grader.ranks.referee import PermitReferee
from grader.wire.values import Fields

BLOCKS, TOKENS, VOCABULARY = 4, 8, 30
STEPS = 2  # of training, each with tokens of its own
TOLERANCE = 1e-8  # of the norm of all gradients; everything is float64
BATCH, SPLIT_SIZE, MICRO_BATCHES = 5, 2, 3
PLAIN = 1  # the rank in which no student's code runs


def _inputs(grade: Grade, masked: bool) -> Fields:
    """Drawn tokens, labels with a different number of holes in each example, and a mask of its own for each.

    The first example of each micro-batch begins with a token: what stands in padding depends on the attention kernel.
    """
    draw = np.random.default_rng(grade.seed)
    mask = np.ones((BATCH, TOKENS), int)
    for example in range(BATCH):
        if example % SPLIT_SIZE:
            mask[example, :example] = 0
        elif example:
            mask[example, TOKENS - example :] = 0
    all_tokens, all_labels = [], []
    for _ in range(STEPS):
        tokens = draw.integers(0, VOCABULARY, (BATCH, TOKENS))
        labels = tokens.copy()
        for example in range(1, BATCH):  # micro-batches do not weigh the same
            labels[example, : int(draw.integers(0, TOKENS - 3))] = -100
        if masked:  # no loss from padding, nor from what a place of padding says of the next token
            labels[mask == 0] = -100
            labels[:, 1:][mask[:, :-1] == 0] = -100
        all_tokens.append(tokens.tolist())
        all_labels.append(labels.tolist())
    rows = {"tokens": all_tokens, "labels": all_labels, "mask": mask.tolist() if masked else None}
    return rows | {"seed": int(draw.integers(2**30))}


def spread(grade: Grade, split_sizes: list[int], masked: bool = False, run: bool = True, devices: int = 2) -> Result:
    """The student's model; where it is piped and run, with a referee, and beside it the plain one in another rank."""
    each: list[Fields] = [_inputs(grade, masked)]
    referee: dict[str, PermitReferee] = {}
    groups = [[[i, 0], [i - 1, 1]] for i in range(1, MICRO_BATCHES)]
    if run and split_sizes:
        permits = draw_permits(np.random.default_rng([grade.seed, masked]), (STEPS, MICRO_BATCHES, devices))
        each.append(each[0] | {"permits": permits})
        referee = {"referee": PermitReferee(permits, groups)}
    result = run_once(
        grade, "grader.probes.pipeline.gpt2:spread", len(each), **referee, each=each, split_sizes=split_sizes, run=run,
        devices=devices, masked=masked, groups=groups, blocks=BLOCKS, vocabulary=VOCABULARY,
        patience=PATIENCE * grade.session.slowness,
    )  # fmt: skip
    must_end(grade, result, [])
    return result


def check_blocks(grade: Grade) -> None:
    """h_pp is a Pipe of the blocks themselves, in order, each on its device; nothing is registered twice."""
    other = int(grade.draw.integers(3, 9))
    for devices, asked in ((2, [SPLIT_SIZE]), (3, [other]), (2, [other, SPLIT_SIZE])):  # the last: prepared twice
        told = spread(grade, asked, run=False, devices=devices).values[0]
        pipe = told["pipe"]
        expected = [[i for i in range(BLOCKS) if i * devices // BLOCKS == j] for j in range(devices)]
        again = " after a second _prepare_pipeline_parallel" if len(asked) > 1 else ""
        if pipe["type"] != "Pipe":
            kind = "None" if pipe["type"] == "NoneType" else f"a {short(pipe['type'], 60)}"
            calls = "_prepare_pipeline_parallel was called twice" if again else "_prepare_pipeline_parallel"
            grade.fail(f"expected a Pipe in self.h_pp after {calls}, got {kind}")
        if not pipe["built"]:
            grade.fail("the Pipe in self.h_pp was not built by Pipe(...): build it from the labelled blocks")
        if pipe["partitions"] != expected or pipe["strangers"]:
            grade.fail(f"{_wrong_blocks(pipe, expected)}{again}")
        if pipe["split_size"] != asked[-1]:
            got = short(pipe["split_size"], 30)
            grade.fail(f"expected split_size={asked[-1]}, got a Pipe with {got}{again}: pass split_size on")
        _check_rest(grade, told)
    check_used(grade)


def _check_rest(grade: Grade, told: Fields) -> None:
    """The model is otherwise as it was."""
    name = short(next((told[key][0] for key in ("lost", "parameters", "added") if told[key]), ""), 100)
    if told["lost"]:
        grade.fail(f"{name} is missing from the state dict: leave the blocks in self.h")
    if told["parameters"]:
        grade.fail(f"the model has a new parameter, {name}: a pipeline has none of its own")
    if told["added"]:
        grade.fail(f"{name} would be saved twice: store the Pipe only as self.h_pp")
    if told["modes"]:
        name = short(told["modes"][0][0] or "the model", 100)
        grade.fail(f"the training mode or the type of {name} changed: leave both as they were")


def _wrong_blocks(pipe: Fields, expected: list) -> str:
    got, flat = pipe["partitions"], [number for part in pipe["partitions"] for number in part]
    start = f"expected the blocks {expected} in the partitions, got {got}"
    if pipe["strangers"] and not flat:
        return f"{start}: they are copies of the blocks (a {pipe['strangers'][0]}); use the model's own blocks"
    if pipe["strangers"]:
        return f"{start} and a {pipe['strangers'][0]}: the Pipe must contain only the blocks"
    if sorted(flat) != list(range(BLOCKS)):
        return f"{start}: use every block of self.h exactly once"
    if flat != sorted(flat):
        return f"{start}: keep the order of self.h"
    if len(got) == 1:
        return f"{start}: label each block with its device, because torch treats cpu:0 and cpu:1 as one device"
    return f"{start}, on {pipe['devices']}: place each block on its device in self.block_devices"


def check_used(grade: Grade) -> None:
    """forward goes through the pipe: every block sees the micro-batches, in a worker."""
    _must_be_piped(grade, spread(grade, [SPLIT_SIZE]))


def _must_be_piped(grade: Grade, result: Result) -> None:
    told, events = result.values[0], result.ranks[0].events
    seen: dict[int, list[int]] = {number: [] for number in range(BLOCKS)}
    in_caller = False
    for event in events:
        if event.name == "block":
            seen[event.data["number"]].append(event.data["examples"])
            in_caller |= event.data["in_caller"]
    expected = split_sizes(BATCH, SPLIT_SIZE) * STEPS
    for number, sizes in seen.items():
        if sizes == [BATCH] * STEPS:
            switch = "" if told["on"] else ", and self.pipeline_parallel is not set"
            grade.fail(f"block {number} got the whole batch of {BATCH}: the blocks run one after another{switch}")
        if sizes != expected:
            asked = split_sizes(BATCH, SPLIT_SIZE)
            got = short(sizes[: len(asked)] if len(sizes) == len(expected) else sizes)
            grade.fail(
                f"block {number}: expected micro-batches of {asked} examples in each of {STEPS} steps, got {got}"
            )
    if in_caller:
        grade.fail("a block runs in the caller's thread: the Pipe must run it in a worker")
    must_be_in_a_pipe(grade, events)
    must_meet(grade, result, lambda alone: "the partitions of the Pipe run one after another")
    right = result.values[PLAIN]
    given, made = (
        {(int(step), int(i), int(j)): np.array(x) for step, i, j, *x in right[key] if step == 0}
        for key in ("inputs", "made")
    )
    must_have_permits(grade, result, given, made)
    if words := _differ(told["steps"][0], right["right"][0]):
        grade.fail(f"piped GPT-2, while all its partitions work: {words}")


def check_agree(grade: Grade) -> None:
    """Loss and every gradient of the plain, the model-parallel and the piped GPT-2, without and with a mask.

    A model that is not piped agrees of course, so this looks whether it is.
    """
    for masked in (False, True):
        piped = spread(grade, [SPLIT_SIZE], masked)
        expected = piped.values[PLAIN]
        for name, model in (("piped", "right"), ("model-parallel", "plain")):
            result = piped if name == "piped" else spread(grade, [], masked)
            for step, (got, right) in enumerate(zip(result.values[0]["steps"], expected[model], strict=True)):
                if words := _differ(got, right):
                    if name == "piped" and not (words := _without_permits(got, expected["plain"][step], words)):
                        break
                    given = "with an attention mask and position ids" if masked else "without a mask"
                    later = f", step {step + 1}, after the parameters have changed" if step else ""
                    grade.fail(f"{name} GPT-2, {given}{later}: {words}")
        _must_be_piped(grade, piped)


def _without_permits(told: Fields, plain: Fields, words: str) -> str:
    """What is wrong with a piped model whose partitions took no permits; "" if it is that and nothing else."""
    cause = _differ(told, plain)
    return cause if not cause or "though the loss is right" in cause else words


def _differ(told: Fields, expected: Fields) -> str:
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
    """--n_chunk is a number of micro-batches: no micro-batch is larger than it must be for that number."""
    settings = [[10, 4], [8, 2], [7, 7], [64, 1], [9, 2]]
    (found,) = grade.values(
        "grader.probes.pipeline.gpt2:chunks", 1, file="pipeline/run_gpt2.py", settings=settings, blocks=BLOCKS,
        vocabulary=VOCABULARY,
    )  # fmt: skip
    for (batch, n_chunk), asked in zip(settings, found, strict=True):
        expected = -(-batch // n_chunk)
        if asked != [expected]:
            got = f"split_size={short(asked[0], 30)}" if asked else "no active Pipe in self.h_pp"
            grade.fail(f"a batch of {batch} with --n_chunk {n_chunk}: expected split_size={expected}, got {got}")
    check_used(grade)
