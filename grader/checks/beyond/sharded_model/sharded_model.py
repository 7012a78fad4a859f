"""Runs a student's sharded model on drawn gradients, and judges its losses, gradients, updates, and what is in memory.

Coefficients and permits are drawn for each rank alone (sharded_model_reference), so after the first step no rank can
know what the others' shards hold: it has to gather them, and the broker sees when.
"""

from dataclasses import asdict
from typing import Any

import numpy as np

from grader import crashes
from grader.arithmetic import difference, matches
from grader.checks import reference
from grader.checks.beyond.sharded_model import memory_limits
from grader.checks.beyond.sharded_model.sharded_model_reference import Reference, TrainedStep
from grader.checks.beyond.sharded_model.sharded_model_settings import BEGIN, ModelSetting
from grader.compare import forgotten_waits
from grader.grading import Grade
from grader.ranks.outcome import Result
from grader.session import DEADLINE
from grader.verdicts import Crashed, Deadlocked, Verdict

SLACK, HALF_SLACK = 5.0, 3000.0  # of reference.close; for bfloat16
WITHOUT_GRADIENTS = "without gradients no backward follows, so free the last block, too (torch.is_grad_enabled)"
WORDS_OF_CRASHES = {
    "computes in backward while": "the block that backward needs is not in memory: before_backward must wait for it. "
    "If a block was freed after forward, gather it again; send a block only when its last gradient is ready",
    "was freed while": "a block is freed while its gather is in transit: wait for block i before it computes, and "
    "gather only the block that is needed next",
    "computes in forward while": "the block that forward needs is not in memory: before_forward must wait for it",
    "beyond/flat_parameters.py": "a freed parameter is laid out flat again: parameters_by_block must return each "
    "parameter once; parameters that several blocks share belong to the root",
    "KeyError": "a parameter was taken out of `missing` twice: finish must reset `missing` to all parameters",
    "'NoneType' object has no attribute 'wait'": "wait() is called on a handle that is None: store the handle of every "
    "message, and receive it once",
}


class ModelRun:
    """One run of a setting, and what is right for it."""

    def __init__(self, grade: Grade, world_size: int, setting: ModelSetting) -> None:
        self.grade, self.setting, self.n = grade, setting, world_size
        self.right = Reference(setting, world_size, grade.seed)
        self._told = asdict(setting) | {
            "dtypes": [setting.dtype(k) for k in range(len(setting.shapes))],
            "uses": setting.uses(), "groups": setting.groups(), "micros": list(setting.micros),
            "evaluate": list(setting.evaluate),
        }  # fmt: skip
        for name in ("begin", "end", "unused"):
            self._told.pop(name)
        self.result = self.run(0)
        if verdict := grade.verdict(self.result):
            raise self._explained(verdict)

    def run(self, attempt: int) -> Result:
        """Make the run; another number makes it again."""
        deadline = memory_limits.MEASURED_DEADLINE if self.setting.measures else DEADLINE
        return self.grade.run(
            "grader.probes.beyond.sharded_model:train", self.n, deadline, payloads=not self.setting.measures,
            each=[drawn.mine | {"values": self.right.values} for drawn in self.right.drawn],
            later=[drawn.permits for drawn in self.right.drawn], attempt=attempt, **self._told,
        )  # fmt: skip

    def name(self, block: int) -> str:
        return f"block {block}" if block < self.setting.depth else "the root"

    def fail(self, cause: str, text: str) -> None:
        self.grade.fail(f"{cause}\n{text}" if cause else text)

    def _explained(self, verdict: Verdict) -> Verdict:
        """The run's words, with the reason before them."""
        if isinstance(verdict, Crashed):
            return Crashed(crashes.explained(str(verdict), WORDS_OF_CRASHES))
        return Deadlocked(f"{self._why_stuck()}{verdict}") if isinstance(verdict, Deadlocked) else verdict

    def _why_stuck(self) -> str:
        """A line that says why no rank can continue; "" if it is no known mistake."""
        ranks = self.result.ranks
        behind = [rank for rank in ranks if rank.rank == self.setting.late and rank.call and rank.call.name == "recv"]
        waits = [rank for rank in ranks if rank.call and rank not in behind and rank.call.name != "send"]
        if behind and waits and (call := waits[0].call):
            who = f"rank {waits[0].rank} waits for {call.name} #{call.number} ({call.where})"
            if call.name == "all_gather":
                return (
                    f"{who} before the block needs it: start the gather of the next block, and wait just before that "
                    "block computes\n"
                )
            return (
                f"{who} while backward still has gradients to compute: a gradient hook must not wait for what it has "
                "just sent; receive it when the next block is complete\n"
            )
        return ""

    # --- values ---

    def check_losses(self) -> None:
        """Every forward computes with the values that all ranks have together; also without gradients."""
        for s, step in enumerate(self.right.steps):
            for rank, steps in enumerate(self.result.values):
                for micro, got in enumerate(steps[s]["losses"]):
                    self._check_loss(f"step {s}, micro-batch {micro}", rank, got, step.losses[rank][micro])
                if s in self.setting.evaluate:
                    got = steps[s]["evaluation"]
                    self._check_loss(f"the evaluation after step {s}", rank, got, step.evaluation[rank])

    def _check_loss(self, when: str, rank: int, got: Any, right: float) -> None:
        slack = 2e-2 if self.setting.dtypes else 2e-5
        if not (np.shape(got) == () and got is not None and abs(float(got) - right) <= slack * (1 + abs(right))):
            self.fail(
                forgotten_waits(self.result),
                f"{when}: the loss on rank {rank} is {float(got) if np.shape(got) == () else got}, expected {right:.6g}"
                ": the blocks do not compute with the parameters that the shards of all ranks hold together",
            )

    def check_local_gradients(self) -> None:
        """Backward computes with the whole parameters: a gradient depends on their values."""
        for s, step in enumerate(self.right.steps):
            for rank, steps in enumerate(self.result.values):
                for micro, arrays in enumerate(steps[s]["local"]):
                    for place, k in self.setting.uses():
                        got, right = arrays[k], step.own[rank][micro][k]
                        if k in self.setting.frozen or got is True:
                            continue
                        slack = HALF_SLACK if self.setting.dtype(k) == "bfloat16" else SLACK
                        if not reference.close(got, right, 0.0, slack):
                            words = difference(f"parameter {k}", got, right)
                            self.fail(
                                forgotten_waits(self.result),
                                f"step {s}: on rank {rank}, backward of {self.place(place)} does not compute with the "
                                f"whole parameters: its gradient is wrong; {words}",
                            )

    def place(self, place: int) -> str:
        return f"block {place}" if BEGIN < place < self.setting.depth else "the root"

    def check_gradients(self) -> None:
        """After finish every shard has the mean gradient of all ranks, in fp32, and parameters have none."""
        for s, step in enumerate(self.right.steps):
            for rank, steps in enumerate(self.result.values):
                if steps[s]["left"]:
                    self.grade.fail(
                        f"step {s}: parameter {steps[s]['left'][0]} still has a gradient after finish on rank {rank}: "
                        "take_gradients sets them to None, and the shard has the mean"
                    )
                for block in range(self.setting.depth + 1):
                    self._check_gradient(s, step, rank, block, steps[s]["gradients"][block])

    def _check_gradient(self, s: int, step: TrainedStep, rank: int, block: int, got: Any) -> None:
        right = self.right.flat(step.gradients, block)[rank]
        slack = HALF_SLACK if self.right.half(block) else SLACK
        total = reference.norm({str(k): gradient for k, gradient in enumerate(step.gradients)})
        if reference.close(got, right, total, slack):
            return
        where = f"step {s}: on rank {rank}, shard.gradient of {self.name(block)}"
        if got is None or np.shape(got) != right.shape:
            found = "None" if got is None else f"the shape {np.shape(got)}"
            self.grade.fail(f"{where} is {found}, expected {right.shape}: the mean of this rank's shard over all ranks")
        cause = forgotten_waits(self.result) or self._cause(s, step, rank, block, got)
        self.fail(cause, f"{where} is wrong: {difference('the shard', got, right)}")

    def _cause(self, s: int, step: TrainedStep, rank: int, block: int, got: Any) -> str:
        """A known mistake that leaves this gradient."""
        flat, n = self.right.flat, self.n
        right = flat(step.gradients, block)[rank]
        micros = [
            np.mean([flat(ranks[micro], block)[rank] for ranks in step.own], axis=0)
            for micro in range(self.setting.micros[s])
        ]
        own = np.sum([flat(micro, block) for micro in step.own[rank]], axis=0)
        candidates = {
            "shard.gradient is only that of the last micro-batch: add to shard.gradient, which may be None": micros[-1],
            f"shard.gradient is the sum over {n} ranks: divide it by the number of ranks, once": right * n,
            "the sum was divided by the number of ranks twice": right / n,
            "shard.gradient is this rank's own gradient: nothing was summed": own[rank],
            "shard.gradient is the first shard of this rank's gradient: which rows belong to this rank?": own[0],
            "the gradient is zero: were the gradients taken before they were set to None?": right * 0,
        }
        for other in range(n):
            if other != rank:
                candidates[f"shard.gradient is the shard of rank {other}"] = flat(step.gradients, block)[other]
        if s:
            old = flat(self.right.steps[s - 1].gradients, block)[rank]
            candidates["the gradient of the step before is added to shard.gradient"] = right + old
        with np.errstate(all="ignore"):
            found = [words for words, value in candidates.items() if matches(got, np.asarray(value, np.float64))]
        return found[0] if found else ""

    def check_updates(self) -> None:
        """After a step every shard has moved as the optimizer moves the whole model, in fp32."""
        first = self.right.steps[0].before
        for s, step in enumerate(self.right.steps):
            for rank, steps in enumerate(self.result.values):
                for block in range(self.setting.depth + 1):
                    self._check_update(s, rank, block, first, step.after, steps[s])

    def _check_update(self, s: int, rank: int, block: int, first: Any, after: Any, told: dict) -> None:
        got, dtype = told["values"][block], told["dtypes"][block]
        if dtype != "float32":
            self.grade.fail(f"the shard of {self.name(block)} is of {dtype}, expected float32")
        begin, right = self.right.flat(first, block)[rank], self.right.flat(after, block)[rank]
        shift = None if got is None or np.shape(got) != right.shape else np.asarray(got, np.float64) - begin
        slack = HALF_SLACK if self.right.half(block) else SLACK
        if not reference.close(shift, right - begin, float(np.linalg.norm(right)), slack):
            words = difference("the shard", got, right)
            self.grade.fail(f"after step {s}, the values of {self.name(block)} on rank {rank} are wrong: {words}")

    # --- what is in memory ---

    def check_freed(self, evaluation: bool = False) -> None:
        """Between steps no parameters of a block are in memory; and none after an evaluation."""
        for s in range(len(self.setting.micros)):
            for rank, steps in enumerate(self.result.values):
                after = f"after the evaluation after step {s}" if evaluation else f"after step {s}"
                for block, size in enumerate(steps[s].get("held after evaluation" if evaluation else "held", [])):
                    if size:
                        self.grade.fail(
                            f"{after}, {self.name(block)} still has {size} bytes of parameters in memory on rank {rank}"
                            ": " + (WITHOUT_GRADIENTS if evaluation else "free a block when its gradients are complete")
                        )

    def check_held(self) -> None:
        """While a block computes, only it and the next one are in memory, and the root."""
        depth = self.setting.depth
        for s in range(len(self.setting.micros)):
            for rank, steps in enumerate(self.result.values):
                for now, direction, place, held in steps[s]["seen"]:
                    ahead = place + (1 if direction == "forward" else -1)
                    if place == BEGIN and direction == "backward":
                        ahead = BEGIN
                    allowed = {place, ahead, depth}
                    if direction == "forward" and place == depth and not now.endswith("evaluation"):
                        allowed |= {depth - 1}
                    for block, size in enumerate(held):
                        if size and block not in allowed:
                            self._fail_held(now, direction, place, block, rank)

    def _fail_held(self, now: str, direction: str, place: int, block: int, rank: int) -> None:
        done = block < place if direction == "forward" else block > place
        words = (
            f"block {block} is done: free it" if done else f"block {block} is not needed yet: gather only the next one"
        )
        if done and direction == "forward" and block == self.setting.depth - 1:
            words = WITHOUT_GRADIENTS
        if done and direction == "backward":
            words = "its gradients are complete: free it when they are sent"
        step, _, micro = now.partition(" ")
        when = f"step {step}" if micro != "evaluation" else f"the evaluation after step {step}"
        self.grade.fail(
            f"{when}: while {self.place(place)} computes in {direction}, the parameters of block {block} are in memory "
            f"on rank {rank}: {words}"
        )
