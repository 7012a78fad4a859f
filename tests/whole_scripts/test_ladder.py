"""Whole scripts: main() on several workers trains like main() on one. Losses, metrics, weights and examples agree.

The scripts of tasks 2a, 2b and 3 are a ladder: each step of it distributes the training of one worker, task 1, in
another way, and must change nothing about the result. Here each script runs on one and on four workers.

BERT is real here, and tiny. With the script's own AdamW, the workers' mean loss must equal the one that is computed
here for the whole batch, from the weights at the start and the examples that went through the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from grader.call_checks import must_be_own_calls
from grader.grading import Grade
from grader.in_rank import in_rank, run, run_alone
from grader.ranks.calls import Event
from grader.ranks.outcome import Result
from grader.wire.values import Fields
from tests.gradients.test_averaging import BY_HAND
from tests.task1.test_bert import checkpoint_seed, save_tiny_bert, saved
from tests.training import small_models
from tests.training.loop_shared import CHANGED_LOSS
from tests.training.test_ddp import must_be_run_by_reducer
from tests.training.test_sampling import orders_of_one_worker

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, Tensor, torch
    from tests.whole_scripts.script_in_rank import run_main

graded = pytest.mark.graded
CONFIG, SCRIPT = "tests/training/config_in_rank.py", "tests/whole_scripts/script_in_rank.py"
PRELOAD = ("scripts", "steps", "models")
EPOCHS, TRAIN, DEV, BATCH = 3, 16, 13, 8
STEPS_PER_EPOCH = TRAIN // BATCH
STEPS = EPOCHS * STEPS_PER_EPOCH
RATE, LIMIT = 2e-3, 1.0  # the clipping limit is the scripts' default
SAME = 1e-5
VOCABULARY = small_models.SHARED_TOKENS + TRAIN + DEV
EVALUATION = "region 1.4 in this file: "
Arrays = Fields


# --- what a rank does ---


@in_rank(uses=[CONFIG, save_tiny_bert, SCRIPT], preload=PRELOAD, first="prepare_script", join=False)
def run_script(context: Context, lesson: ModuleType, inputs: Fields) -> None:
    run_main(context, lesson)


def adamw(
    a: Fields,
    weights: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    moments: Mapping[str, tuple[Tensor, Tensor]],
    number: int,
) -> None:
    """Clip, and take a step of AdamW (Loshchilov and Hutter, 2019, algorithm 2) as in common/optim.py, in place."""
    norm = torch.sqrt(sum((gradient.square().sum() for gradient in gradients.values()), torch.zeros(())))
    factor, rate = min(1.0, a["limit"] / (float(norm) + 1e-6)), a["rate"] * (1 - number / len(a["steps"]))
    with torch.no_grad():
        for name, weight in weights.items():
            first, second = moments[name]
            first.lerp_(factor * gradients[name], 0.1)
            second.lerp_((factor * gradients[name]).square(), 0.001)
            size = (second / (1 - 0.999 ** (number + 1))).sqrt() + 1e-8
            weight -= rate * (first / (1 - 0.9 ** (number + 1))) / size


@in_rank(uses=[save_tiny_bert, adamw], preload=PRELOAD, join=False)
def train_alone(context: Context, lesson: ModuleType, inputs: Fields) -> Fields:
    """Return losses (steps, ranks) and dev logits (epochs, ranks, dev, labels). Loads no student's file.

    It trains on the same examples as the ranks (argument `steps`: [step][rank] -> examples). inputs: weights to start
    from; ids and labels of each rank's training and dev set.
    """
    from transformers import BertConfig, BertForSequenceClassification

    a = context.arguments
    save_tiny_bert(context)
    model = BertForSequenceClassification(BertConfig.from_pretrained("pretrained", num_labels=2)).double().eval()
    weights = {name: tensor.double().requires_grad_() for name, tensor in inputs["weights"].items()}
    ids, labels = inputs["ids"], inputs["labels"]
    moments = {name: (torch.zeros_like(tensor), torch.zeros_like(tensor)) for name, tensor in weights.items()}
    losses, logits = [], []

    def output(**arguments: torch.Tensor) -> Any:
        return torch.func.functional_call(model, weights, (), arguments)

    for number, parts in enumerate(a["steps"]):
        each = [output(input_ids=ids[r][rows], labels=labels[r][rows]).loss for r, rows in enumerate(parts)]
        losses.append([float(loss) for loss in each])
        gradients = torch.autograd.grad(sum(each) / len(each), list(weights.values()))
        adamw(a, weights, dict(zip(weights, gradients, strict=True)), moments, number)
        if (number + 1) % a["steps_per_epoch"] == 0:
            with torch.no_grad():
                logits.append(torch.stack([output(input_ids=own[a["train"] :]).logits for own in ids]))
    return {"losses": losses, "logits": torch.stack(logits)}


# --- what a rank did ---


class ScriptTrace:
    """What main() did on one rank: losses, accuracies, examples of each training batch, first and last weights."""

    def __init__(self, events: Sequence[Event]) -> None:
        def of(name: str) -> list[Arrays]:
            return [event.data for event in events if event.name == name]

        self.losses = [data["value"] for data in of("loss")]
        self.accuracies = [data["metrics"].get("acc", -1.0) for data in of("evaluation")]
        self.batches = [
            [small_models.number(token) for token in data["first"]] for data in of("forward") if data["grad"]
        ]
        self.weights: Arrays = next((data["weights"] for data in of("weights")), {})
        self.trained: Arrays = next((data["weights"] for data in of("trained")), {})


def why_evaluation_is_stuck(result: Result) -> str:
    """Say whether ranks wait for each other because only some of them evaluate."""
    waits = [call for call in result.fault.stuck.values() if call.name == "broadcast"] if result.fault else []
    if not any("evaluation.py" in call.where for call in waits):
        return ""
    return (
        f"{EVALUATION}only some of the ranks evaluate. The forward pass of a wrapped model sends BERT's buffers from "
        "rank 0 to all others, so every rank must call evaluate(); or rank 0 evaluates model.module"
    )


# --- what is right ---


def workers(count: int) -> str:
    return f"{count} worker{'s' if count > 1 else ''}"


def equal(some: Arrays, others: Arrays) -> bool:
    return some.keys() == others.keys() and all(np.array_equal(value, others[name]) for name, value in some.items())


def cause_at(step: int) -> str:
    if step == 0:
        return "the first batch differs: do the workers together draw the batch of one worker, with config.seed?"
    return "the first steps agree, then the runs diverge: check gradients, learning rate and the next epoch's order"


class ScriptRun:
    """One run of main() on several ranks."""

    def __init__(self, grade: Grade, ranks: int) -> None:
        self.grade, self.ranks, self.seed = grade, ranks, grade.number("script", 1000)
        self.inputs = [self.draw(rank) for rank in range(ranks)]
        self.common: Fields = {
            "checkpoint_seed": checkpoint_seed(grade), "vocabulary": VOCABULARY, "rate": RATE, "train": TRAIN,
        }  # fmt: skip
        arguments = {"batch": BATCH // ranks, "epochs": EPOCHS, "config_seed": self.seed, **self.common}
        self.result = run(
            grade, run_script, self.inputs, why_stuck=why_evaluation_is_stuck, payloads=False, **arguments
        )
        self.traces = [ScriptTrace(rank.events) for rank in self.result.ranks]
        for rank, trace in enumerate(self.traces):
            if not trace.weights or not trace.trained:
                grade.fail(
                    observed=f"rank {rank} ends without record.describe() or record.write(), which main() must call"
                )

    def draw(self, rank: int) -> Arrays:
        seed = self.grade.seed  # not that of --seed, with which a rank could draw the others' examples
        parts = [small_models.examples(seed, count, first, rank) for count, first in ((TRAIN, 0), (DEV, TRAIN))]
        ids, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return {"ids": ids, "labels": labels}

    def fail(self, cause: str = "", observed: str = "") -> None:
        where = f"{workers(self.ranks)}: "
        self.grade.fail(cause and where + cause, observed if cause else where + observed, cause)

    def check(self) -> None:
        self.check_start()
        self.check_order()
        self.check_moved()
        right = self.trained_alone()
        self.check_losses(np.mean(right["losses"], axis=1))
        self.check_metrics(right["logits"])

    def check_start(self) -> None:
        right = saved(self.grade, np.zeros((1, 1), int), VOCABULARY)["weights"]
        for rank, trace in enumerate(self.traces):
            if not equal({name: trace.weights.get(f"bert.{name}") for name in right}, right):
                self.fail(observed=f"rank {rank} does not start from the weights of the checkpoint (region 1.1)")
            if not equal(trace.weights, self.traces[0].weights):
                self.fail(f"rank {rank} starts from different weights than rank 0: is the seed the same?")

    def check_starts_like(self, other: ScriptRun) -> None:
        if not equal(self.traces[0].weights, other.traces[0].weights):
            self.fail(
                observed=f"training starts from different weights than with {workers(other.ranks)} and the same seed"
            )

    def check_order(self) -> None:
        """Check that the workers together draw the batches of one worker."""
        for rank, trace in enumerate(self.traces):
            for count in (len(trace.losses), len(trace.batches)):
                if count != STEPS:
                    self.fail(observed=f"one worker takes {STEPS} steps, rank {rank} of {self.ranks} takes {count}")
        orders = orders_of_one_worker(self.grade, TRAIN, self.seed, EPOCHS)
        for step in range(STEPS):
            right = sorted(orders[step // STEPS_PER_EPOCH][step % STEPS_PER_EPOCH * BATCH :][:BATCH])
            got = sorted(number for trace in self.traces for number in trace.batches[step])
            if got != right:
                self.fail(
                    cause_at(step),
                    f"step {step + 1}: the workers together train on the examples {got}, one worker "
                    f"with --seed {self.seed} trains on {right}",
                )

    def check_moved(self) -> None:
        """Check that training changes every tensor of the model."""
        for trace in self.traces:
            same = [name for name, value in trace.weights.items() if np.array_equal(trace.trained.get(name, []), value)]
            if same:
                self.fail(
                    f"training never changes {len(same)} of {len(trace.weights)} tensors, for instance {same[0]}: "
                    "is a part of the model frozen, or unknown to the optimizer?"
                )

    def trained_alone(self) -> Arrays:
        weights = self.traces[0].weights
        inputs = {"weights": weights} | {
            name: np.stack([own[name] for own in self.inputs]) for name in ("ids", "labels")
        }
        steps = [[trace.batches[step] for trace in self.traces] for step in range(STEPS)]
        arguments = {"steps": steps, "steps_per_epoch": STEPS_PER_EPOCH, "limit": LIMIT, **self.common}
        return dict(run_alone(self.grade, train_alone, [inputs], **arguments)[0])

    def check_losses(self, expected: np.ndarray) -> None:
        losses = np.mean([trace.losses for trace in self.traces], axis=0)
        wrong = [step for step in range(5) if not abs(losses[step] - expected[step]) <= SAME]
        if wrong:
            step = wrong[0]
            summed = abs(losses[step] - self.ranks * expected[step]) <= self.ranks * SAME and self.ranks > 1
            cause = f"the recorded loss is a sum over the workers: {CHANGED_LOSS}" if summed else cause_at(step)
            self.fail(
                cause,
                f"step {step + 1}: the workers have the mean loss {losses[step]:.6f}, one worker with "
                f"all their examples has {expected[step]:.6f}",
            )

    def check_metrics(self, logits: np.ndarray) -> None:
        """Check the metrics of rank 0, and those of any other rank that records some."""
        for rank, trace in enumerate(self.traces):
            if rank > 0 and not trace.accuracies:
                continue
            if len(trace.accuracies) != EPOCHS:
                self.fail(
                    f"{EVALUATION}expected metrics after each of {EPOCHS} epochs on rank {rank}, got them "
                    f"{len(trace.accuracies)} times: call evaluate()"
                )
            for epoch, accuracy in enumerate(trace.accuracies):
                scores = logits[epoch][rank]
                right = scores.argmax(axis=1) == self.inputs[rank]["labels"][TRAIN:]
                undecided = np.abs(scores[:, 0] - scores[:, 1]) < 1e-3  # rounding may decide these
                lowest, highest = (right & ~undecided).mean(), (right | undecided).mean()
                if not lowest - SAME <= accuracy <= highest + SAME:
                    self.fail(
                        f"{EVALUATION}rank {rank}, after epoch {epoch + 1}, expected the metrics "
                        f"{{'acc': {right.mean():.4f}}}, got {{'acc': {accuracy:.4f}}}"
                    )


def check_ladder(grade: Grade, check_averaging: Callable[[Grade, Result], None]) -> None:
    """Check that one and four workers train alike, and how they average gradients (check_averaging)."""
    one, four = ScriptRun(grade, 1), ScriptRun(grade, 4)
    one.check()
    four.check_starts_like(one)
    four.check()
    check_averaging(grade, four.result)


# --- the graded tests ---


must_average_by_hand = partial(must_be_own_calls, instead=BY_HAND)


@graded("2a.3", needs=["1.1", "1.4", "2a.1", "2a.2"])
def test_task2a_trains_like_one_worker(grade: Grade) -> None:
    check_ladder(grade, must_average_by_hand)


@graded("2b.1", needs=["1.1", "1.4", "2a.1", "2a.2"])
def test_task2b_trains_like_one_worker(grade: Grade) -> None:
    check_ladder(grade, must_average_by_hand)


@graded("3.1", needs=["1.1", "1.4", "2a.1", "2a.2"])
def test_task3_trains_like_one_worker(grade: Grade) -> None:
    check_ladder(grade, must_be_run_by_reducer)
