"""Runs a student's gradient reducer on drawn gradients, and judges what was sent, when, and what came of it.

The gradient of every use of a parameter is drawn for each rank and multiplied by a permit, which the grader gives when
backward asks for it (probes.beyond.overlap). So the broker's order is evidence: a message that holds a gradient was
sent after its permit was given, and before those that came later.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from grader import crashes
from grader.arithmetic import difference, matches
from grader.checks import reference
from grader.checks.beyond.reducer.wrong_means import name_wrong_mean, unsent
from grader.compare import forgotten_waits
from grader.grading import Grade
from grader.ranks.outcome import Result
from grader.verdicts import Crashed, Deadlocked, Verdict, Wrong
from grader.wire import drawn as draws

SLACK = {"float64": 1.0, "float32": 1.0, "bfloat16": 3000.0}  # of reference.close
WORDS_OF_CRASHES = {
    "a second backward before finish()": "gradient_ready was called twice for a parameter in one step: is it "
    "registered once, does it stop under no_sync, and does finish reset `missing`?",
    "KeyError: Parameter": "a parameter was taken out of `missing` twice: do not take anything out under no_sync",
    "'NoneType' object has no attribute 'wait'": "bucket.work is None: the bucket was never sent (is next_bucket 0 "
    "again in each step?), or its all_reduce was not called with async_op=True",
    "'wait' (grader/": "bucket.work must be the handle that all_reduce returns with async_op=True, and nothing else",
}
Uses = list[list[list[list[int]]]]  # [step][micro-batch][rank, the last for all above] -> parameters in forward order


@dataclass(frozen=True)
class ReducerSetting:
    """A toy, its steps, and the buckets that must be sent in each step (empty: not looked at)."""

    shapes: list[list[int]]
    uses: Uses
    bucket_bytes: int
    buckets: list[list[list[int]]] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)  # empty: float32
    frozen: list[int] = field(default_factory=list)
    tied: int | None = None
    late: list[int | None] = field(default_factory=list)  # empty: none in any step
    fails: list[int] = field(default_factory=list)
    zero: list[int] = field(default_factory=list)
    finish: bool = True

    def of_rank(self, rank: int) -> list[list[list[int]]]:
        return [[kinds[min(rank, len(kinds) - 1)] for kinds in micros] for micros in self.uses]

    def dtype(self, k: int) -> str:
        return self.dtypes[k] if self.dtypes else "float32"


class Reduced:
    """One run of a setting, with what every rank's own gradients are and what their mean is."""

    def __init__(self, grade: Grade, world_size: int, setting: ReducerSetting) -> None:
        self.grade, self.setting, self.n = grade, setting, world_size
        self.micros: list[list[list[list[np.ndarray]]]] = []  # gradients: [rank][step][micro-batch][parameter]
        self.own: list[list[list[np.ndarray]]] = []  # their sums: [rank][step][parameter]
        each, later = zip(*(self._drawn(rank) for rank in range(world_size)), strict=True)
        told = asdict(setting)
        told |= {"dtypes": [setting.dtype(k) for k in range(len(setting.shapes))], "buckets": None}
        told |= {"micros": [len(micros) for micros in setting.uses], "late": setting.late or [None] * len(setting.uses)}
        self.result: Result = grade.run(
            "grader.probes.beyond.overlap:reduce", world_size, payloads=True, each=list(each),
            later=list(later), **told,
        )  # fmt: skip
        if verdict := grade.verdict(self.result):
            raise self._explained(verdict)
        self._must_send_by_hand()

    def _drawn(self, rank: int) -> tuple[dict, dict[str, np.ndarray]]:
        """A rank's part of the inputs, and its permits; keeps its gradients in `micros` and `own`."""
        draw, shapes = draws.generator(self.grade.seed, 14, self.n, rank), self.setting.shapes
        uses, permits = self.setting.of_rank(rank), {}
        gradients: list[list[list[np.ndarray]]] = []
        own = [[[np.zeros(shape) for shape in shapes] for _ in micros] for micros in uses]
        for step, micros in enumerate(uses):
            gradients.append([])
            for micro, used in enumerate(micros):
                drawn = [np.asarray(draw.normal(size=shapes[k]), np.float32) for k in used]
                gradients[-1].append(drawn)
                for i, k in enumerate(used):
                    permit = np.asarray(draw.integers(16, 48) / 16, np.float32)  # exact in bfloat16
                    permits[f"{step} {micro} {i}"] = permit
                    if k not in self.setting.frozen:
                        own[step][micro][k] += permit * drawn[i].astype(np.float64)
        self.micros.append(own)
        self.own.append([[np.sum(arrays, axis=0) for arrays in zip(*step, strict=True)] for step in own])
        return {"uses": uses, "gradients": gradients}, permits

    def _must_send_by_hand(self) -> None:
        """The reducer of DistributedDataParallel, which is C++, would do all that is asked for here."""
        calls = (call for rank in self.result.ranks for call in rank.calls if call.name == "all_reduce")
        if other := next((call for call in calls if call.inside), None):
            self.grade.fail(
                f"all_reduce is called inside {other.inside}{f' ({other.where})' if other.where else ''}, not by a "
                "line of yours: send each bucket with dist.all_reduce"
            )

    def _explained(self, verdict: Verdict) -> Verdict:
        """Torch's or our words, with the reason before them."""
        if isinstance(verdict, Crashed):
            return Crashed(crashes.explained(str(verdict), WORDS_OF_CRASHES))
        if self.result.outcome == "mismatch":
            words = "the ranks do not send the same buckets: every rank sends each bucket once, in the order of "
            return Wrong(f"{words}reducer.buckets, also one without gradients\n{verdict}")
        return Deadlocked(f"{self._why_stuck()}{verdict}") if isinstance(verdict, Deadlocked) else verdict

    def _why_stuck(self) -> str:
        """A line that says why no rank can continue; "" if it is no known mistake."""
        ranks = self.result.ranks
        behind = [rank for rank in ranks if rank.rank in self.setting.late and rank.call and rank.call.name == "recv"]
        waits = [rank for rank in ranks if rank.call and rank not in behind]
        if behind and waits and (call := waits[0].call):
            return (
                f"rank {waits[0].rank} waits for {call.name} #{call.number} ({call.where}) while backward still has "
                "gradients to compute: a hook must not wait: no wait() and no blocking call\n"
            )
        sent = [sum(call.name == "all_reduce" for call in rank.calls) for rank in ranks]
        least, most = sent.index(min(sent)), sent.index(max(sent))
        if sent[least] < sent[most]:
            return (
                f"rank {most} sends {sent[most]} buckets, but rank {least} sends {sent[least]}: every rank must send "
                "all buckets. In the hook, send every complete bucket, in a loop; in finish, send the rest\n"
            )
        return ""

    # --- values ---

    def check_means(self) -> None:
        """After each step every parameter has the mean of all ranks, in its own dtype, and is itself unchanged."""
        trained = [k for k in range(len(self.setting.shapes)) if k not in self.setting.frozen]
        for step in range(len(self.setting.uses)):
            told = [steps[step] for steps in self.result.values]
            for rank, value in enumerate(told):
                if value["moved"]:
                    self.grade.fail(f"step {step}: parameter {value['moved'][0]} itself changed on rank {rank}")
                for k in self.setting.frozen:
                    if value["grads"][k] is not None:
                        self.grade.fail(f"parameter {k} requires no gradient, but has one on rank {rank}")
                for k in trained:
                    self._check_one(step, rank, k, trained, told)

    def _check_one(self, step: int, rank: int, k: int, trained: list[int], told: list[dict]) -> None:
        own = [[ranks[step][j] for j in trained] for ranks in self.own]
        mean = np.asarray(np.mean([ranks[step][k] for ranks in self.own], axis=0))
        total = reference.norm({str(r): ranks[step][k] for r, ranks in enumerate(self.own)})
        got, dtype = told[rank]["grads"][k], self.setting.dtype(k)
        if got is not None and told[rank]["dtypes"][k] != dtype:
            self.grade.fail(f"step {step}: parameter {k} is {dtype}, but its gradient on rank {rank} is not")
        if reference.close(got, mean, total, SLACK[dtype]):
            return
        grads = [[value["grads"][j] for j in trained] for value in told]
        cause = forgotten_waits(self.result) or self._stale(step, k, got)
        cause = cause or self._unsent(rank) + name_wrong_mean(grads, own, unsent(self.result, own))
        if cause and not self.setting.finish:
            cause += "; finish() is not called in this test: send divides, and sets param.grad to the piece"
        words = difference(f"parameter {k}", got, mean)
        text = f"step {step}: expected the mean of {self.n} ranks' gradients; on rank {rank}, {words}"
        self.grade.fail(f"{cause}\n{text}" if cause else text)

    def _unsent(self, rank: int) -> str:
        """Where a rank sends too few buckets, in a setting that says how many there are."""
        sent = sum(call.name == "all_reduce" for call in self.result.ranks[rank].calls)
        due = sum(map(len, self.setting.buckets))
        words = "each hook must send every complete bucket, in a loop"
        return f"rank {rank} sends {sent} of {due} buckets: {words}\n" if sent < due else ""

    def _stale(self, step: int, k: int, got: Any) -> str:
        """Whether a gradient of an earlier step is in it, or a parameter without one was left out."""
        unused = [rank for rank in range(self.n) if not np.any(self.own[rank][step][k])]
        if got is None or np.shape(got) != tuple(self.setting.shapes[k]):
            who = "any rank" if len(unused) == self.n else f"rank {unused[0]}" if unused else ""
            return f"parameter {k} has no gradient: backward gave it none on {who}; use zeros for it" if who else ""
        means = [np.mean([ranks[s][k] for ranks in self.own], axis=0) for s in range(step + 1)]
        for s in range(step):
            if matches(got, means[s]) and np.any(means[s]):
                return f"param.grad is still the gradient of step {s}"
            if matches(got, means[step] + means[s]) and np.any(means[s]):
                return f"the gradient of step {s} is added to param.grad"
        last = np.mean([micros[step][-1][k] for micros in self.micros], axis=0)
        if len(self.setting.uses[step]) > 1 and matches(got, last):
            return "param.grad is the mean of only the last micro-batch: those under no_sync are missing"
        return ""
