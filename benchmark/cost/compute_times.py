"""How long a worker computes: interpolated between calibrated batch sizes, extrapolated by arithmetic.

A model that was not calibrated takes the times of one that was, scaled: every block has a part that does not depend on
its size (Python, the start of operators) and a part in proportion to its multiplications.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist

from benchmark.cost.architecture import Architecture, describe
from benchmark.cost.calibration import Calibration, Profile
from benchmark.cost.collective_times import interpolate
from common.errors import InputError


@dataclass(frozen=True)
class Cores:
    """Where workers compute: all on this machine (own is None), or each on a machine with `own` cores."""

    workers: int
    own: int | None = None


class ComputeTimes:
    """Seconds of the parts of a step. notes: what was extrapolated."""

    def __init__(self, calibration: Calibration, architecture: Architecture, cores: Cores) -> None:
        if not calibration.profiles or not calibration.small:
            raise InputError("--calibration has no times of any model; run python -m benchmark.calibrate")
        self.architecture, self.cores = architecture, cores
        self.notes: dict[str, None] = {}
        self.machine_cores = int(calibration.machine["cores"])
        self.scale = 1.0
        own = [p for p in calibration.profiles if (p.model, p.length) == (architecture.model, architecture.length)]
        self.reference = architecture if own else self._nearest(calibration)
        same = (self.reference.model, self.reference.length)
        known = [p for p in calibration.profiles if (p.model, p.length) == same]
        self.profiles = self._of_crowd(known)
        self.spreads = [p for p in known if p.workers > 1]
        self.small = min(calibration.small, key=lambda entry: abs(entry.workers - self.profiles[0].workers))

    def _nearest(self, calibration: Calibration) -> Architecture:
        """The calibrated model that is most like this one: of the same kind, as large as possible."""
        known = {(p.model, p.length): describe(p.model, p.length) for p in calibration.profiles}
        mine = self.architecture

        def apart(other: Architecture) -> tuple[bool, float]:
            return other.kind != mine.kind, abs(math.log(other.elements * other.length / mine.elements / mine.length))

        found = min(known.values(), key=apart)
        self.notes[f"{mine.model} with {mine.length} tokens was not calibrated: scaled from {found.model}"] = None
        return found

    def _of_crowd(self, profiles: list[Profile]) -> list[Profile]:
        """The profiles of as many workers as share the cores, by batch; sets the factor for another number."""
        counts = sorted({profile.workers for profile in profiles})
        wanted = 1 if self.cores.own else self.cores.workers
        count = wanted if wanted in counts else max((c for c in counts if c <= wanted), default=counts[0])
        if self.cores.own:
            self.scale = self._of_own_cores(profiles, count)
        elif count != wanted:
            crowded = [max(1.0, c / self.machine_cores) for c in (wanted, count)]
            self.scale = crowded[0] / crowded[1]
            self.notes[f"{wanted} workers that share this machine's cores are extrapolated from {count}"] = None
        return sorted((p for p in profiles if p.workers == count), key=lambda profile: profile.batch)

    def _of_own_cores(self, profiles: list[Profile], count: int) -> float:
        """A step's time with the worker's own cores over the calibrated one: one part of it divides among cores."""
        base = [p for p in profiles if p.workers == count]
        cores, own = base[0].threads, self.cores.own or 1
        if own == cores:
            return 1.0
        self.notes[f"{own} cores of a worker are extrapolated from {cores}"] = None
        batch = base[-1].batch
        one = [p.seconds for p in profiles if p.threads == 1 and p.batch == batch]
        if not one or cores == 1:
            return cores / own
        divided = max(0.0, one[0] - base[-1].seconds) * cores / (cores - 1)
        fixed = max(0.0, one[0] - divided)
        return (fixed + divided / own) / (fixed + divided / cores)

    @property
    def threads(self) -> int:
        """Threads of one worker."""
        return self.cores.own or self.profiles[0].threads

    def step(self, batch: float) -> Profile:
        """Return the parts of a step with `batch` examples of one worker."""
        low, high = self.profiles[0].batch, self.profiles[-1].batch
        if not low <= batch <= high:
            self.notes[f"a batch of {batch:g} is extrapolated from {low} to {high}"] = None
        found = self._at(batch)
        if self.reference is not self.architecture:
            found = self._scaled(batch)
        return combined([found], lambda values: self.scale * values[0])

    def _at(self, batch: float) -> Profile:
        batches = [profile.batch for profile in self.profiles]

        def at(values: list[float]) -> float:
            low = values[0] * batch / batches[0] if len(values) == 1 else _line(batches, values, batch)
            return max(0.0, low)

        return combined(self.profiles, at)

    def _scaled(self, batch: float) -> Profile:
        """The step of a model that was not calibrated, from the reference's."""
        reference, mine = self.reference, self.architecture
        smallest, largest = self._at(self.profiles[0].batch), self._at(self.profiles[-1].batch)
        low, high = self.profiles[0].batch, self.profiles[-1].batch
        forward = {}
        for unit, flops in mine.flops.items():
            same = [name for name in reference.flops if name.split()[0] == unit.split()[0]]
            few, many = (sum(p.forward[name] for name in same) / len(same) for p in (smallest, largest))
            work = sum(reference.flops[name] for name in same) / len(same)
            size = flops / work if work else mine.width * mine.length / (reference.width * reference.length)
            slope = (many - few) / (high - low) if high > low else few / low
            fixed = min(max(0.0, few - slope * low), few)
            forward[unit] = fixed + max(slope, (many - fixed) / high) * size * batch
        back = sum(largest.backward.values()) + largest.tail
        ratio = back / sum(largest.forward.values())
        backward = _spread_backward(mine, {unit: ratio * seconds for unit, seconds in forward.items()})
        optimizer = self._per_tensor() * len(mine.weights) + self._flat(mine.elements)
        relative = largest.spread / largest.seconds
        whole = sum(forward.values()) * (1 + ratio) + optimizer
        return replace(
            largest, model=mine.model, length=mine.length, forward=forward, backward=backward, tail=0.0,
            optimizer=optimizer, spread=relative * whole,
        )  # fmt: skip

    def late(self, batch: float, workers: int) -> float:
        """Return by how much the slowest of so many workers is later than the mean of all.

        The spread of the measured ones, as the largest of normally distributed times grows with their number.
        """
        if workers < 2 or not self.spreads:
            return 0.0
        step, measured = self.step(batch), self.profiles[0].workers
        share = step.spread / step.seconds
        if measured == 1:
            nearest = min(self.spreads, key=lambda p: (p.workers, abs(p.batch - batch)))
            share, measured = nearest.spread / nearest.seconds, nearest.workers
        return step.seconds * share * largest_of(workers) / largest_of(measured)

    # ------------------------------------------------------------------- the optimizer, and small things

    def update(self, tensors: float, elements: float) -> float:
        """Return the seconds of clipping, AdamW and zero_grad for so many tensors with so many elements together."""
        # One large tensor costs more than many small ones where its temporary memory is new for every operation.
        whole = self.profiles[-1].optimizer * elements / self.reference.elements
        return self.scale * (self._per_tensor() * tensors + min(self._flat(elements), whole))

    def _flat(self, elements: float) -> float:
        sizes = sorted(self.small.flat)
        return max(0.0, interpolate(sizes, [self.small.flat[size] for size in sizes], elements))

    def _per_tensor(self) -> float:
        found = self.profiles[-1].optimizer - self._flat(self.reference.elements)
        return max(0.0, found) / len(self.reference.weights)

    def copies(self, size: float, passes: float = 1.0) -> float:
        """Return the seconds in which `size` bytes are read and written so many times."""
        return self.scale * self.small.copy_byte * size * passes


def largest_of(count: int) -> float:
    """Return how many standard deviations the largest of so many normally distributed numbers is above their mean."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))  # Blom 1958


def combined(profiles: list[Profile], figure: Callable[[list[float]], float]) -> Profile:
    """Return a profile of which every figure is made from the same figures of these profiles."""

    def each(name: str) -> dict[str, float]:
        parts = [getattr(profile, name) for profile in profiles]
        return {key: figure([part.get(key, 0.0) for part in parts]) for key in parts[0]}

    def one(name: str) -> float:
        return figure([getattr(profile, name) for profile in profiles])

    return replace(
        profiles[0], forward=each("forward"), backward=each("backward"), tail=one("tail"),
        optimizer=one("optimizer"), spread=one("spread"),
    )  # fmt: skip


def _line(places: list[int], values: list[float], place: float) -> float:
    """Interpolate; below the first place, the line of the first two goes on."""
    if place < places[0]:
        return values[0] + (values[1] - values[0]) / (places[1] - places[0]) * (place - places[0])
    return interpolate(places, values, place)


def _spread_backward(architecture: Architecture, seconds: dict[str, float]) -> dict[str, float]:
    """Divide the backward time of units among their parameters; what comes after the blocks goes to the first one."""
    found: dict[str, float] = {}
    carried = seconds["after"]
    for block in reversed(range(architecture.n_blocks)):
        weights = architecture.of_block(block)
        count = sum(weight.elements for weight in weights)
        for weight in reversed(weights):
            found[weight.name] = carried + seconds[f"block {block}"] * weight.elements / count
            carried = 0.0
    for weight in reversed(architecture.of_block(None)):
        found[weight.name] = seconds["before"] / len(architecture.of_block(None))
    return found
