"""Where the time of a run with kills went, beside the goodput that Daly's formula gives for such a run.

    python beyond/lost_time.py output.txt --every 40 --plot kills.png

output.txt is what run_survive.py has printed; --every must be the one of its command.
"""

import argparse
import re
import sys
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds common/ from any folder

from beyond.how_often import Job
from common.errors import InputError, exit_on_input_error

DAY = 86_400  # seconds; the clock starts again at midnight
Attempt = list[tuple[float, int]]  # when which step was made, in seconds from the first step of the run
LINE = re.compile(r"^(?:\[0\] )?(\d+):(\d+):([\d.]+) (?:start|step (\d+))", re.MULTILINE)


def read(file: Path) -> list[Attempt]:
    """Return the attempts in which steps were made."""
    attempts: list[Attempt] = [[]]
    start = None
    for hours, minutes, seconds, step in LINE.findall(file.read_text(encoding="utf-8")):
        if step:
            now = 3600 * int(hours) + 60 * int(minutes) + float(seconds)
            start = now if start is None else start
            attempts[-1].append(((now - start) % DAY, int(step)))
        else:
            attempts.append([])
    return [attempt for attempt in attempts if attempt]


def report(attempts: list[Attempt], every: int) -> None:
    """Print what was lost, and the goodput: measured, and by the formula with the times of this run."""
    times: dict[bool, list[float]] = {False: [], True: []}  # from step to step, without and with a save between them
    for attempt in attempts:
        for (begin, step), (end, _) in pairwise(attempt):
            times[step % every == 0].append(end - begin)
    if len(attempts) < 2 or not all(times.values()):
        raise InputError("expected a run with a kill, and --every as in its command")
    step_time = median(times[False])
    restarts = [after[0][0] - before[-1][0] - step_time for before, after in pairwise(attempts)]
    total, last = attempts[-1][-1][0] + step_time, attempts[-1][-1][1]
    again = (sum(map(len, attempts)) - last) * step_time
    running = (total - sum(restarts)) / len(restarts)  # a worker is only killed while the job runs
    job = Job(max(median(times[True]) - step_time, 1e-6), mean(restarts), running)
    print(f"{total:.1f} s, {len(restarts)} kills: {sum(restarts):.1f} s in restarts, {again:.1f} s in steps made again")
    print(f"a save takes {job.save:.3f} s, a restart {job.restart:.1f} s; a kill every {running:.1f} s between them")
    print(f"goodput {last * step_time / total:.3f}, by the formula {job.goodput(every * step_time):.3f}")


def draw(attempts: list[Attempt], file: Path) -> None:
    """Draw the steps over the time; those that were made again are red, and the time without steps is gray."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    for attempt in attempts:
        axes.plot(*zip(*attempt, strict=True), color="tab:blue")
    for before, after in pairwise(attempts):
        axes.axvspan(before[-1][0], after[0][0], color="lightgray")
        if lost := [(when, step) for when, step in before if step >= after[0][1]]:
            axes.plot(*zip(*lost, strict=True), color="tab:red", linewidth=3)
    axes.set(xlabel="seconds", ylabel="step", title="gray: no step is made; red: these steps are made again")
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a run has lost by kills", allow_abbrev=False)
    parser.add_argument("output", type=Path, help="what run_survive.py has printed")
    parser.add_argument("--every", type=int, default=5, help="updates between two saves of that run (%(default)s)")
    parser.add_argument("--plot", type=Path, help="also draw the run into this file")
    flags = parser.parse_args()
    attempts = read(flags.output)
    report(attempts, flags.every)
    if flags.plot:
        draw(attempts, flags.plot)


if __name__ == "__main__":
    exit_on_input_error(main)
