"""The measured bubble of two equal partitions on two cores, beside (K-1)/(M+K-1).

    python -m benchmark.checks.pipeline_speed [--rounds 15] [--plot pipeline/bubble.png] [--quick]

The share of the workers' time in which they did nothing, from traces: the median over the rounds, with a bootstrap 95 %
interval. The last line is one JSON object.
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

    LayerNorm has parameters before the first product, so that in the first stage too its input needs a gradient:
    without it that stage would have a quarter less to do in the backward, and the stages would not be equal.
    """
    torch.manual_seed(seed)
    return nn.Sequential(nn.LayerNorm(WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def make_pipe() -> Pipe:
    stages = (WithDevice(make_stage(stage), f"cpu:{stage}") for stage in range(STAGES))
    return Pipe(nn.Sequential(*stages), ROWS)


def ideal_bubble(micro_batches: int) -> float:
    return (STAGES - 1) / (micro_batches + STAGES - 1)


def draw_bubble(path: Path, counts: list[int], measured: list[Interval]) -> None:
    """The measured bubble with its intervals, and the ideal one."""
    middle = [median for median, _, _ in measured]
    below = [median - (median if low is None else low) for median, low, _ in measured]
    above = [(median if high is None else high) - median for median, _, high in measured]
    with figure(path) as axes:
        axes.plot(counts, [ideal_bubble(m) for m in counts], "--", color=COLOURS[-1], label="(K-1) / (M+K-1)")
        axes.errorbar(counts, middle, [below, above], fmt="o-", color=COLOURS[0], capsize=4, label="measured")
        axes.set(xscale="log", xlabel="micro-batches M", ylabel=f"bubble, K={STAGES} partitions", ylim=(0, None))
        axes.set_xticks(counts, map(str, counts))
        axes.minorticks_off()
        axes.legend()


def bubble(flags: argparse.Namespace) -> list[Row]:
    """The share of the workers' time in which they did nothing, for each number of micro-batches."""
    torch.set_num_threads(1)
    pipe, measured = make_pipe(), []
    for m in COUNTS:
        bubbles, batch = [], torch.randn(m * ROWS, WIDTH)
        for _ in range(1 + flags.rounds):
            pipe.trace = Trace()
            pipe(batch).sum().backward()  # the loss costs next to nothing: it is no part of the stages
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
