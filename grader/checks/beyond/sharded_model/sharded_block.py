"""Judges one sharded block: the shard that a rank keeps, gathering the whole, and giving its memory up."""

from typing import Any

import numpy as np

from grader import crashes
from grader.arithmetic import difference, matches
from grader.checks import reference
from grader.checks.beyond.sharded_model.sharded_model_reference import rounded
from grader.compare import forgotten_waits
from grader.grading import Grade
from grader.ranks.calls import Call
from grader.ranks.outcome import RankResult, Result
from grader.verdicts import Crashed, Deadlocked
from grader.wire import drawn as draws
from grader.wire.values import Fields

CASES = (
    {"shapes": [[3, 4], [5], [2, 2]], "dtype": "float32"},  # matrices do not come first, as they do in flat.values
    {"shapes": [[7], [1]], "dtype": "float32"},
    {"shapes": [[4, 6]], "dtype": "float32"},  # divides evenly
    {"shapes": [[5, 3], [2]], "dtype": "bfloat16"},
    {"shapes": [[640, 1024]], "dtype": "float32"},
)
FEW = CASES[:4]
WORDS_OF_CRASHES = {
    "split_with_sizes expects": "a shard is only this rank's part: `own` has flat.shard_length elements",
    "all_gather needs an output": "flat.values has no elements any more: in free, resize only its storage",
    "setStorage": "the storage of flat.values has no memory: resize it to nbytes before the gather",
}


class Gathered:
    """One run of the cases, with the shards that are right."""

    def __init__(self, grade: Grade, world_size: int, cases: tuple[dict, ...] = FEW, late: int | None = None) -> None:
        self.grade, self.n, self.cases = grade, world_size, cases
        shared = draws.generator(grade.seed, 31)
        self.values = [
            [np.asarray(rounded(shared.normal(size=shape), case["dtype"]), np.float32) for shape in case["shapes"]]
            for case in cases
        ]
        self.moves = [self._moves(draws.generator(grade.seed, 32, world_size, rank)) for rank in range(world_size)]
        self.result: Result = grade.run(
            "grader.probes.beyond.sharded_model:block", world_size, payloads=True, cases=list(cases),
            late=late, each=[{"moves": moves, "values": self.values} for moves in self.moves],
        )  # fmt: skip
        verdict = grade.verdict(self.result)
        if isinstance(verdict, Deadlocked):
            raise Deadlocked(f"{self._why_stuck(late)}{verdict}")
        if isinstance(verdict, Crashed):
            raise Crashed(crashes.explained(str(verdict), WORDS_OF_CRASHES))
        if verdict:
            raise verdict

    def _moves(self, draw: np.random.Generator) -> list[list[np.ndarray]]:
        sizes = [self.length(case) if self.length(case) < 1 << 12 else 1 for case in range(len(self.cases))]
        moves = [[np.asarray(draw.normal(size=size), np.float32) for _ in range(2)] for size in sizes]
        return [[np.broadcast_to(m, self.length(case)).copy() for m in pair] for case, pair in enumerate(moves)]

    def length(self, case: int) -> int:
        return -(-sum(int(np.prod(shape)) for shape in self.cases[case]["shapes"]) // self.n)

    def _why_stuck(self, late: int | None) -> str:
        for rank in self.result.ranks:
            if rank.rank != late and rank.call and rank.call.name == "all_gather":
                where = f"rank {rank.rank} waits in start_gather ({rank.call.where})"
                return f"{where}: start_gather must return at once; only wait() waits\n"
        return ""

    def shards(self, case: int, moved: int) -> np.ndarray:
        """(ranks, length): what the ranks keep after so many moves, in float64."""
        order = sorted(range(len(self.values[case])), key=lambda k: self.values[case][k].ndim < 2)
        flat = np.concatenate([self.values[case][k].ravel() for k in order])
        whole = np.concatenate([flat, np.zeros(self.n * self.length(case) - flat.size)]).reshape(self.n, -1)
        for rank in range(self.n):
            for move in self.moves[rank][case][:moved]:
                whole[rank] += move
        return np.asarray(whole, np.float64)

    # --- judging ---

    def check_shards(self) -> None:
        """After __init__: the shard is a copy of the right part, in fp32, and the rest is freed."""
        for rank in range(self.n):
            for case in range(len(self.cases)):
                told = self.result.values[rank][case]
                self._check_shard(rank, case, told)
                self._check_states(rank, case, told["states"][:1])

    def check(self) -> None:
        """All of it: gathering, what it sends, and what the parameters are then."""
        for rank in range(self.n):
            for case in range(len(self.cases)):
                told = self.result.values[rank][case]
                self._check_shard(rank, case, told)
                self._check_states(rank, case, told["states"])
                self._check_calls(rank, case)
                self._check_whole(rank, case, told["whole"])

    def where(self, rank: int, case: int) -> str:
        shapes = " ".join(str(tuple(shape)) for shape in self.cases[case]["shapes"])
        return f"a block of {self.cases[case]['dtype']} {shapes} on rank {rank} of {self.n}"

    def _check_shard(self, rank: int, case: int, told: Fields) -> None:
        where, right, got = self.where(rank, case), self.shards(case, 0), told["shard"]
        if got is None:
            self.grade.fail(
                f"{where}: the shard's memory was freed. `own` must be a copy: a view is freed with flat.values"
            )
        if np.shape(got) != right[rank].shape:
            self.grade.fail(f"{where}: the shard has the shape {np.shape(got)}, expected ({self.length(case)},)")
        if told["dtype"] != "float32":
            self.grade.fail(f"{where}: the shard is of {told['dtype']}, expected float32, whatever the block's dtype")
        if not reference.close(got, right[rank], 0.0):
            others = [other for other in range(self.n) if other != rank and matches(got, right[other])]
            cause = (
                f"`own` is the shard of rank {others[0]}: rank r owns the elements r L to (r+1) L; " if others else ""
            )
            self.grade.fail(f"{where}: {cause}{difference('the shard', got, right[rank])}")

    def _check_states(self, rank: int, case: int, states: list[list[Any]]) -> None:
        where, item = self.where(rank, case), 2 if self.cases[case]["dtype"] == "bfloat16" else 4
        whole = self.n * self.length(case) * item
        # after __init__, start_gather, wait, free, wait, free
        steps = ("__init__", "start_gather", "wait", "free", "wait without start_gather", "free")
        for step, (size, is_whole, gathering) in zip(steps, states, strict=False):
            here, going = step.startswith("wait"), step == "start_gather"
            expected = whole if here or going else 0
            if size != expected:
                advice = "resize its storage to nbytes" if expected else "resize its storage to 0 bytes"
                self.grade.fail(
                    f"{where}: after {step} the memory of flat.values has {size} bytes, expected {expected}: {advice}"
                )
            if is_whole != here:
                self.grade.fail(f"{where}: after {step} is_whole is {is_whole}, expected {here}")
            if gathering != going:
                text = "keep the handle of the all_gather in `gathering`" if going else "set `gathering` to None"
                self.grade.fail(f"{where}: after {step} gathering is {'not ' * gathering}None: {text}")

    def _check_whole(self, rank: int, case: int, found: list[list[Any]]) -> None:
        for number, got in enumerate(found):
            flat = self.shards(case, number + 1).ravel()
            begin = 0
            order = sorted(range(len(got)), key=lambda k: len(self.cases[case]["shapes"][k]) < 2)
            for k in order:
                shape = self.cases[case]["shapes"][k]
                right = rounded(flat[begin : begin + int(np.prod(shape))].reshape(shape), self.cases[case]["dtype"])
                begin += right.size
                slack = 600.0 if self.cases[case]["dtype"] == "bfloat16" else 1.0
                if not reference.close(got[k], right, 0.0, slack):
                    cause = forgotten_waits(self.result)
                    words = difference(f"parameter {k}", got[k], right)
                    text = (
                        f"{self.where(rank, case)}: after wait, the parameters are not the shards of all ranks; {words}"
                    )
                    self.grade.fail(f"{cause}\n{text}" if cause else text)

    def _check_calls(self, rank: int, case: int) -> None:
        where, half = self.where(rank, case), self.cases[case]["dtype"] == "bfloat16"
        segments = calls_between(self.result.ranks[rank])[case]
        rules = {
            "make": (0, "__init__ keeps a shard of local values: do not communicate"),
            "start": (1, "start_gather must start one all_gather"),
            "start again": (0, "a gather is in transit already: start_gather must do nothing"),
            "wait": (0, "the gather has been started: wait() must only wait for it"),
            "whole": (0, "the block is whole: start_gather and wait must do nothing"),
            "free": (0, "free must send nothing"),
            "wait 2": (1, "wait must start the gather if it has not been started"),
            "whole 2": (0, "the block is whole"),
            "free 2": (0, "free must send nothing"),
        }
        for name, (count, words) in rules.items():
            calls = segments.get(name, [])
            if len(calls) != count or any(call.name != "all_gather" for call in calls):
                got = ", ".join(f"{call.name} ({call.where})" for call in calls) or "no call"
                self.grade.fail(f"{where}: expected {'one all_gather' if count else 'no call'}, got {got}: {words}")
            for call in calls:
                moved = 1 if name == "start" else 2
                sent, right = call.sent_arrays().ravel(), self.shards(case, moved)[rank]
                if half and call.dtype != "bfloat16":
                    self.grade.fail(
                        f"{where}: the shard is sent in {call.dtype} ({call.where}), expected bfloat16, the dtype of "
                        "flat.values: that takes half as many bytes"
                    )
                if not reference.close(sent, right, 0.0, 600.0 if half else 1.0):
                    words = difference("the shard", sent, right)
                    self.grade.fail(f"{where}: the all_gather does not send shard.values ({call.where}); {words}")
                if name == "start" and not call.asynchronous:
                    self.grade.fail(f"{where}: start_gather waits ({call.where}): pass async_op=True to all_gather")


def calls_between(rank: RankResult) -> list[dict[str, list[Call]]]:
    """[case][name of the event before, with " 2" at its second time] -> calls"""
    found: list[dict[str, list[Call]]] = []
    name = ""
    for event in rank.events:
        if isinstance(event, Call):
            if event.name == "all_gather" or event.name not in ("send", "recv", "init_process_group", "barrier"):
                found[-1].setdefault(name, []).append(event)
        elif event.name != "given":
            if event.name == "make":
                found.append({})
            name = event.name if event.name not in found[-1] else f"{event.name} 2"
            found[-1][name] = []
    return found
