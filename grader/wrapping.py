"""Judges a model wrapped in DistributedDataParallel: what its backward pass leaves, and what travels."""

import numpy as np

from grader import diagnosis, draws, reference
from grader.grading import Grade
from grader.steps import Training

COUNT = 3  # examples on each rank


def check_wrapped(grade: Grade, kind: str) -> None:
    """wrap(model, worker), called alone: after one backward pass every rank holds the mean."""
    for world_size in (3, 2, 4):
        result = grade.run("grader.probes_sync:wrap", world_size, kind=kind, count=COUNT)
        grade.must_return(result)
        own = [_own_gradient(grade, kind, rank, world_size) for rank in range(world_size)]
        names, mean = list(own[0]), reference.mean(own)
        total = reference.norm(mean)
        got = [[value["grads"].get(name) for name in names] for value in result.values]
        for rank, mine in enumerate(got):
            for name, gradient in zip(names, mine, strict=True):
                if not reference.close(gradient, mean[name], total):
                    cause = diagnosis.name_wrong_mean(got, [[g[name] for name in names] for g in own])
                    if not any(call.name == "all_reduce" for call in result.ranks[rank].calls):
                        cause = "no gradient was sent to the other workers: is this a DistributedDataParallel?"
                    words = diagnosis.parameter_words(name, gradient, mean[name])
                    text = f"after backward on rank {rank} of {world_size}, {words}"
                    made = result.values[rank]["class"]
                    grade.fail(f"{cause}\nwrap() returned a {made}; {text}".lstrip("\n"))
        if not all(value["ddp"] for value in result.values):
            grade.fail(f"expected a DistributedDataParallel from wrap(), got a {result.values[0]['class']}")


def _own_gradient(grade: Grade, kind: str, rank: int, world_size: int) -> reference.Arrays:
    """What this rank's own examples give."""
    ids, labels = draws.examples(grade.seed, COUNT, COUNT * rank)
    if kind == "classifier":
        return reference.classifier(draws.classifier(grade.seed, COUNT * world_size), ids, labels)[1]
    return reference.language_model(draws.language_model(grade.seed, COUNT * world_size), ids)[1]


def check_traffic(training: Training) -> None:
    """In every step each gradient is handed to all_reduce once, by the backward pass."""
    training.must_have_steps()
    training.grade.must_return(training.result)
    size = sum(4 * int(np.prod(training.weights[name].shape)) for name in training.names)
    for rank, trace in enumerate(training.ranks):
        for number, step in enumerate(trace.steps):
            calls = [call for call in step.calls if call.name in ("all_reduce", "reduce", "gather", "all_gather")]
            if number == 0:  # before its first step DDP compares sizes and settles on buckets
                calls = [call for call in calls if call.dtype == "float32"]
            sent = sum(call.sent for call in calls)
            if 0.99 * size <= sent <= 1.05 * size:
                continue
            mine = sorted({f"{call.name} at {call.where}" for call in calls if not call.inside})
            cause = f": DDP has averaged already, and then there is {', '.join(mine)}" if mine else ""
            cause = cause or (": was the wrapped model called?" if sent < size else "")
            training.grade.fail(
                f"step {number + 1} on rank {rank} hands {sent} bytes to collectives, expected {size}{cause}"
            )
