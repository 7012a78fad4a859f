"""Judges whole scripts on a real, tiny BERT, against a training run that the grader computes from the same examples."""

import hashlib
from collections.abc import Callable

import numpy as np

from grader.checks.bert import checkpoint, checkpoint_seed
from grader.grading import Grade
from grader.ranks.outcome import Result
from grader.verdicts import Deadlocked
from grader.wire import drawn

EPOCHS, TRAIN, DEV, BATCH = 3, 16, 13, 8
STEPS = EPOCHS * TRAIN // BATCH
RATE, LIMIT = 2e-3, 1.0  # the limit of clipping is the scripts' default
SAME = 1e-5
VOCABULARY = drawn.SHARED_TOKENS + TRAIN + DEV
EVALUATED_ALONE = (
    "region 1.4 in this file: only some of the ranks evaluate. The forward pass of a wrapped model sends BERT's "
    "buffers from rank 0 to all others, so every rank must call evaluate(); or rank 0 evaluates model.module\n"
)


def check_ladder(grade: Grade, judge: Callable[[Grade, Result], None], world_sizes: tuple[int, ...] = (2, 4)) -> None:
    """Under the script's own AdamW the mean of the workers' losses is what the grader computes for the whole batch.
    `judge` says of a run whether what the lesson is about has averaged the gradients."""
    one = Script(grade, 1)
    one.check()
    for world_size in world_sizes:
        many = Script(grade, world_size)
        many.check_weights(one)
        many.check()
        judge(grade, many.result)


class Script:
    """One run of main() on `n` ranks."""

    def __init__(self, grade: Grade, n: int) -> None:
        self.grade, self.n, self.seed = grade, n, grade.number("script", 1000)
        self.mine = [_drawn(grade.seed, rank) for rank in range(n)]
        common = {"checkpoint_seed": checkpoint_seed(grade), "vocabulary": VOCABULARY, "rate": RATE}
        self.common = common
        result = grade.run(
            "grader.probes.bert:script", n, each=self.mine, train=TRAIN, batch=BATCH // n, epochs=EPOCHS,
            config_seed=self.seed, **common,
        )  # fmt: skip
        _must_return(grade, result)
        self.result = result
        self.traces = [_trace(rank.events) for rank in result.ranks]
        for rank, trace in enumerate(self.traces):
            if not trace["weights"] or not trace["trained"]:
                grade.fail(f"rank {rank} ends without record.describe() or record.write(), which main() must call")

    def check(self) -> None:
        self._check_start()
        self._check_order()
        self._check_moved()
        self._check_losses()
        self._check_metrics()

    def _fail(self, message: str) -> None:
        self.grade.fail(f"{_workers(self.n)}: {message}")

    def _check_start(self) -> None:
        saved = checkpoint(self.grade, VOCABULARY)
        for rank, trace in enumerate(self.traces):
            weights = trace["weights"][0]
            if any(not np.array_equal(weights.get(f"bert.{name}"), right) for name, right in saved.items()):
                self._fail(f"rank {rank} does not start from the weights of the checkpoint (region 1.1)")
        self.check_weights(self)

    def check_weights(self, other: "Script") -> None:
        """All ranks start from one set of weights, those of another run with the same seed."""
        for rank, trace in enumerate(self.traces):
            if not _equal(trace["weights"][0], self.traces[0]["weights"][0]):
                self._fail(f"rank {rank} starts from different weights than rank 0: is the seed the same?")
        if not _equal(self.traces[0]["weights"][0], other.traces[0]["weights"][0]):
            self._fail(f"training starts from different weights than with {_workers(other.n)} and the same seed")

    def _check_order(self) -> None:
        """Together the workers draw the batches of one worker."""
        for rank, trace in enumerate(self.traces):
            for what in ("loss", "batches"):
                if len(trace[what]) != STEPS:
                    self._fail(f"one worker takes {STEPS} steps, rank {rank} of {self.n} takes {len(trace[what])}")
        arguments = {"length": TRAIN, "seed": self.seed, "epochs": EPOCHS}
        (orders,) = self.grade.session.run("grader.probes.trusted:orders", 1, arguments).values
        each = TRAIN // BATCH
        for step in range(STEPS):
            right = sorted(orders[step // each][step % each * BATCH :][:BATCH])
            got = sorted(number for trace in self.traces for number in trace["batches"][step])
            if got != right:
                self._fail(
                    f"{_ladder_cause(step)}step {step + 1}: the workers together train on the examples {got}, one "
                    f"worker with --seed {self.seed} trains on {right}"
                )

    def _reference(self) -> dict[str, np.ndarray]:
        steps = [[trace["batches"][step] for trace in self.traces] for step in range(STEPS)]
        weights = self.traces[0]["weights"][0]
        inputs = {"weights": weights, "train": TRAIN}
        inputs |= {name: np.stack([mine[name] for mine in self.mine]) for name in ("ids", "labels")}
        mark = hashlib.sha256(b"".join(np.ascontiguousarray(weights[name]).tobytes() for name in sorted(weights)))
        arguments = self.common | {"steps": steps, "steps_per_epoch": TRAIN // BATCH, "limit": LIMIT, "each": [inputs]}
        return self.grade.session.run(
            "grader.probes.trusted:bert", 1, arguments | {"weights": mark.hexdigest()}
        ).values[0]

    def _check_losses(self) -> None:
        self.right = self._reference()
        expected = np.mean(self.right["losses"], axis=1)
        losses = np.mean([trace["loss"] for trace in self.traces], axis=0)
        wrong = [step for step in range(5) if not abs(losses[step] - expected[step]) <= SAME]
        if wrong:
            step = wrong[0]
            self._fail(
                f"{_ladder_cause(step)}step {step + 1}: the workers have the mean loss {losses[step]:.6f}, one worker "
                f"with all their examples has {expected[step]:.6f}"
            )

    def _check_moved(self) -> None:
        """Every tensor of the model is another after training."""
        for trace in self.traces:
            before, after = trace["weights"][0], trace["trained"][0]
            still = [name for name, value in before.items() if np.array_equal(after.get(name), value)]
            if still:
                self._fail(
                    f"training never changes {len(still)} of {len(before)} tensors, for instance {still[0]}: "
                    "is a part of the model frozen, or unknown to the optimizer?"
                )

    def _check_metrics(self) -> None:
        """Rank 0 keeps the metrics; what another rank records must be right as well."""
        for rank, trace in enumerate(self.traces):
            labels = self.mine[rank]["labels"][TRAIN:]
            found = [told["metrics"].get("acc", -1.0) for told in trace["evaluation"]]
            if not found and rank:
                continue
            if len(found) != EPOCHS:
                self._fail(f"region 1.4 in this file: expected metrics after each of {EPOCHS} epochs on rank {rank}, "
                           f"got them {len(found)} time{'s' if len(found) != 1 else ''}: call evaluate()")  # fmt: skip
            for epoch, acc in enumerate(found):
                logits = self.right["logits"][epoch][rank]
                right = logits.argmax(axis=1) == labels
                close = np.abs(logits[:, 0] - logits[:, 1]) < 1e-3  # rounding may turn these
                lowest, highest = (right & ~close).mean(), (right | close).mean()
                if not lowest - SAME <= acc <= highest + SAME:
                    self._fail(
                        f"region 1.4 in this file: rank {rank}, after epoch {epoch + 1}, expected the metrics "
                        f"{{'acc': {right.mean():.4f}}}, got {{'acc': {acc:.4f}}}"
                    )


def _workers(n: int) -> str:
    return f"{n} worker{'s' if n > 1 else ''}"


def _drawn(seed: int, rank: int) -> dict[str, np.ndarray]:
    parts = [drawn.examples(seed, TRAIN, 0, rank), drawn.examples(seed, DEV, TRAIN, rank)]
    ids, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return {"ids": ids, "labels": labels}


def _must_return(grade: Grade, result: Result) -> None:
    verdict = grade.verdict(result)
    waits = [call for call in result.fault.stuck.values() if call.name == "broadcast"] if result.fault else []
    if verdict and waits and (_evaluations_differ(result) or "evaluation.py" in waits[0].where):
        raise Deadlocked(EVALUATED_ALONE + str(verdict))
    grade.must_return(result)


def _evaluations_differ(result: Result) -> bool:
    """Whether some ranks evaluated more than others."""
    return (
        len({len([e for e in rank.events if e.name == "forward" and not e.data["grad"]]) for rank in result.ranks}) > 1
    )


def _trace(events: list) -> dict[str, list]:
    """Losses, metrics, first and last weights, and the examples of every training batch."""
    found: dict[str, list] = {"loss": [], "evaluation": [], "weights": [], "trained": [], "batches": []}
    for event in events:
        if event.name == "loss":
            found["loss"].append(event.data["value"])
        elif event.name == "evaluation":
            found["evaluation"].append(event.data)
        elif event.name in ("weights", "trained"):
            found[event.name].append(event.data["weights"])
        elif event.name == "forward" and event.data["grad"]:
            found["batches"].append([drawn.number(token) for token in event.data["first"]])
    return found


def _equal(some: dict, others: dict) -> bool:
    return some.keys() == others.keys() and all(np.array_equal(value, others[name]) for name, value in some.items())


def _ladder_cause(step: int) -> str:
    if step == 0:
        return "the very first batch differs: do the workers together draw the batch of one worker, with config.seed?\n"
    return "the first steps agree, then the runs diverge: check gradients, learning rate and the next epoch's order\n"
