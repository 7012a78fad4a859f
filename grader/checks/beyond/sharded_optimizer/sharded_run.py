"""Runs a student's sharded optimizer on drawn gradients, and knows what every rank's shards must then hold.

As with the gradient reducer, the gradient of every use of a parameter is drawn for each rank and multiplied by a permit
that the grader gives when backward asks for it (probes.beyond.overlap). So the broker's order is evidence.
"""

from dataclasses import asdict, dataclass, field

import numpy as np

from grader import crashes
from grader.grading import Grade
from grader.ranks.calls import Call
from grader.ranks.outcome import Result
from grader.verdicts import Crashed, Deadlocked, Verdict
from grader.wire import drawn as draws
from grader.wire import tags
from grader.wire.values import Fields, to_array, to_bytes

PROBE = "grader.probes.beyond.sharded_optimizer"
ITEM = {"float32": 4, "bfloat16": 2}
WORDS_OF_CRASHES = {
    "split_with_sizes expects": "a shard is only this rank's part: its values and its gradient have "
    "flat.shard_length elements",
    "attempting to assign a gradient with dtype": "the values of a shard and its gradient are in float32, also for "
    "bfloat16 parameters",
    "assigned grad has data of": "the values of a shard and its gradient are in float32, also for bfloat16 parameters",
    "KeyError: Parameter": "a parameter was taken out of `missing` twice in one backward: only the hook may take "
    "it out, and finish() must put it back",
    "'NoneType' object has no attribute 'wait'": "receive() finds no handle: send() must store the handle in "
    "self.work, for a bucket without gradients, too; receive a bucket once, after it was sent, in the order of "
    "self.buckets",
    "torch.bfloat16 and (": "a message can have only one dtype: send this rank's shard in the dtype of flat.values",
    "torch.float32 and (": "a message can have only one dtype: send this rank's shard in the dtype of flat.values",
}
Uses = list[list[list[list[int]]]]  # [step][micro-batch][rank, the last for all above] -> parameters in forward order
Arrays = list[np.ndarray]


@dataclass(frozen=True)
class OptimizerSetting:
    """A toy, its blocks, and what every step uses. A parameter in several blocks, or in none, belongs to the root."""

    shapes: list[list[int]]
    blocks: list[list[int]]
    uses: Uses
    stage: int = 2
    dtypes: list[str] = field(default_factory=list)  # empty: float32
    frozen: list[int] = field(default_factory=list)
    tied: int | None = None
    late: int | None = None
    optimizer: str = "SGD"
    options: Fields = field(default_factory=lambda: {"lr": 0.1})
    weight_decay: float = 0.0
    limits: list[float | None] = field(default_factory=list)  # of clipping, for each step; empty: no clipping

    def of_rank(self, rank: int) -> list[list[list[int]]]:
        return [[kinds[min(rank, len(kinds) - 1)] for kinds in micros] for micros in self.uses]

    def dtype(self, k: int) -> str:
        return self.dtypes[k] if self.dtypes else "float32"

    def buckets(self) -> list[list[int]]:
        """The parameters of each bucket in their order: the last block first, the root last; matrices come first."""
        found: list[list[int]] = [[] for _ in range(len(self.blocks) + 1)]
        for k in range(len(self.shapes)):
            homes = [i for i, block in enumerate(self.blocks) if k in block]
            if k not in self.frozen:
                found[homes[0] if len(homes) == 1 else -1].append(k)
        ordered = [*found[-2::-1], found[-1]]
        return [sorted(bucket, key=lambda k: len(self.shapes[k]) < 2) for bucket in ordered if bucket]

    def flat(self, bucket: list[int], arrays: Arrays, n: int) -> np.ndarray:
        """The values of a bucket as one array of n rows, a shard for each rank; zeros at the end."""
        values = np.concatenate([np.ravel(arrays[k]).astype(np.float64) for k in bucket])
        return np.append(values, np.zeros(-values.size % n)).reshape(n, -1)


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """As a tensor of this dtype holds it, in float64."""
    return to_array(dtype, list(np.shape(array)), to_bytes(np.asarray(array, np.float32), dtype)).astype(np.float64)


class OptimizerRun:
    """One run of a setting, with each rank's own gradients: micros[rank][step][micro-batch][parameter]."""

    def __init__(self, grade: Grade, world_size: int, setting: OptimizerSetting, probe: str = "backward") -> None:
        self.grade, self.setting, self.n = grade, setting, world_size
        self.buckets = setting.buckets()
        self.micros: list[list[list[Arrays]]] = []
        self.initial = initial_values(grade, setting)
        each, later = zip(*(self._drawn(rank) for rank in range(world_size)), strict=True)
        told = described(setting) | {"micros": [len(micros) for micros in setting.uses]}
        self.result: Result = grade.run(
            f"{PROBE}:{probe}", world_size, payloads=True, each=list(each), later=list(later), **told
        )
        if verdict := grade.verdict(self.result):
            raise self._explained(verdict)

    def _drawn(self, rank: int) -> tuple[dict, dict[str, np.ndarray]]:
        """A rank's part of the inputs, and its permits; keeps its gradients in `micros`."""
        setting, uses, permits = self.setting, self.setting.of_rank(rank), {}
        draw = draws.generator(self.grade.seed, 15, self.n, rank)
        gradients: list[list[Arrays]] = []
        own: list[list[Arrays]] = []
        for step, micros in enumerate(uses):
            gradients.append([])
            own.append([])
            for micro, used in enumerate(micros):
                drawn = [np.asarray(draw.normal(size=setting.shapes[k]), np.float32) for k in used]
                gradients[-1].append(drawn)
                total = [np.zeros(shape) for shape in setting.shapes]
                for i, k in enumerate(used):
                    permit = np.asarray(draw.integers(16, 48) / 16, np.float32)  # exact in bfloat16
                    permits[f"{step} {micro} {i}"] = permit
                    if k not in setting.frozen:
                        dtype = setting.dtype(k)
                        gradient = rounded(permit * rounded(drawn[i], dtype), dtype)
                        total[k] = rounded(total[k] + gradient, dtype)
                own[-1].append(total)
        self.micros.append(own)
        return {"uses": uses, "gradients": gradients, "values": self.initial}, permits

    # --- what is right ---

    def sent(self, rank: int, step: int, micro: int) -> Arrays:
        """The gradients that a rank has when it sends those of a micro-batch: stage 1 adds them up on the rank."""
        if self.setting.stage == 2:
            return self.micros[rank][step][micro]
        total = [np.zeros(shape) for shape in self.setting.shapes]
        for gradients in self.micros[rank][step][: micro + 1]:
            total = [
                rounded(a + b, self.setting.dtype(k)) for k, (a, b) in enumerate(zip(total, gradients, strict=True))
            ]
        return total

    def rows(self, rank: int, step: int, micro: int, bucket: int) -> np.ndarray:
        """(n, L): what a rank has to send of a bucket, a shard for each rank."""
        return self.setting.flat(self.buckets[bucket], self.sent(rank, step, micro), self.n)

    def mean(self, step: int, micro: int, bucket: int) -> np.ndarray:
        """(n, L): the mean over all ranks after this micro-batch, of those before it in the step, too."""
        first = 0 if self.setting.stage == 2 else micro
        means = [
            np.mean([self.rows(rank, step, one, bucket) for rank in range(self.n)], axis=0)
            for one in range(first, micro + 1)
        ]
        return np.sum(means, axis=0)

    def bytes_of(self, bucket: int) -> int:
        """Of all ranks' shards together, in the parameters' dtype."""
        first = self.buckets[bucket][0]
        return self.setting.flat(self.buckets[bucket], self.initial, self.n).size * ITEM[self.setting.dtype(first)]

    # --- words ---

    def _explained(self, verdict: Verdict) -> Verdict:
        """Torch's or our words, with the reason before them."""
        if isinstance(verdict, Deadlocked):
            return Deadlocked(f"{self._why_stuck()}{verdict}")
        is_crash = isinstance(verdict, Crashed)
        return Crashed(crashes.explained(str(verdict), WORDS_OF_CRASHES)) if is_crash else verdict

    def _why_stuck(self) -> str:
        """A line that says why no rank can continue; "" if it is no known mistake."""
        ranks = self.result.ranks
        behind = [rank for rank in ranks if rank.rank == self.setting.late and rank.call and rank.call.name == "recv"]
        waits = [rank for rank in ranks if rank.call and rank not in behind]
        if behind and waits and (call := waits[0].call):
            return (
                f"rank {waits[0].rank} waits for {call.name} #{call.number} ({call.where}) while backward still has "
                "gradients to compute: a hook must not wait for what it has just sent; receive it when the next bucket "
                "is complete\n"
            )
        sent = [sum(map(students_call, rank.events)) for rank in ranks]
        least, most = sent.index(min(sent)), sent.index(max(sent))
        if sent[least] < sent[most]:
            return (
                f"rank {most} makes {sent[most]} calls, but rank {least} makes {sent[least]}: every rank must send all "
                "buckets in the same order; if several are complete, send all of them\n"
            )
        return ""


def initial_values(grade: Grade, setting: OptimizerSetting) -> Arrays:
    """The parameters' values at the start, the same on every rank."""
    draw = draws.generator(grade.seed, 16)
    values = [draw.normal(size=shape) for shape in setting.shapes]
    return [rounded(value, setting.dtype(k)).astype(np.float32) for k, value in enumerate(values)]


def described(setting: OptimizerSetting) -> Fields:
    """The arguments of the probes."""
    told = asdict(setting)
    del told["uses"]
    told["dtypes"] = [setting.dtype(k) for k in range(len(setting.shapes))]
    told["limits"] = setting.limits or [None] * len(setting.uses)
    return told


def students_call(event: object) -> bool:
    """Whether an event is a message of the student's, and neither the probe's own nor the join."""
    if not isinstance(event, Call) or event.name == "init_process_group":
        return False
    return not (event.point_to_point and event.tag == tags.OURS and event.shape == (1,))
