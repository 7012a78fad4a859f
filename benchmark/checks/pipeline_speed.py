"""The measured bubble of two equal partitions on two cores, beside (K-1)/(M+K-1).

    python -m benchmark.checks.pipeline_speed [--rounds 15] [--plot pipeline/bubble.png] [--quick]

The share of the workers' time in which they did nothing, from traces: the median over the rounds, with a bootstrap 95 %
interval, as a Markdown table. How fast a step is, is a row of benchmark.checks.timings: `pipe` here. The last line is
one JSON object.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import contextlib
import json
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmark.measure.intervals import Interval, interval, shown
from benchmark.measure.machine import environment
from benchmark.measure.turns import Step, Timed
from common.errors import exit_on_input_error
from common.figures import COLOURS, figure
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
    middle = [found[0] for found in measured]
    below = [found[0] - (found[0] if found[1] is None else found[1]) for found in measured]
    above = [(found[0] if found[2] is None else found[2]) - found[0] for found in measured]
    with figure(path) as axes:
        axes.plot(counts, [ideal_bubble(m) for m in counts], "--", color=COLOURS[-1], label="(K-1) / (M+K-1)")
        axes.errorbar(counts, middle, [below, above], fmt="o-", color=COLOURS[0], capsize=4, label="measured")
        axes.set(xscale="log", xlabel="micro-batches M", ylabel=f"bubble, K={STAGES} partitions", ylim=(0, None))
        axes.set_xticks(counts, map(str, counts))
        axes.minorticks_off()
        axes.legend()


def pipe(folder: Path, quick: bool) -> Timed:
    """A step of the pipe, of its two stages one after the other, of the stages apart, and of torch's schedules.

    Two cores that share a memory, a cache or, on a rented machine, one physical core are not twice as fast as one. So
    what these cores can do takes M-1 micro-batches at the speed of two stages that run at the same time and never wait
    for each other, and one micro-batch, the bubble, at the speed of one stage after the other. What the pipe lacks to
    it is the pipe's own cost: wake-ups, queues, cutting the graph, and a clock cycle as long as its slower stage.
    """
    torch.set_num_threads(1)
    model, stages = make_pipe()
    parameters, norms = list(model.parameters()), dict[str, float]()
    ask, steps, counts = torch_processes(folder), dict[str, Step](), [4] if quick else [4, 8, 16]

    def ours(step: Step, name: str) -> Step:
        def forgetting() -> None:  # no gradient has to add to another's
            step()
            norms[name] = float(torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm())
            for parameter in parameters:
                parameter.grad = None

        return forgetting

    def one_after_another(x: torch.Tensor) -> None:
        for rows in x.split(ROWS):
            loss_of(stages[1](stages[0](rows))).backward()

    def theirs(name: str, schedule: str, m: int) -> None:
        norms[name] = ask(schedule, m)

    for m in counts:
        x = batch(m)
        for name, step in (
            ("pipe", partial(lambda x: loss_of(model(x)).backward(), x)),
            ("one after another", partial(one_after_another, x)),
            ("each alone", partial(each_in_a_thread, stages, x)),
        ):
            steps[f"{name}, M={m}"] = ours(step, f"{name}, M={m}")
        for schedule in ("gpipe", "1f1b"):
            steps[f"torch's {schedule}, M={m}"] = partial(theirs, f"torch's {schedule}, M={m}", schedule, m)

    def shares(seconds: np.ndarray) -> dict[str, float]:
        of = dict(zip(steps, seconds.T, strict=True))
        ratios = {}
        for m in counts:
            piped, plain, apart = (of[f"{name}, M={m}"] for name in ("pipe", "one after another", "each alone"))
            ratios[f"of what these cores can do, M={m}"] = float(np.median((apart * (m - 1) + plain) / m / piped))
            for schedule in ("gpipe", "1f1b"):
                ratios[f"step over torch's {schedule}, M={m}"] = float(
                    np.median(piped / of[f"torch's {schedule}, M={m}"])
                )
        return ratios

    def equal() -> bool:
        same = {name: norm for name, norm in norms.items() if not name.startswith("each alone")}
        return all(abs(norm / norms[f"pipe, M={name.rpartition('=')[2]}"] - 1) < 1e-4 for name, norm in same.items())

    limits = {f"step over torch's {name}, M={m}": (0.0, most) for m in counts for name, most in AT_MOST.items()}
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


def torch_processes(folder: Path) -> Callable[[str, int], float]:
    """Start two processes with a stage each; the function takes a step there, and returns the gradients' norm."""
    context, connections = get_context("spawn"), []
    for rank in range(STAGES):
        mine, other = context.Pipe()
        context.Process(target=torch_process, args=(rank, f"{folder}/store", other), daemon=True).start()
        connections.append(mine)

    def ask(schedule: str, m: int) -> float:
        for connection in connections:
            connection.send((schedule, m))
        return sum(connection.recv() for connection in connections) ** 0.5

    return ask


def torch_process(rank: int, store: str, connection: Connection) -> None:
    """One stage: run the step that is asked for, answer the squared norm of the gradients."""
    from pipeline.distributed import make_schedule

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, STAGES), rank=rank, world_size=STAGES)
    stage, schedules = make_stage(rank), {}
    with contextlib.suppress(EOFError):
        while True:
            name, m = connection.recv()
            x = batch(m)
            if (name, m) not in schedules:
                schedules[name, m] = make_schedule(name, [stage], m, loss_of, torch.device("cpu"))
            schedules[name, m].step(*([x] if rank == 0 else []), target=x, return_outputs=False)
            connection.send(sum(float(p.grad.norm()) ** 2 for p in stage.parameters() if p.grad is not None))
            stage.zero_grad()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["bubble"], help=argparse.SUPPRESS)  # there were other parts
    parser.add_argument("--rounds", type=int, default=15, help="steps for each number of micro-batches (%(default)s)")
    parser.add_argument("--plot", type=Path, help="draw the bubble into this PNG file")
    parser.add_argument("--quick", action="store_true", help="one round")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    begin, measured = environment(), []
    pipe, _ = make_pipe()
    print("| micro-batches M | (K-1)/(M+K-1) | measured bubble [95 %] |\n|---|---|---|", flush=True)
    for m in COUNTS:
        bubbles, x = [], batch(m)
        for _ in range(1 + (1 if arguments.quick else arguments.rounds)):
            pipe.trace = Trace()
            loss_of(pipe(x)).backward()
            bubbles.append(pipe.trace.bubble)
        measured.append(interval(bubbles[1:]))
        print(f"| {m} | {ideal_bubble(m):.3f} | {shown(measured[-1])} |", flush=True)
    if arguments.plot is not None:
        draw_bubble(arguments.plot, COUNTS, measured)
    print(json.dumps({"bubble": dict(zip(COUNTS, measured, strict=True)), "environment": begin}))


if __name__ == "__main__":
    exit_on_input_error(main)
