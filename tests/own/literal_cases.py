"""Cases with known answers for a cost model, as the simulator sees them: steps with overlap, and rings.

A step has forward, backward, buckets that become ready at given times and take the network for given times, one at a
time, and the optimizer. A link is latency and bandwidth. All in seconds and bytes.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmark.cost.programs.program import Compute, Instruction, Kind, Start, Wait
from benchmark.cost.resources import Machine, Transfer
from benchmark.cost.simulate import simulate

ALONE = Machine(cores=1, is_shared=False, slots=1)


@dataclass(frozen=True)
class Line:
    """A network in which a message takes latency + bytes / bandwidth, and nothing from those who compute."""

    latency: float
    bandwidth: float
    is_shaped: bool = True

    def transfer(self, operation: str, size: float, workers: int, spent: float) -> Transfer:
        return Transfer(self.latency, size / self.bandwidth, 0.0)

    def moved(self, operation: str, size: float, workers: int) -> float:
        return size

    def refill(self) -> float:
        return 0.0


def overlapped_step(forward: float, backward: float, optimizer: float, buckets: Sequence[tuple[float, float]]) -> float:
    """Return the seconds of a step; buckets: (ready, since the beginning of backward; communication), in order."""
    program: list[Instruction] = [Compute("forward", forward)]
    before = 0.0
    for i, (ready, communication) in enumerate(buckets):
        program += [Compute("backward", ready - before), Start(str(i), "all_reduce", communication, 2, (0,))]
        before = ready
    program += [Compute("backward", backward - before), *(Wait(str(i)) for i in range(len(buckets)))]
    program.append(Compute("optimizer", optimizer))
    return simulate([Kind(range(2), tuple(program))], Line(0.0, 1.0), ALONE).seconds


def ring_all_reduce(size: float, workers: int, latency: float, bandwidth: float) -> float:
    """Return the seconds of 2(N-1) rounds in which every worker sends an N-th of the bytes and receives another."""
    rounds = Start("ring", "exchange", size / workers, workers, (0,), repeats=2 * (workers - 1))
    program = (rounds, Wait("ring")) if workers > 1 else ()
    return simulate([Kind(range(workers), program)], Line(latency, bandwidth), ALONE).seconds


def cases(seed: int, count: int) -> dict[str, list[dict]]:
    """Return so many cases of each kind, with their answers."""
    drawn = random.Random(seed)
    steps, rings = [], []
    for _ in range(count):
        forward, backward, optimizer = (round(drawn.uniform(0.05, 0.5), 3) for _ in range(3))
        ready = sorted(round(drawn.uniform(0.0, backward), 3) for _ in range(drawn.randint(0, 6)))
        buckets = [(moment, round(drawn.uniform(0.01, 0.3), 3)) for moment in ready]
        total = overlapped_step(forward, backward, optimizer, buckets)
        steps.append(
            {"forward": forward, "backward": backward, "optimizer": optimizer, "buckets": buckets, "total": total}
        )
        size, workers = drawn.randrange(10**4, 10**8), drawn.randint(1, 64)
        latency, bandwidth = drawn.choice([2e-5, 1e-4, 1e-3]), drawn.choice([12.5e6, 125e6, 1.25e9])
        seconds = ring_all_reduce(size, workers, latency, bandwidth)
        rings.append(
            {"bytes": size, "workers": workers, "latency": latency, "bandwidth": bandwidth, "seconds": seconds}
        )
    return {"steps": steps, "rings": rings}
