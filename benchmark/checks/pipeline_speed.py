"""The measured bubble of two equal partitions on two cores, beside (K-1)/(M+K-1).

    python -m benchmark.checks.pipeline_speed [--rounds 15] [--plot pipeline/bubble.png] [--quick]

The bubble is the share of the workers' time in which they did nothing, from traces: the median over the rounds, with a
bootstrap 95 % interval. The last line is one JSON object.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
from pathlib import Path

import torch
from torch import nn

from benchmark.checks.check import Row, check_parser, run_parts
from benchmark.measure.intervals import Interval, interval
from common.errors import exit_on_input_error
from common.figures import COLOURS, figure
from common.flags import positive
from pipeline.partition import WithDevice
from pipeline.pipe import Pipe
from pipeline.timeline import Trace

STAGES = 2
WIDTH, LAYERS, ROWS = 1024, 2, 256  # of a stage; rows in one micro-batch. Large enough that the products take the time
COUNTS = [1, 2, 4, 8, 16]


def make_stage(seed: int) -> nn.Sequential:
    """WIDTH x WIDTH products, one after another; (rows, WIDTH) to (rows, WIDTH).

    With LayerNorm, the input of the first product needs a gradient in the first stage, too: the stages are equal.
    """
    torch.manual_seed(seed)
    return nn.Sequential(nn.LayerNorm(WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def ideal_bubble(micro_batches: int) -> float:
    return (STAGES - 1) / (micro_batches + STAGES - 1)


def draw_bubble(path: Path, measured: list[Interval]) -> None:
    """The measured bubble with its intervals, and the ideal one."""
    middle = [estimate[0] for estimate in measured]
    errors = [[abs(estimate[0] - (estimate[end] or estimate[0])) for estimate in measured] for end in (1, 2)]
    with figure(path) as axes:
        axes.plot(COUNTS, [ideal_bubble(m) for m in COUNTS], "--", color=COLOURS[-1], label="(K-1) / (M+K-1)")
        axes.errorbar(COUNTS, middle, errors, fmt="o-", color=COLOURS[0], capsize=4, label="measured")
        axes.set(xscale="log", xlabel="micro-batches M", ylabel=f"bubble, K={STAGES} partitions", ylim=(0, None))
        axes.set_xticks(COUNTS, map(str, COUNTS))
        axes.minorticks_off()
        axes.legend()


def bubble(flags: argparse.Namespace) -> list[Row]:
    """A row for each number of micro-batches."""
    torch.set_num_threads(1)
    pipe = Pipe(nn.Sequential(*(WithDevice(make_stage(j), f"cpu:{j}") for j in range(STAGES))), ROWS)
    measured = []
    for m in COUNTS:
        bubbles, x = [], torch.randn(m * ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
        for _ in range(1 + flags.rounds):
            pipe.trace = Trace()
            pipe(x).sum().backward()
            bubbles.append(pipe.trace.bubble)
        measured.append(interval(bubbles[1:]))
    if flags.plot is not None:
        draw_bubble(flags.plot, measured)
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
