"""How long a worker computes: interpolated between calibrated batch sizes, extrapolated by arithmetic.

A model that was not calibrated takes the times of one that was, scaled: every block has a part that does not depend on
its size (Python, the start of operators) and a part in proportion to its multiplications.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from benchmark.cost.architecture import Architecture, describe
from benchmark.cost.calibration import Calibration, Profile, SmallCosts, interpolate
from benchmark.cost.cell import Cell
from common.errors import InputError

# As multiples of a copy of so many bytes. A larger model's gradients do not stay in the cache: writing them takes as
# long as three copies of them, found by comparing a measured large model with a scaled one. Adding a gradient to an
# earlier one reads two and writes one.
WRITTEN, ADDED = 3.0, 1.5


class ComputeTimes:
    """Seconds of the parts of a step. notes: what was extrapolated."""

    def __init__(self, calibration: Calibration, cell: Cell) -> None:
        if not calibration.profiles or not calibration.small:
            raise InputError("--calibration has no times of any model; run python -m benchmark.calibrate")
        architecture = describe(cell.model, cell.length)
        self.cell, self.architecture = cell, architecture
        self.notes: dict[str, None] = {}
        self.machine_cores = int(calibration.machine["cores"])
        self.scale = 1.0
        own = [p for p in calibration.profiles if (p.model, p.length) == (architecture.model, architecture.length)]
        self.reference = architecture if own else self._nearest(calibration)
        same = (self.reference.model, self.reference.length)
        known = [p for p in calibration.profiles if (p.model, p.length) == same]
        self.profiles = self._of_crowd(known)
        self.spreads = [p for p in known if p.workers > 1]
        self.small = self._of_small(calibration.small, self.profiles[0].workers)

    def _nearest(self, calibration: Calibration) -> Architecture:
        """The calibrated model that is most like this one: of the same kind, as large as possible."""
        calibrated = {(p.model, p.length): describe(p.model, p.length) for p in calibration.profiles}
        target = self.architecture

        def apart(other: Architecture) -> tuple[bool, float]:
            ratio = other.elements * other.length / target.elements / target.length
            return other.kind != target.kind, abs(math.log(ratio))

        nearest = min(calibrated.values(), key=apart)
        self.notes[f"{target.model} with {target.length} tokens was not calibrated: scaled from {nearest.model}"] = None
        return nearest

    def _of_crowd(self, profiles: list[Profile]) -> list[Profile]:
        """The profiles of as many workers as share the cores, by batch; sets the factor for another number."""
        wanted = 1 if self.cell.cores else self.cell.workers
        counts = sorted({profile.workers for profile in profiles})
        low = max((count for count in counts if count <= wanted), default=counts[0])
        high = min((count for count in counts if count >= wanted), default=counts[-1])
        few, many = ({p.batch: p for p in profiles if p.workers == count} for count in (low, high))
        pairs = [(few[batch], many[batch]) for batch in sorted(few) if batch in many]
        if self.cell.cores:
            self.scale = self._of_own_cores(profiles, low)
        elif wanted != low:
            self.notes[f"{wanted} workers that share this machine's cores are extrapolated from {low}"] = None
            if low < wanted < high and pairs:
                part = (wanted - low) / (high - low)
                between = [combined(pair, lambda values: values[0] + part * (values[1] - values[0])) for pair in pairs]
                return [replace(one, workers=wanted) for one in between]
            self.scale = max(1.0, wanted / self.machine_cores) / max(1.0, low / self.machine_cores)
        return [few[batch] for batch in sorted(few)]

    def _of_small(self, known: list[SmallCosts], workers: int) -> SmallCosts:
        """The small costs while so many workers share the cores.

        Each is so short that a worker is hardly ever interrupted in it, even where several take turns on a core. In a
        step they are.
        """
        nearest = min(known, key=lambda one: (one.workers > self.machine_cores, abs(one.workers - workers)))
        crowd = max(1.0, workers / self.machine_cores)
        flat = {size: crowd * seconds for size, seconds in nearest.flat.items()}
        return replace(nearest, copy_byte=crowd * nearest.copy_byte, flat=flat)

    def _of_own_cores(self, profiles: list[Profile], count: int) -> float:
        """A step's time with the worker's own cores over the calibrated one: one part of it divides among cores."""
        base = [p for p in profiles if p.workers == count]
        cores, own = base[0].threads, self.cell.cores or 1
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
        return self.cell.cores or self.profiles[0].threads

    def step(self, batch: float) -> Profile:
        """Return the parts of a step with `batch` examples of one worker."""
        low, high = self.profiles[0].batch, self.profiles[-1].batch
        if not low <= batch <= high:
            self.notes[f"a batch of {batch:g} is extrapolated from {low} to {high}"] = None
        profile = self._at(batch) if self.reference is self.architecture else self._scaled(batch)
        return combined([profile], lambda values: self.scale * values[0])

    def _at(self, batch: float) -> Profile:
        batches = [profile.batch for profile in self.profiles]
        is_inside = len(batches) > 1 and batch >= batches[0]

        def at(seconds: Sequence[float]) -> float:
            fixed, each = self._line(seconds)
            return max(0.0, interpolate(batches, seconds, batch)) if is_inside else fixed + each * batch

        return combined(self.profiles, at)

    def _scaled(self, batch: float) -> Profile:
        """The step of a model that was not calibrated, from the reference's.

        What takes the same time for any number of examples (Python, the start of operators) is taken over, and the
        further gradients are written to memory. The rest is in proportion to the multiplications, which large matrices
        do faster.
        """
        reference, target, largest = self.reference, self.architecture, self.profiles[-1]
        forward, backward = dict[str, float](), dict[str, float]()
        of_forward = self._line([sum(profile.forward.values()) for profile in self.profiles])
        of_backward = self._line([sum(profile.backward.values()) + profile.tail for profile in self.profiles])
        ratios = [back / ahead if ahead else 0.0 for back, ahead in zip(of_backward, of_forward, strict=True)]
        for unit, flops in target.flops.items():
            same = [name for name in reference.flops if name.split()[0] == unit.split()[0]]
            fixed, each = self._line([sum(p.forward[name] for name in same) / len(same) for p in self.profiles])
            work = sum(reference.flops[name] for name in same) / len(same)
            more = flops / work if work else target.width * target.length / (reference.width * reference.length)
            each *= more * self._flop(target.width) / self._flop(reference.width)
            forward[unit] = fixed + each * batch
            written = bytes_of_unit(target, unit) - statistics.fmean(bytes_of_unit(reference, name) for name in same)
            written = max(0.0, written)  # a smaller model's stay in the cache
            backward[unit] = ratios[0] * fixed + ratios[1] * each * batch + WRITTEN * self.small.copy_byte * written
        optimizer = self.update([weight.elements for weight in target.weights]) / self.scale
        # Interruptions that have nothing to do with one another: as a random walk, they grow with the root of the time.
        whole = sum(forward.values()) + sum(backward.values()) + optimizer
        return replace(
            largest, model=target.model, length=target.length, forward=forward, tail=0.0, optimizer=optimizer,
            backward=_spread_backward(target, backward), spread=largest.spread * math.sqrt(whole / largest.seconds),
        )  # fmt: skip

    def _line(self, seconds: Sequence[float]) -> tuple[float, float]:
        """Seconds for a step and for each of its examples, by the smallest and the largest batch."""
        low, high = self.profiles[0].batch, self.profiles[-1].batch
        each = (seconds[-1] - seconds[0]) / (high - low) if high > low else seconds[0] / low
        fixed = min(max(0.0, seconds[0] - each * low), seconds[0])
        return fixed, (seconds[-1] - fixed) / high

    def _flop(self, width: int) -> float:
        """Return the seconds of a multiplication or an addition in a layer of this width."""
        widths = sorted(self.small.flop)
        return interpolate(widths, [self.small.flop[known] for known in widths], min(width, widths[-1]))

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

    def update(self, sizes: Sequence[float]) -> float:
        """Return the seconds of clipping, AdamW and zero_grad for tensors with so many elements each."""
        if not sizes:
            return 0.0
        once, each, share = self._update
        return self.scale * (once + sum(each + share * self._elements(size) for size in sizes))

    @cached_property
    def _update(self) -> tuple[float, float, float]:
        """Seconds of an update, and of each of its tensors, whatever its size; and what elements cost among many.

        From the whole model's update and that of a small tensor alone. The elements of a model do not cost more than
        its update: one large tensor may, whose temporary memory is new for every operation.
        """
        weights, alone = self.reference.weights, min(self.small.flat.values())
        whole = statistics.fmean(profile.optimizer for profile in self.profiles)
        elements = sum(self._elements(weight.elements) for weight in weights)
        share = min(1.0, whole / elements) if elements else 1.0
        rest = whole - share * elements
        each = max(0.0, min((rest - alone) / max(1, len(weights) - 1), rest / len(weights)))
        return rest - each * len(weights), each, share

    def _elements(self, size: float) -> float:
        """Return the seconds for the elements of a tensor."""
        sizes = sorted(self.small.flat)
        seconds = interpolate(sizes, [self.small.flat[size] for size in sizes], size)
        return max(0.0, seconds - min(self.small.flat.values()))

    def copies(self, size: float, passes: float = 1.0) -> float:
        """Return the seconds in which `size` bytes are read and written so many times."""
        return self.scale * self.small.copy_byte * size * passes


def bytes_of_unit(architecture: Architecture, unit: str) -> int:
    """Return the bytes of the gradients that backward of a unit makes; the head makes one of the embedding matrix."""
    kind, *number = unit.split()
    sizes = [weight.bytes for weight in architecture.of_block(int(number[0]) if kind == "block" else None)]
    return max(sizes) if kind == "after" else sum(sizes)


def largest_of(count: int) -> float:
    """Return how many standard deviations the largest of so many normally distributed numbers is above their mean."""
    return statistics.NormalDist().inv_cdf((count - 0.375) / (count + 0.25))  # Blom 1958


def combined(profiles: Sequence[Profile], figure: Callable[[list[float]], float]) -> Profile:
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


def _spread_backward(architecture: Architecture, seconds: dict[str, float]) -> dict[str, float]:
    """Divide the backward time of units among their parameters; what comes after the blocks goes to the first one."""
    backward: dict[str, float] = {}
    carried = seconds["after"]
    for block in reversed(range(architecture.n_blocks)):
        weights = architecture.of_block(block)
        count = sum(weight.elements for weight in weights)
        for weight in reversed(weights):
            backward[weight.name] = carried + seconds[f"block {block}"] * weight.elements / count
            carried = 0.0
    for weight in reversed(architecture.of_block(None)):
        backward[weight.name] = seconds["before"] / len(architecture.of_block(None))
    return backward
