"""Judges a model wrapped in DistributedDataParallel: what its backward pass leaves, and what travels."""

from grader import diagnosis, draws, reference
from grader.grading import Grade
from grader.steps import FLOAT32, Training
from grader.training import check_sent_once, gradient_bytes

COUNT = 3  # examples on each rank


def check_wrapped(grade: Grade, kind: str) -> None:
    """wrap(model, worker), called alone: after one backward pass every rank holds the mean."""
    for world_size in (3, 2, 4):
        result = grade.run("grader.probes_sync:wrap", world_size, kind=kind, count=COUNT)
        grade.must_return(result)
        own = [_own_gradient(grade, kind, rank, world_size) for rank in range(world_size)]
        names, mean = list(own[0]), reference.mean(own)
        total = FLOAT32 * max(map(reference.norm, own))  # the workers' errors stay, where their gradients cancel
        got = [[value["grads"].get(name) for name in names] for value in result.values]
        for rank, mine in enumerate(got):
            for name, gradient in zip(names, mine, strict=True):
                if not reference.close(gradient, mean[name], total):
                    cause = diagnosis.name_wrong_mean(got, [[g[name] for name in names] for g in own])
                    if gradient is None:
                        cause = f"{name} has no gradient: is it frozen, or outside of what was wrapped?"
                    elif not any(call.name == "all_reduce" for call in result.ranks[rank].calls):
                        cause = "no gradient was sent to the other workers: is this a DistributedDataParallel?"
                    elif not result.values[rank]["ddp"]:
                        cause = "only a part of the model is inside of a DistributedDataParallel"
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
    check_sent_once(training, "DDP has averaged already, and then there is {}", by_hand=False)
