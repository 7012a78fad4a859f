"""What a toy of sharded blocks comes to, in numpy: losses, gradients, and what each rank keeps of each block.

A loss is the sum of weight * weight * coefficient / 2 over the uses, and of the permits of forward. The gradient of a
use is weight * coefficient * permit. beyond/flat_parameters.py says how a block is laid out flat.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from grader.checks.beyond.sharded_model.sharded_model_settings import BEGIN, ModelSetting
from grader.wire import drawn as draws
from grader.wire.values import to_array, to_bytes

LARGE = 1 << 16  # elements: such a parameter has one value and one coefficient
Arrays = list[np.ndarray]


@dataclass
class Drawn:
    """What one rank is given: coefficients [step][micro-batch][use], evaluations [step][use], moves [step][block]."""

    coefficients: list[list[Arrays]] = field(default_factory=list)
    evaluations: list[Arrays] = field(default_factory=list)
    moves: list[Arrays] = field(default_factory=list)
    permits: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def mine(self) -> dict:
        return {"coefficients": self.coefficients, "evaluations": self.evaluations, "moves": self.moves}


@dataclass
class TrainedStep:
    """One step of all ranks: losses [rank][micro-batch], own gradients [rank][micro-batch][parameter].

    before, after: the values of every parameter. gradients: the sum of the micro-batches' means. evaluation: [rank]
    """

    before: Arrays
    losses: list[list[float]]
    own: list[list[Arrays]]
    gradients: Arrays
    after: Arrays
    evaluation: list[float]


class Reference:
    """Draws a setting's inputs for every rank, and computes its steps."""

    def __init__(self, setting: ModelSetting, world_size: int, seed: int) -> None:
        self.setting, self.n, self.seed = setting, world_size, seed
        self.groups = setting.groups()
        shared = draws.generator(seed, 21)
        self.values: Arrays = []
        for k, shape in enumerate(setting.shapes):
            size = () if int(np.prod(shape)) >= LARGE else tuple(shape)
            value = np.asarray(shared.uniform(0.5, 1.5, size=size), np.float32)
            self.values.append(np.asarray(rounded(value, setting.dtype(k)), np.float32))
        self.drawn = [self._draw(rank) for rank in range(world_size)]
        self.steps: list[TrainedStep] = []  # none of a setting that measures: it is large, and looked at for its memory
        if setting.measures:
            return
        full = [np.broadcast_to(value, shape) for value, shape in zip(self.values, setting.shapes, strict=True)]
        self._run([np.asarray(value, np.float64) for value in full])

    def _draw(self, rank: int) -> Drawn:
        setting, draw, drawn = self.setting, draws.generator(self.seed, 22, self.n, rank), Drawn()

        def coefficients() -> Arrays:
            shapes = [setting.shapes[k] for _, k in setting.uses()]
            sizes = [() if int(np.prod(shape)) >= LARGE else shape for shape in shapes]
            return [np.asarray(draw.uniform(0.2, 1.0, size=size) * draw.choice([-1, 1], size=size)) for size in sizes]

        def permits(name: str, uses: int) -> None:
            keys = [f"{name} forward {place}" for place in range(BEGIN, setting.depth + 1)]
            for key in [*keys, *(f"{name} backward {use}" for use in range(uses))]:
                drawn.permits[key] = np.asarray(draw.integers(16, 48) / 16)

        for step, micros in enumerate(setting.micros):
            drawn.coefficients.append([coefficients() for _ in range(micros)])
            drawn.evaluations.append(coefficients())
            for micro in range(micros):
                permits(f"{step} {micro}", len(setting.uses()))
            permits(f"{step} evaluation", 0)
            lengths = [self.length(block) for block in range(setting.depth + 1)]
            moves = [draw.normal(size=length if length < LARGE else 1) / 4 for length in lengths]
            for block, move in enumerate(moves):
                if move.size == lengths[block]:
                    move[self.in_shard(block, rank) :] = 0  # what fills up the last shard stays zero
            drawn.moves.append([np.asarray(move, np.float32) for move in moves])
        return drawn

    # --- the layout ---

    def order(self, block: int) -> list[int]:
        """The parameters of a block (the root is the last) as they are laid out flat: matrices first."""
        return sorted(self.groups[block], key=lambda k: len(self.setting.shapes[k]) < 2)

    def length(self, block: int) -> int:
        """Elements of one shard."""
        return -(-self.size(block) // self.n)

    def size(self, block: int) -> int:
        """Elements of a block's parameters."""
        return sum(int(np.prod(self.setting.shapes[k])) for k in self.groups[block])

    def in_shard(self, block: int, rank: int) -> int:
        """Elements of parameters in a rank's shard; the rest of it fills up the block."""
        return min(max(self.size(block) - rank * self.length(block), 0), self.length(block))

    def flat(self, arrays: Sequence[np.ndarray], block: int) -> np.ndarray:
        """(ranks, length of a shard): the parameters of a block one after the other, and zeros at the end."""
        parts = [np.ravel(arrays[k]) for k in self.order(block)]
        whole = np.concatenate([*parts, np.zeros(self.n * self.length(block) - sum(map(len, parts)))])
        return whole.reshape(self.n, -1)

    def bytes(self, block: int) -> int:
        """Bytes of a block in its own dtype, the zeros at the end included."""
        return self.n * self.length(block) * (2 if self.half(block) else 4)

    def half(self, block: int) -> bool:
        return self.setting.dtype(self.groups[block][0]) == "bfloat16"

    # --- the steps ---

    def _run(self, values: Arrays) -> None:
        buffers: Arrays | None = None
        for step in range(len(self.setting.micros)):
            whole = [rounded(value, self.setting.dtype(k)) for k, value in enumerate(values)]
            micros = range(self.setting.micros[step])
            names = [f"{step} {micro}" for micro in micros]
            losses = [[self._loss(rank, whole, name, step, micro) for micro, name in enumerate(names)]
                      for rank in range(self.n)]  # fmt: skip
            own = [[self._own(rank, whole, name, step, micro) for micro, name in enumerate(names)]
                   for rank in range(self.n)]  # fmt: skip
            sums = [[np.sum([micro[k] for micro in ranks], axis=0) for ranks in own] for k in range(len(values))]
            gradients: Arrays = [np.asarray(np.mean(ranks, axis=0)) for ranks in sums]
            before = values
            if self.setting.finish:
                values, buffers = self._stepped(values, gradients, buffers)
            else:
                values = self._moved(values, step)
            after = [rounded(value, self.setting.dtype(k)) for k, value in enumerate(values)]
            evaluation = [self._loss(rank, after, f"{step} evaluation", step, None) for rank in range(self.n)]
            self.steps.append(TrainedStep(before, losses, own, gradients, values, evaluation))

    def _loss(self, rank: int, whole: Arrays, name: str, step: int, micro: int | None) -> float:
        drawn = self.drawn[rank]
        coefficients = drawn.evaluations[step] if micro is None else drawn.coefficients[step][micro]
        total = sum(float(drawn.permits[f"{name} forward {place}"]) for place in range(BEGIN, self.setting.depth + 1))
        for (_, k), coefficient in zip(self.setting.uses(), coefficients, strict=True):
            total += float((np.square(whole[k]) * coefficient).sum()) / 2
        return total

    def _own(self, rank: int, whole: Arrays, name: str, step: int, micro: int) -> Arrays:
        own = [np.zeros(shape) for shape in self.setting.shapes]
        coefficients = self.drawn[rank].coefficients[step][micro]
        for number, ((_, k), coefficient) in enumerate(zip(self.setting.uses(), coefficients, strict=True)):
            if k not in self.setting.frozen:
                own[k] += whole[k] * coefficient * float(self.drawn[rank].permits[f"{name} backward {number}"])
        return own

    def _stepped(self, values: Arrays, gradients: Arrays, buffers: Arrays | None) -> tuple[Arrays, Arrays]:
        """torch's SGD with momentum; matrices decay."""
        setting = self.setting
        found = [g + setting.decay * v * (v.ndim >= 2) for g, v in zip(gradients, values, strict=True)]
        if buffers is not None:
            found = [setting.momentum * b + g for b, g in zip(buffers, found, strict=True)]
        stepped = [v - setting.rate * b for v, b in zip(values, found, strict=True)]
        return [v if k in setting.frozen else stepped[k] for k, v in enumerate(values)], found

    def _moved(self, values: Arrays, step: int) -> Arrays:
        moved = list(values)
        for block in range(self.setting.depth + 1):
            moves = [self.drawn[rank].moves[step][block] for rank in range(self.n)]
            flat = np.concatenate([np.broadcast_to(move, self.length(block)) for move in moves])
            begin = 0
            for k in self.order(block):
                moved[k] = values[k] + flat[begin : begin + values[k].size].reshape(values[k].shape)
                begin += values[k].size
        return moved


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """As numbers of this dtype, in float64."""
    if dtype == "bfloat16":
        array = to_array(dtype, list(np.shape(array)), to_bytes(np.asarray(array, np.float32), dtype))
    return np.asarray(array, np.float64)
