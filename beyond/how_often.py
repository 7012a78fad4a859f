"""How often to save: the goodput of a job by Daly's formula, and in a simulation whose clock is a number.

    python beyond/how_often.py --save 12 --restart 60 --mtbf 3600 --plot goodput.png

Goodput is the share of time that goes into steps that count. Saving rarely loses work at every kill; saving often costs
time at every save. All times are in seconds; --mtbf is the mean time between kills of the whole job.

Sources: Young, "A First Order Approximation to the Optimum Checkpoint Interval", 1974; Daly, "A Higher Order Estimate
of the Optimum Checkpoint Interval for Restart Dumps", 2006, equations 20 and 37.
"""

import argparse
import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds common/ from any folder

from common.errors import InputError, exit_on_input_error

FACTORS = (1 / 8, 1 / 4, 1 / 2, 1 / 1.4, 1, 1.4, 2, 4, 8)  # of the optimum


@dataclass(frozen=True)
class Job:
    """What a save and a restart take, and the mean time between kills, in seconds."""

    save: float
    restart: float
    mtbf: float

    def young(self) -> float:
        """Return the best work between two saves, if a save is short compared with the time to a kill."""
        return math.sqrt(2 * self.save * self.mtbf)

    def daly(self) -> float:
        """Return the best work between two saves, with terms of higher order."""
        if self.save >= 2 * self.mtbf:
            return self.mtbf
        ratio = self.save / (2 * self.mtbf)
        return self.young() * (1 + math.sqrt(ratio) / 3 + ratio / 9) - self.save

    def goodput(self, work: float) -> float:
        """Return the share of useful time with a save after so much work, kills at random moments."""
        lost = math.exp(self.restart / self.mtbf) * math.expm1((work + self.save) / self.mtbf)
        return work / self.mtbf / lost

    def simulate(self, work: float, segments: int, seed: int) -> float:
        """Return the same from kills that are drawn, over so many saves. Saving and restarting can be killed, too."""
        draw = random.Random(seed)
        clock, kill = 0.0, draw.expovariate(1 / self.mtbf)
        for _ in range(segments):
            end = clock + work + self.save
            while end > kill:  # all since the last save is lost
                end = kill + self.restart + work + self.save
                kill += draw.expovariate(1 / self.mtbf)
            clock = end
        return segments * work / clock


def main() -> None:
    parser = argparse.ArgumentParser(description="How often to save a checkpoint", allow_abbrev=False)
    parser.add_argument("--save", type=float, default=12, help="seconds that a save takes (%(default)s)")
    parser.add_argument("--restart", type=float, default=60, help="seconds from a kill to the next step (%(default)s)")
    parser.add_argument("--mtbf", type=float, default=3600, help="mean seconds between two kills (%(default)s)")
    parser.add_argument("--segments", type=int, default=20_000, help="saves that are simulated (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="also draw the curve into this file")
    flags = parser.parse_args()
    if min(flags.save, flags.mtbf, flags.segments) <= 0 or flags.restart < 0:
        raise InputError("expected positive times and a positive number of segments; --restart may be 0")
    job = Job(flags.save, flags.restart, flags.mtbf)
    print(f"best by Young {job.young():.0f} s, by Daly {job.daly():.0f} s of work between two saves")
    print(f"{'work':>10} {'formula':>8} {'simulated':>9}")
    rows = [(work, job.goodput(work)) for work in (factor * job.daly() for factor in FACTORS)]
    simulated = [job.simulate(work, flags.segments, flags.seed) for work, _ in rows]
    for (work, formula), drawn in zip(rows, simulated, strict=True):
        print(f"{work:8.0f} s {formula:8.3f} {drawn:9.3f}")
    if flags.plot:
        draw_curve(job, [work for work, _ in rows], simulated, flags.plot)


def draw_curve(job: Job, works: list[float], simulated: list[float], file: Path) -> None:
    """Draw formula, simulation and optimum."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    curve = [job.daly() * 2 ** (i / 10) for i in range(-35, 36)]
    axes.plot(curve, [job.goodput(work) for work in curve], label="formula (Daly)")
    axes.plot(works, simulated, "o", label="simulated")
    axes.axvline(job.young(), color="gray", linestyle="--", label=f"optimum (Young) {job.young():.0f} s")
    axes.set(xscale="log", xlabel="seconds of work between two saves", ylabel="goodput")
    axes.set_title(f"save {job.save:g} s, restart {job.restart:g} s, a kill every {job.mtbf:g} s")
    axes.legend()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    exit_on_input_error(main)
