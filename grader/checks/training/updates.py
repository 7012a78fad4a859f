"""Judges the steps of a training loop: gradients, clipping, updates, rates."""

import numpy as np

from grader.checks import diagnosis, reference
from grader.checks.training.steps import FLOAT32, SMALL, Training
from grader.checks.training.traces import Batch, RankTrace, Step

AVERAGING = ("all_reduce", "reduce", "gather", "all_gather")


def check_backward(training: Training) -> None:
    """The first batch's gradient is there when it is clipped, or at the latest when the optimizer steps."""
    trace = training.ranks[0]
    step = trace.steps[0] if trace.steps else trace.rest
    training.refuse_dev(step)
    if not step.forwards or (step.clip is None and step.grads is None):
        raise training.grade.lacking(training.result, "train() took no step: expected one for every batch")
    seen = step.examples if step.clip is None else step.clip_examples or step.examples
    _, expected = training.gradient(seen, 0, 0)
    found = [gradients for gradients in (step.clip, step.grads) if gradients is not None]
    if step.limits and np.isfinite(step.limits[0][0]):  # before the line that is given, which here clips to infinity
        training.grade.fail(_clipped_again(step, 0.0))
    if any(not training.differ(gradients, expected) for gradients in found):
        return _must_have_passed(training, trace.batches[:1])
    words = training.differ(found[-1], expected)
    if all(gradient is None or not np.any(gradient) for gradient in found[-1].values()):
        words = "no parameter has a gradient: backward was not called (did you forget the parentheses?)"
    cause = diagnosis.name_scaled([(found[-1].get(name), value) for name, value in expected.items()])
    none = [name for name in expected if found[-1].get(name) is None]
    if 0 < len(none) < len(expected):
        cause = f"{', '.join(none)} have no gradient, but others do: compute those of all parameters"
    training.grade.fail(f"{cause}\nafter the backward pass of the first batch, {words}".lstrip("\n"))


def check_every_backward(training: Training) -> None:
    """Every batch adds its own gradient, whether a step of the optimizer follows or not."""
    earlier: dict | None = None
    batches = [batch for batch in training.ranks[0].batches if batch.seen]
    if not batches:
        raise training.grade.lacking(training.result, "no gradient is ever clipped or used")
    for number, batch in enumerate(batches):
        _, own = training.gradient(batch.examples, 0, batch.after_step)
        piled = {name: own[name] + (earlier or {}).get(name, 0.0) for name in own}
        if not any(not training.differ(seen, right) for seen in batch.seen for right in (own, piled)):
            nothing = all(gradient is None or not np.any(gradient) for seen in batch.seen for gradient in seen.values())
            words = "there is no gradient" if nothing else training.differ(batch.seen[-1], own)
            training.grade.fail(f"after the backward pass of batch {number + 1}, {words}: every batch must produce one")
        latest = batch.seen[-1]
        earlier = {name: value for name, value in latest.items() if value is not None}
    _must_have_passed(training, batches)


def _must_have_passed(training: Training, batches: list[Batch]) -> None:
    """A gradient counts only where autograd computes it: any other way takes a pass for each of millions of weights."""
    for number, batch in enumerate(batches, 1):
        if not batch.passed:
            training.grade.fail(
                f"the gradients of batch {number} do not come from a backward pass of its loss: call its backward(). "
                "DistributedDataParallel, in task 3, does not see what torch.autograd.grad or other code computes"
            )


def check_steps(training: Training, steps: int) -> None:
    """Without clipping: each update is minus the rate times the mean gradient of the step's own batches."""
    training.must_not_hang()
    training.must_have_steps(steps)
    for number in range(min(len(rank.steps) for rank in training.ranks)):
        for rank, trace in enumerate(training.ranks):
            _check_before(training, rank, trace.steps[number], number)
        check_gradients(training, number, limit=0.0)
        for rank, trace in enumerate(training.ranks):
            _check_update(training, rank, trace, number)
    made = max(len(rank.steps) for rank in training.ranks)
    if made != steps:
        training.grade.fail(f"expected {steps} optimizer steps, one for each batch, got {made}")
    builds = training.ranks[0].builds
    if len(builds) > 1:
        training.grade.fail(
            f"build_optimizer is called {len(builds)} times (again at {builds[1].where}): build one optimizer before "
            "the loop; otherwise AdamW loses its moments and the schedule restarts"
        )
    check_noise(training)
    for rank, trace in enumerate(training.ranks):
        for number, step in enumerate(trace.steps):
            if step.remembered != number:
                training.grade.fail(
                    f"before step {number + 1} on rank {rank} the optimizer has lost its state (it knows of "
                    f"{step.remembered} earlier steps, expected {number}): AdamW loses its moments; clear gradients "
                    "only, never optimizer.state"
                )


def _check_before(training: Training, rank: int, step: Step, number: int) -> None:
    kept = {name: training.before(rank, number)[name] for name in training.names if name in (step.before or {})}
    if words := training.differ(step.before, kept):
        training.grade.fail(f"before step {number + 1} on rank {rank} something changed the parameters: {words}")


def _check_update(training: Training, rank: int, trace: RankTrace, number: int) -> None:
    step = trace.steps[number]
    moved = {name: training.before(rank, number + 1)[name] for name in training.names}
    if words := training.differ(step.after, moved):
        training.grade.fail(
            f"step {number + 1} on rank {rank} ({step.where}) is not parameter - rate * gradient: {words}"
        )


def check_gradients(training: Training, number: int, limit: float) -> None:
    """When the optimizer steps, every rank holds the mean of all ranks' gradients, clipped to `limit` (0: not)."""
    for trace in training.ranks:
        _must_move_all(training, trace.steps[number])
    own = training.own_gradients(number)
    mean = reference.mean(own)
    expected = reference.clipped(mean, limit)
    for rank, trace in enumerate(training.ranks):
        step = trace.steps[number]
        words = training.differ(step.grads, expected)
        if words:
            cause = _cause(training, number, own, limit)
            of_whom = f"the mean of {len(own)} workers' gradients" if len(own) > 1 else "the batch's gradient"
            what = f"expected {of_whom}{', clipped,' if limit else ''} when the optimizer steps"
            training.grade.fail(f"{cause}\n{what}: step {number + 1}, rank {rank}, {words}".lstrip("\n"))


def _must_move_all(training: Training, step: Step) -> None:
    missing = [name for name in training.names if name not in (step.grads or {})]
    if missing:
        training.grade.fail(
            f"the optimizer ({step.where}) does not update {', '.join(missing)}: was it built from a part of the "
            "model, or is a part frozen?"
        )


def _cause(training: Training, number: int, own: list, limit: float) -> str:
    """The known mistake that leaves these gradients at the optimizer's step; "" if none does."""
    got = [rank.steps[number].grads or {} for rank in training.ranks]

    def everywhere(candidates: list) -> bool:
        return not any(training.differ(mine, right) for mine, right in zip(got, candidates, strict=True))

    mean = reference.mean(own)
    clipped_own = [reference.clipped(mine, limit) for mine in own]
    if all(gradient is None or not np.any(gradient) for mine in got for gradient in mine.values()):
        kept = ", does averaging keep param.grad," if len(own) > 1 else ","
        what = "there is no gradient when the optimizer steps"
        return f"{what}: was backward called{kept} and zero_grad only after the step?"
    if limit and everywhere([mean] * len(own)):
        return "the gradients are not clipped when the optimizer steps: clip after backward and before the step"
    if len(own) > 1 and limit and everywhere([reference.mean(clipped_own)] * len(own)):
        return "the gradients were averaged after they were clipped: clipping is not linear, so average first"
    if len(own) > 1 and everywhere(clipped_own):
        return "every worker steps with its own gradient: it was not averaged before the step"
    if len(own) > 1 and everywhere([{k: g * len(own) for k, g in mean.items()}] * len(own)):
        return f"every gradient is {len(own):.3f} times the mean on {len(own)} workers: did you divide by world_size?"
    if number and _piled_up(training, number, limit):
        return "it still contains the gradients of earlier batches: set them to zero after every step"
    each = [{k: reference.clipped({k: g}, limit)[k] for k, g in mean.items()}] * len(own)
    if limit and everywhere(each):
        return "every tensor is clipped separately: limit the norm of all gradients together"
    if limit:
        return ""
    if words := _clipped_again(training.ranks[0].steps[number], limit):
        return words
    names = list(mean)
    lists = [[mine.get(name) for name in names] for mine in got]
    if len(own) == 1:
        return diagnosis.name_scaled([(mine.get(name), mean[name]) for mine in got for name in names])
    inputs = [[mine[name] for name in names] for mine in own]
    return diagnosis.forgotten_waits(training.result) or diagnosis.name_wrong_mean(
        lists, inputs, diagnosis.unsent(training.result, inputs)
    )


def _clipped_again(step: Step, limit: float) -> str:
    """Where clip_grad_norm_ is called with a limit of the student's own; "" if it is not."""
    extra = [(own, where) for own, where in step.limits if np.isfinite(own) and own != limit]
    if not extra:
        return ""
    return (
        f"clip_grad_norm_ is called with max_norm {extra[0][0]:g} ({extra[0][1]}), but --max_grad_norm is {limit:g} in "
        "this run: the provided line already clips, so remove yours"
    )


def check_noise(training: Training) -> None:
    """No two batches meet the same random numbers: dropout would drop the same units."""
    for trace in training.ranks:
        noises = [batch.noise for batch in trace.batches if batch.noise is not None]
        repeated = [number for number, noise in enumerate(noises) if noise in noises[:number]]
        if repeated:
            first = noises.index(noises[repeated[0]])
            training.grade.fail(
                f"batches {first + 1} and {repeated[0] + 1} use the same random numbers, so dropout drops the same "
                "units: seed the generators once, before training"
            )


def _piled_up(training: Training, number: int, limit: float) -> bool:
    """Whether what is there is the gradient at hand and that of the step before."""
    trace = training.ranks[0]
    earlier, now = trace.steps[number - 1].grads or {}, trace.steps[number].grads or {}
    own = reference.mean(training.own_gradients(number))
    if any(value is None for value in [*earlier.values(), *now.values()]):
        return False
    total = {name: own[name] + earlier[name] for name in own}
    return not training.differ(now, reference.clipped(total, limit))


def check_clipping(training: Training, steps: int, limit: float) -> None:
    """In every step the gradients are averaged over the workers, then clipped to `limit`, then used."""
    training.must_not_hang()
    training.must_have_steps(steps)
    for number in range(min(len(rank.steps) for rank in training.ranks)):
        check_gradients(training, number, limit)


def check_rates(training: Training, first: float) -> None:
    """The probe's schedule gives step i the rate first / (1 + i); its length is counted in batches."""
    training.must_have_steps(2)
    trace = training.ranks[0]
    training.refuse_idle(trace.steps)
    got = [step.rate for step in trace.steps]
    right = [first / (1 + number) for number in range(len(got))]
    if not np.allclose(got, right, rtol=1e-9):
        numbers = (" ".join(f"{rate:.4g}" for rate in rates[:5]) for rates in (right, got))
        text = "expected the rates {}, got {}".format(*numbers)
        training.grade.fail(f"{_wrong_rates(got, first)}\n{text}".lstrip("\n"))
    for number, step in enumerate(trace.steps):
        right_after = {name: training.before(0, number + 1)[name] for name in training.names}
        if words := training.differ(step.after, right_after):
            training.grade.fail(
                f"step {number + 1} does not update the parameters at the rate {got[number]:.4g}: {words}"
            )
    got_steps = int(trace.builds[0].data["steps_per_epoch"]) if trace.builds else 0
    if got_steps != training.setting.steps_per_epoch:
        training.grade.fail(
            f"build_optimizer got {got_steps} steps per epoch, expected {training.setting.steps_per_epoch}: "
            "pass it the number of batches, len(loader)"
        )
    training.must_see_batches()


def _wrong_rates(got: list[float], first: float) -> str:
    """The known mistake that gives these rates; "" if none does."""
    numbers = np.arange(len(got))
    if len(set(got)) == 1:
        return "the rate never changes: scheduler.step() was not called"
    if np.allclose(got, first / (2 + numbers)):
        return "the scheduler steps before the optimizer: the first rate is never used"
    if np.allclose(got, first / (1 + 2 * numbers)):
        return "the scheduler steps twice for every step of the optimizer"
    if got[0] == got[1]:
        return "the rate stays the same for several steps: call scheduler.step() in every step"
    return ""


def gradient_bytes(training: Training) -> int:
    """What the gradients of a step take in float32."""
    return sum(4 * int(np.prod(training.weights[name].shape)) for name in training.names)


def check_sent_once(
    training: Training, twice: str = "are they averaged more than once, by {}?", by_hand: bool = True
) -> None:
    """In every step each rank hands every gradient once to the collectives that average; `by_hand`: without DDP."""
    size = gradient_bytes(training)
    others = [call for trace in training.ranks for step in trace.steps for call in step.calls if call.inside]
    if by_hand and others:
        training.grade.fail(
            f"{others[0].name} ({others[0].where}) is called inside {others[0].inside}, not by your own line: this "
            "task averages by hand; DistributedDataParallel is the lesson of task 3"
        )
    for rank, trace in enumerate(training.ranks):
        for number, step in enumerate(trace.steps):
            calls = [call for call in step.calls if call.name in AVERAGING]
            if number == 0:  # before its first step DDP compares sizes and settles on buckets
                calls = [call for call in calls if call.dtype == "float32"]
            sent = sum(call.sent for call in calls)
            if 0.99 * size <= sent <= 1.05 * size:
                continue
            mine = sorted({f"{call.name} at {call.where}" for call in calls if not call.inside})
            cause = f": {twice.format(', '.join(mine))}" if mine and sent > size else ""
            cause = cause or (": was the wrapped model called?" if sent < size else "")
            training.grade.fail(
                f"step {number + 1} on rank {rank} passes {sent} bytes to collectives, expected {size} (every "
                f"gradient once){cause}"
            )


def check_own_gradients_sent(training: Training) -> None:
    """What a rank hands to the collectives that average is its own gradients: in any order, times one factor."""
    for number in range(min(len(rank.steps) for rank in training.ranks)):
        for rank, own in enumerate(training.own_gradients(number)):
            calls = [call for call in training.ranks[rank].steps[number].calls if call.name in AVERAGING]
            sent = [call.sent_arrays().ravel() for call in calls if call.dtype == "float32"]
            got = np.concatenate([np.empty(0), *sent])
            right = np.concatenate([array.ravel() for array in own.values()])
            right = np.concatenate([right, np.zeros(max(0, len(got) - len(right)))])  # a buffer may be filled up
            size = float(np.linalg.norm(right))
            got = got * (size / max(float(np.linalg.norm(got)), 1e-30))
            if not reference.close(np.sort(got), np.sort(right), max(size, SMALL), FLOAT32):
                training.grade.fail(
                    f"what rank {rank} passes to {' and '.join(sorted({call.name for call in calls}))} in step "
                    f"{number + 1} is not its own gradients"
                )
