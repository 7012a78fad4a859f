"""Judges a model wrapped in DistributedDataParallel: what its backward pass leaves, and what travels."""

from collections.abc import Sequence

import numpy as np

from grader.checks import diagnosis, reference
from grader.checks.training.steps import FLOAT32, Training
from grader.checks.training.updates import AVERAGING, check_own_gradients_sent, check_sent_once, gradient_bytes
from grader.grading import Grade
from grader.ranks.calls import Call, Event
from grader.ranks.outcome import RankResult, Result
from grader.wire import drawn
from grader.wire.values import Fields

COUNT = 3  # examples on each rank
HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."


def check_wrapped(grade: Grade, kind: str) -> None:
    """wrap(model, worker), called alone: after one backward pass every rank holds the mean."""
    for world_size in (3, 2, 4, 1):
        each = [_drawn(grade, kind, rank, world_size) for rank in range(world_size)]
        result = grade.run("grader.probes.sync:wrap", world_size, payloads=True, each=each, kind=kind)
        grade.must_return(result)
        own = [_own_gradient(kind, mine) for mine in each]
        names, mean = list(own[0]), reference.mean(own)
        total = FLOAT32 * max(map(reference.norm, own))  # the workers' errors stay, where their gradients cancel
        got = [[value["grads"].get(name) for name in names] for value in result.values]
        for rank, mine in enumerate(got):
            for name, gradient in zip(names, mine, strict=True):
                if not reference.close(gradient, mean[name], total):
                    cause = _cause(result, rank, name, gradient)
                    cause = cause or diagnosis.name_wrong_mean(got, [[g[name] for name in names] for g in own])
                    words = diagnosis.parameter_words(name, gradient, mean[name])
                    text = f"after backward on rank {rank} of {world_size}, {words}"
                    made = result.values[rank]["class"]
                    grade.fail(f"{cause}\nwrap() returned a {made}; {text}".lstrip("\n"))
        for rank, value in enumerate(result.values):
            if world_size > 1 and not value["ddp"]:
                grade.fail(f"expected a DistributedDataParallel in what wrap() returns, got a {value['class']}")
            if world_size > 1:
                must_be_of_reducer(grade, result.ranks[rank], result.ranks[rank].calls)
            if value["changed"]:
                grade.fail(f"wrap() changes {value['changed'][0]} on rank {rank}, but must leave it unchanged")


def _cause(result: Result, rank: int, name: str, gradient: np.ndarray | None) -> str:
    if gradient is None:
        return f"{name} has no gradient: is it frozen, or not part of the wrapped module?"
    calls = [call for call in result.ranks[rank].calls if call.name == "all_reduce"]
    if not calls:
        return "no gradient was sent to the other workers: is this a DistributedDataParallel?"
    if len(result.ranks) > 1 and all(len(call.members) == 1 for call in calls):
        return "every worker has its own process group, so nothing is averaged"
    if result.values[rank]["ddp"] and result.values[rank]["class"] in ("Classifier", "LanguageModel"):
        return "only part of the model is wrapped in DistributedDataParallel: wrap the whole model"
    return ""


def _drawn(grade: Grade, kind: str, rank: int, world_size: int) -> Fields:
    ids, labels = drawn.examples(grade.seed, COUNT, COUNT * rank, rank)
    weights = (drawn.classifier if kind == "classifier" else drawn.language_model)(grade.seed, COUNT * world_size)
    return {"weights": weights, "ids": ids, "labels": labels}


def _own_gradient(kind: str, mine: Fields) -> reference.Arrays:
    """What a rank's own examples give."""
    if kind == "classifier":
        return reference.classifier(mine["weights"], mine["ids"], mine["labels"])[1]
    return reference.language_model(mine["weights"], mine["ids"])[1]


def must_be_of_reducer(grade: Grade, rank: RankResult, calls: Sequence[Event]) -> None:
    """Fails unless DDP itself averages, in these calls of a backward pass. Its reducer sends flat buckets, and autograd
    calls it, with no line of a student's and no library in between.

    The reducer may hand its buckets to a hook, which nobody can tell from a parameter's hook. Then DDP's own broadcast
    of the weights, when it was made, shows that there is a reducer.
    """
    averages = [call for call in calls if isinstance(call, Call) and call.name in AVERAGING and call.dtype == "float32"]
    own = [call for call in rank.calls if call.name == "broadcast" and call.inside == "DistributedDataParallel"]
    wrapped = sum(call.received for call in own) >= sum(call.sent for call in averages)
    for call in averages:
        hooked = wrapped and (not call.inside or call.inside.startswith(HOOKS))
        if call.inside != "backward" and not hooked:
            by = f"inside {call.inside}" if call.inside else "by your own line"
            grade.fail(f"{call.name} ({call.where}) is called {by}: let DistributedDataParallel average the gradients")
        if len(call.shape) != 1:
            grade.fail(f"a tensor of shape {call.shape} is averaged: DistributedDataParallel sends flat buckets")


def must_be_averaged_by_reducer(training: Training) -> None:
    """The same of every step of a training loop."""
    for trace, rank in zip(training.ranks, training.result.ranks, strict=True):
        for step in trace.steps:
            must_be_of_reducer(training.grade, rank, step.calls)


def must_be_run_by_reducer(grade: Grade, result: Result) -> None:
    """The same of every call of a whole script."""
    for rank in result.ranks:
        for call in rank.calls:
            must_be_of_reducer(grade, rank, [call])


def check_traffic(training: Training) -> None:
    """The weights are broadcast once, and in every step each gradient travels once, by the backward pass."""
    training.must_have_steps()
    training.grade.must_return(training.result)
    size = gradient_bytes(training)
    for trace in training.ranks:
        for number, step in enumerate(trace.steps[1:], 2):
            again = [call for call in step.calls if call.name == "broadcast" and call.dtype == "float32"]
            if sum(call.received for call in again) >= size:
                training.grade.fail(
                    f"the weights are broadcast again in step {number} ({again[0].where}): "
                    "wrap the model once, before the first epoch"
                )
    check_sent_once(training, "DDP has already averaged; remove {}", by_hand=False)
    check_own_gradients_sent(training)
    must_be_averaged_by_reducer(training)
