"""GPT-2 in a pipeline, p.5: plain, model parallel and piped agree, and the blocks really run in the Pipe.

Every other test needs the one of the Pipe to pass: blocks that run one after another have the right values, too.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from grader.arithmetic import Tolerance, close
from grader.compare import Expected, check
from grader.grading import Grade
from grader.in_rank import in_rank, run, run_alone
from grader.ranks.outcome import Result
from grader.ranks.phrases import short
from grader.wire.values import Fields
from tests.pipeline import pipe_shared as shared
from tests.pipeline.pipe_shared import split_sizes

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, torch
    from tests.pipeline.gpt2_in_rank import (  # isort: skip
        SimpleNamespace, config_of, described, let_meet, names_of, plain_gpt2, steps_of, watch_blocks,
    )  # fmt: skip
    from tests.pipeline.pipe_in_rank import NeverArrives, PipeWatch, give_schedule, watch_queues

graded = pytest.mark.graded
IN_RANK = [shared.IN_RANK, "tests/pipeline/gpt2_in_rank.py"]
MODELS = ["scripts", "steps", "models"]
BLOCKS, TOKENS, VOCABULARY = 4, 8, 30
STEPS = 2  # of training, each with tokens of its own
BATCH, SPLIT_SIZE, MICRO_BATCHES = 5, 2, 3
GROUPS = [[[i, 0], [i - 1, 1]] for i in range(1, MICRO_BATCHES)]  # (micro-batch, partition) at the same time
HEAD = "lm_head.weight"
UNTIED = "lm_head no longer shares the matrix of wte: replace neither"
SIZES: Fields = {"blocks": BLOCKS, "vocabulary": VOCABULARY}


# --- what a rank does ---


@in_rank(uses=IN_RANK, preload=MODELS, join=False)
def spread(context: Context, lesson: ModuleType, inputs: Fields) -> object:
    """Return what GPT2LMHeadModelParallel and its Pipe are made of, and the steps of its training.

    Arguments: split_sizes, the argument of each call of _prepare_pipeline_parallel (none: model parallel, no pipeline);
    train, whether to train it; groups, places that must run at the same time.
    """
    import sys

    arguments = context.arguments
    before = plain_gpt2(arguments, inputs["seed"])
    model = lesson.GPT2LMHeadModelParallel(config_of(arguments)).double()
    model.load_state_dict(before.state_dict())
    model.parallelize([f"cpu:{j}" for j in range(arguments["devices"])])
    blocks, names = list(model.transformer.h), names_of(model)
    for split_size in arguments["split_sizes"]:
        context.during = "_prepare_pipeline_parallel"
        model._prepare_pipeline_parallel(split_size)
        context.during = ""
    watch_blocks(context.event, blocks)
    pipe, now = getattr(model.transformer, "h_pp", None), names_of(model)
    report = described(pipe, blocks) | {key: sorted(now[key] - names[key])[:1] for key in names}
    report |= {"lost": sorted(names["saved"] - now["saved"])[:1]}
    give_schedule(sys.modules[lesson.Pipe.__module__], arguments["given"])
    report |= {"on": bool(getattr(model.transformer, "pipeline_parallel", False))}
    if not arguments["train"]:
        return report
    piped = bool(arguments["split_sizes"])
    watch = PipeWatch(context, arguments["groups"] if piped else ())
    begin = let_meet(watch, blocks if piped else [], arguments)
    if hasattr(pipe, "in_queues"):
        watch_queues(pipe, watch)
    try:
        return report | {"steps": steps_of(model, inputs, begin)}
    except NeverArrives:
        return {"waits_forever": True}


@in_rank(uses=IN_RANK, preload=MODELS, join=False)
def plain(context: Context, lesson: ModuleType, inputs: Fields) -> object:
    """Return the steps of transformers' own model."""
    return steps_of(plain_gpt2(context.arguments, inputs["seed"]), inputs)


@in_rank(uses=IN_RANK, preload=MODELS, join=False)
def chunks(context: Context, lesson: ModuleType, inputs: Fields) -> object:
    """Yield the split_size of the Pipe that run_gpt2.py makes for each batch size and n_chunk, None without one."""
    from pipeline.model_parallel import GPT2LMHeadModelParallel  # the tree's own, which the script imports in main()

    for batch_size, n_chunk in context.arguments["settings"]:
        model = GPT2LMHeadModelParallel(config_of(context.arguments))
        config = {"model_parallel_mode": "pipeline_parallel", "batch_size": batch_size, "n_chunk": n_chunk}
        worker = SimpleNamespace(device=torch.device("cpu"))
        lesson.spread(SimpleNamespace(**config, no_cuda=True), worker, model)
        pipe: Any = getattr(model.transformer, "h_pp", None)
        active = getattr(model.transformer, "pipeline_parallel", False) and hasattr(pipe, "split_size")
        yield int(pipe.split_size) if active else None


# --- runs ---


def drawn_inputs(grade: Grade, masked: bool) -> Fields:
    """Draw tokens, and labels of which each example has another number; with `masked`, also padding.

    The first example of each micro-batch begins with a token: values at padding depend on the attention kernel.
    """
    draw = np.random.default_rng(grade.seed)
    mask = np.ones((BATCH, TOKENS), int)
    for example in range(BATCH):
        if example % SPLIT_SIZE:
            mask[example, :example] = 0
        elif example:
            mask[example, TOKENS - example :] = 0
    tokens = draw.integers(0, VOCABULARY, (STEPS, BATCH, TOKENS))
    labels = tokens.copy()
    for example in range(1, BATCH):  # so micro-batches have different weights
        for step in range(STEPS):
            labels[step, example, : int(draw.integers(0, TOKENS - 3))] = -100
    if masked:  # no loss from padding, nor from what the model predicts at padding
        labels[:, mask == 0] = -100
        labels[:, :, 1:][:, mask[:, :-1] == 0] = -100
    seed = int(draw.integers(2**30))
    return {"tokens": tokens, "labels": labels, "mask": mask if masked else None, "seed": seed}


def run_spread(grade: Grade, sizes: list[int], masked: bool = False, train: bool = True, devices: int = 2) -> Result:
    """Run the student's model. `sizes`: the `split_sizes` of spread."""
    cycles = [(MICRO_BATCHES, devices)]
    arguments = {**SIZES, "split_sizes": sizes, "devices": devices, "train": train, "groups": GROUPS, "sizes": cycles}
    result = shared.run_pipe(grade, spread, [drawn_inputs(grade, masked)], **arguments)
    shared.must_end(grade, result, [])
    return result


def right_steps(grade: Grade, masked: bool) -> list[Fields]:
    """Return the steps of a plain model, from a rank without a student's code."""
    return run_alone(grade, plain, [drawn_inputs(grade, masked)], **SIZES)[0]


# --- what is judged ---


def check_blocks(grade: Grade, devices: int, sizes: list[int]) -> None:
    """Check that h_pp is a Pipe of the blocks themselves, in order, each on its device, and all else is unchanged."""
    got = run_spread(grade, sizes, train=False, devices=devices).values[0]
    right = [[i for i in range(BLOCKS) if i * devices // BLOCKS == j] for j in range(devices)]
    twice = len(sizes) > 1
    again = " after a second _prepare_pipeline_parallel" if twice else ""
    if got["type"] != "Pipe" or "partitions" not in got:
        kind = "None" if got["type"] == "NoneType" else f"a {short(got['type'], 60)}"
        calls = "_prepare_pipeline_parallel was called twice" if twice else "_prepare_pipeline_parallel"
        grade.fail(observed=f"expected a Pipe in self.h_pp after {calls}, got {kind}")
    if got["partitions"] != right or got["strangers"]:
        grade.fail(
            observed=f"expected the blocks {right} in the partitions, got {got['partitions']}{wrong_blocks(got)}{again}"
        )
    keeps_the_first = twice and got["split_size"] == sizes[0]
    advice = "make a new Pipe in each call" if keeps_the_first else "pass split_size on"
    expected = {
        "split_size": Expected(
            sizes[-1], f"expected split_size={{expected}}, got a Pipe with {{got}}{again}: {advice}"
        ),
        "on": Expected(True, "self.pipeline_parallel is {got}: set it to True, with one device, too"),
        "lost": Expected([], "{got} is missing from the state dict: leave the blocks in self.h"),
        "parameters": Expected(
            [], "the model has a new parameter, {got}: a pipeline has none of its own", mistakes={UNTIED: [HEAD]}
        ),
        "saved": Expected([], "{got} would be saved twice: store the Pipe only as self.h_pp"),
        "modes": Expected([], "the training mode or the type of {got} changed: leave both as they were"),
    }
    check(grade, "", got, expected)


def wrong_blocks(got: Fields) -> str:
    """Return what is wrong with the blocks in the partitions."""
    flat, strangers = [number for part in got["partitions"] for number in part], got["strangers"]
    if strangers and not flat:
        return f": they are copies of the blocks (a {strangers[0]}); use the model's own blocks"
    if strangers:
        return f" and a {strangers[0]}: the Pipe must contain only the blocks"
    if missing := [number for number in range(BLOCKS) if number not in flat]:
        without = f", without {'blocks' if len(missing) > 1 else 'block'} {', '.join(map(str, missing))}"
        if len(flat) > 1 and got["partitions"] == [[number] for number in range(len(flat))]:  # a zip of the two
            advice = "pair each block with its entry of self.block_devices, which has one entry for each block"
            return f"{without}: there is one block for each device; {advice}"
        return f"{without}: use every block of self.h exactly once"
    if len(flat) > BLOCKS:
        return ": use every block of self.h exactly once"
    if flat != sorted(flat):
        return ": keep the order of self.h"
    if len(got["partitions"]) == 1:
        return ": label each block with its entry of self.block_devices; to torch, cpu:0 and cpu:1 are one device"
    return f", on {got['devices']}: place each block on its device in self.block_devices"


def check_used(grade: Grade, masked: bool = False) -> None:
    """Check that forward uses the pipe: every block gets the micro-batches, in a worker."""
    result = run_spread(grade, [SPLIT_SIZE], masked)
    got = result.values[0]
    calls = [event.data for event in result.ranks[0].events if event.name == "block"]
    sizes = split_sizes(BATCH, SPLIT_SIZE)
    for block in range(BLOCKS):
        examples = [call["examples"] for call in calls if call["number"] == block]
        if examples == [BATCH] * STEPS:
            switch = "" if got["on"] else ", and self.pipeline_parallel is not set"
            grade.fail(f"block {block} got the whole batch of {BATCH}: the blocks run one after another{switch}")
        if examples != sizes * STEPS:
            words = f"block {block}: expected micro-batches of {sizes} examples in each of {STEPS} steps"
            grade.fail(observed=f"{words}, got {short(examples)}")
    if any(call["in_caller"] for call in calls):
        grade.fail("a block runs in the caller's thread: the Pipe must run it in a worker")
    shared.must_meet(grade, result, lambda *_: "the partitions of the Pipe run one after another")
    shared.must_have_met(grade, result, GROUPS)
    if words := difference(got["steps"][0], right_steps(grade, masked)[0]):
        grade.fail(observed=f"piped GPT-2: {words}")


def check_agree(grade: Grade, masked: bool) -> None:
    """Check that the model-parallel and the piped GPT-2 have the plain one's loss and gradients."""
    inputs = "with an attention mask and position ids" if masked else "without a mask"
    right = right_steps(grade, masked)
    for model, sizes in (("piped", [SPLIT_SIZE]), ("model-parallel", [])):
        steps = run_spread(grade, sizes, masked).values[0]["steps"]
        for step, (got, right_step) in enumerate(zip(steps, right, strict=True)):
            if words := difference(got, right_step):
                later = f", step {step + 1}, after the parameters have changed" if step else ""
                grade.fail(observed=f"{model} GPT-2, {inputs}{later}: {words}")
    check_used(grade, masked)


def difference(got: Fields, right: Fields) -> str:
    """Return how a step differs from the right one, "" if it does not; everything is float64."""
    loss, right_loss = float(got["loss"]), float(right["loss"])
    if not abs(loss - right_loss) <= 1e-8 * abs(right_loss):
        return f"expected the plain model's loss {right_loss:.8f}, got {loss:.8f}"
    total = float(np.sqrt(sum((gradient**2).sum() for gradient in right["gradients"].values())))
    for name, gradient in right["gradients"].items():
        own = got["gradients"].get(name)
        if own is None:
            return f"{name} has no gradient, though the loss is right"
        if not close(own, gradient, Tolerance(limit=1e-8 * total)):
            return f"the gradient of {name} is not the plain model's, though the loss is right"
    return ""


# --- the graded tests ---


@graded("p.5")
def test_the_pipe_of_gpt2_holds_its_blocks(grade: Grade) -> None:
    other = int(grade.draw.integers(3, 9))
    check_blocks(grade, 2, [SPLIT_SIZE])
    check_blocks(grade, 3, [other])
    check_blocks(grade, 1, [SPLIT_SIZE])
    check_blocks(grade, 2, [other, SPLIT_SIZE])  # prepared twice
    check_used(grade)
    grade.imports_only_allowed("pipeline/model_parallel.py", "pipeline/run_gpt2.py")


@graded("p.5")
def test_gpt2_sends_micro_batches_through_its_pipe(grade: Grade) -> None:
    check_used(grade)


@graded("p.5")
def test_plain_model_parallel_and_piped_gpt2_agree_in_loss_and_gradients(grade: Grade) -> None:
    for masked in (False, True):
        check_agree(grade, masked)


@graded("p.5")
def test_n_chunk_is_the_number_of_micro_batches(grade: Grade) -> None:
    settings = [[10, 4], [8, 2], [7, 7], [64, 1], [9, 2]]
    (split_sizes_got,) = run(grade, chunks, [None], file="pipeline/run_gpt2.py", settings=settings, **SIZES).values
    for (batch, n_chunk), got in zip(settings, split_sizes_got, strict=True):
        called = "no active Pipe in self.h_pp" if got is None else f"split_size={got}"
        message = f"a batch of {batch} with --n_chunk {n_chunk}: expected split_size={{expected}}, got {called}"
        check(grade, "", {"split_size": got}, {"split_size": Expected(math.ceil(batch / n_chunk), message)})
    check_used(grade)
