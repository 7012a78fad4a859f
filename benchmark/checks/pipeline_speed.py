"""The measured bubble of two equal partitions on two cores, beside (K-1)/(M+K-1).

    python -m benchmark.checks.pipeline_speed [--rounds 15] [--plot pipeline/bubble.png] [--quick]

The share of the workers' time in which they did nothing, from traces: the median over the rounds, with a bootstrap 95 %
interval. How fast a step is, is a row of benchmark.checks.timings: `pipe` here. The last line is one JSON object.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
from functools import partial
from pathlib import Path
from threading import Thread

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmark.checks.check import Row, check_parser, run_parts
from benchmark.measure.intervals import Interval, interval
from benchmark.measure.turns import Step, Timed, nothing
from common.config import RunConfig
from common.errors import exit_on_input_error
from common.figures import COLOURS, figure
from common.flags import positive
from common.workers.process_group import Worker
from pipeline.distributed import make_schedule
from pipeline.partition import WithDevice
from pipeline.pipe import Pipe
from pipeline.timeline import Trace

STAGES = 2
WIDTH, LAYERS, ROWS = 1024, 2, 256  # of a stage; rows in one micro-batch. Large enough that the products take the time
COUNTS = [1, 2, 4, 8, 16]
AT_MOST = {"gpipe": 0.95, "1f1b": 1.00}  # a step of the pipe over one of torch's schedules


def make_stage(seed: int) -> nn.Sequential:
    """WIDTH x WIDTH products, one after another; (rows, WIDTH) to (rows, WIDTH).

    LayerNorm has parameters before the first product, so that in the first stage too its input needs a gradient:
    without it that stage would have a quarter less to do in the backward, and the stages would not be equal.
    """
    torch.manual_seed(seed)
    return nn.Sequential(nn.LayerNorm(WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def batch(micro_batches: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(micro_batches * ROWS, WIDTH)


def loss_of(output: Tensor, *_unused: Tensor) -> Tensor:
    """Costs next to nothing: it is no part of the stages. A sum, so that micro-batches add up to the batch."""
    return output.sum() / WIDTH


def make_pipe() -> tuple[Pipe, list[nn.Sequential]]:
    stages = [make_stage(seed) for seed in range(STAGES)]
    return Pipe(nn.Sequential(*(WithDevice(stage, f"cpu:{j}") for j, stage in enumerate(stages))), ROWS), stages


def ideal_bubble(micro_batches: int) -> float:
    return (STAGES - 1) / (micro_batches + STAGES - 1)


def draw_bubble(path: Path, counts: list[int], measured: list[Interval]) -> None:
    """The measured bubble with its intervals, and the ideal one."""
    middle = [estimate[0] for estimate in measured]
    below = [estimate[0] - (estimate[0] if estimate[1] is None else estimate[1]) for estimate in measured]
    above = [(estimate[0] if estimate[2] is None else estimate[2]) - estimate[0] for estimate in measured]
    with figure(path) as axes:
        axes.plot(counts, [ideal_bubble(m) for m in counts], "--", color=COLOURS[-1], label="(K-1) / (M+K-1)")
        axes.errorbar(counts, middle, [below, above], fmt="o-", color=COLOURS[0], capsize=4, label="measured")
        axes.set(xscale="log", xlabel="micro-batches M", ylabel=f"bubble, K={STAGES} partitions", ylim=(0, None))
        axes.set_xticks(counts, map(str, counts))
        axes.minorticks_off()
        axes.legend()


def pipe(config: RunConfig, worker: Worker, quick: bool) -> Timed:
    """A step of the pipe, of its two stages one after the other, of the stages apart, and of torch's schedules.

    Two cores that share a memory, a cache or, on a rented machine, one physical core are not twice as fast as one. So
    what these cores can do takes M-1 micro-batches at the speed of two stages that run at the same time and never wait
    for each other, and one micro-batch, the bubble, at the speed of one stage after the other. What the pipe lacks to
    it is the pipe's own cost: wake-ups, queues, cutting the graph, and a clock cycle as long as its slower stage.
    Torch's schedules have a stage on each of two ranks; in the other steps the second rank waits.
    """
    (model, stages), own = make_pipe(), make_stage(worker.rank)
    squares, steps, counts = dict[str, float](), dict[str, Step](), [4] if quick else [4, 8, 16]

    def forgetting(name: str, stages: list[nn.Sequential], step: Step) -> Step:
        def run() -> None:  # no gradient has to add to another's
            step()
            gradients = [p.grad for stage in stages for p in stage.parameters() if p.grad is not None]
            squares[name] = sum(float(gradient.norm()) ** 2 for gradient in gradients)
            for stage in stages:
                stage.zero_grad()

        return run

    def one_after_another(x: torch.Tensor) -> None:
        for rows in x.split(ROWS):
            loss_of(stages[1](stages[0](rows))).backward()

    for m in counts:
        x = batch(m)
        for name, step in (
            ("pipe", partial(lambda x: loss_of(model(x)).backward(), x)),
            ("one after another", partial(one_after_another, x)),
            ("each alone", partial(each_in_a_thread, stages, x)),
        ):
            name = f"{name}, M={m}"
            steps[name] = forgetting(name, stages, step) if worker.is_first else nothing
        for kind in ("gpipe", "1f1b"):
            schedule, name = make_schedule(kind, [own], m, loss_of, torch.device("cpu")), f"torch's {kind}, M={m}"
            inputs = [x] if worker.is_first else []
            steps[name] = forgetting(name, [own], partial(schedule.step, *inputs, target=x, return_outputs=False))

    def shares(seconds: np.ndarray) -> dict[str, float]:
        of = dict(zip(steps, seconds.T, strict=True))
        ratios = {}
        for m in counts:
            piped, plain, apart = (of[f"{name}, M={m}"] for name in ("pipe", "one after another", "each alone"))
            ratios[f"of what these cores can do, M={m}"] = float(np.median((apart * (m - 1) + plain) / m / piped))
            for kind in AT_MOST:
                ratios[f"step over torch's {kind}, M={m}"] = float(np.median(piped / of[f"torch's {kind}, M={m}"]))
        return ratios

    def equal() -> bool:
        """Whether all steps have gradients of the same norm, torch's those of both ranks together."""
        sums = torch.tensor([squares.get(name, 0.0) for name in steps], dtype=torch.float64)
        dist.all_reduce(sums)
        same = {name: total for name, total in zip(steps, sums.tolist(), strict=True) if "each alone" not in name}
        return all(abs(total / same[f"pipe, M={name.rpartition('=')[2]}"] - 1) < 2e-4 for name, total in same.items())

    limits = {f"step over torch's {kind}, M={m}": (0.0, most) for m in counts for kind, most in AT_MOST.items()}
    limits |= {f"of what these cores can do, M={m}": (0.95, float("inf")) for m in counts}
    return Timed(steps, limits, equal=equal, shares=shares)


def each_in_a_thread(stages: list[nn.Sequential], x: torch.Tensor) -> None:
    """Forward and backward of all micro-batches by each stage alone: nobody waits for anybody."""

    def work(stage: nn.Sequential) -> None:
        torch.set_num_threads(1)
        outputs = [stage(rows) for rows in x.split(ROWS)]
        for output in reversed(outputs):
            loss_of(output).backward()

    threads = [Thread(target=work, args=(stage,)) for stage in stages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def bubble(flags: argparse.Namespace) -> list[Row]:
    """The share of the workers' time in which they did nothing, for each number of micro-batches."""
    torch.set_num_threads(1)
    pipe, _ = make_pipe()
    measured = []
    for m in COUNTS:
        bubbles, x = [], batch(m)
        for _ in range(1 + flags.rounds):
            pipe.trace = Trace()
            loss_of(pipe(x)).backward()
            bubbles.append(pipe.trace.bubble)
        measured.append(interval(bubbles[1:]))
    if flags.plot is not None:
        draw_bubble(flags.plot, COUNTS, measured)
    return [
        {"micro-batches M": m, "(K-1)/(M+K-1)": ideal_bubble(m), "measured bubble [95 %]": estimate}
        for m, estimate in zip(COUNTS, measured, strict=True)
    ]


def main() -> None:
    parser = check_parser("checks.pipeline_speed", __doc__)
    parser.add_argument("--rounds", type=positive, default=15, help="steps of each number of micro-batches (15)")
    parser.add_argument("--plot", type=Path, help="draw the bubble into this PNG file")
    run_parts(parser, {"bubble": bubble}, rounds=1)


if __name__ == "__main__":
    exit_on_input_error(main)
