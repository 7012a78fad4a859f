"""Time a step without communication, part by part, while some workers of this machine take it at the same time."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
from scipy.stats import trim_mean
from torch import nn

from benchmark.cost.calibration import Profile, SmallCosts
from benchmark.engines.engine import BETAS
from benchmark.engines.single import Single
from benchmark.settings import Settings
from benchmark.training.own_model import blocks
from benchmark.training.workload import Workload
from cluster.guard import threads_per_command
from common.workers.process_group import Worker

LEAST, MOST = 3, 40  # steps
WARM_UP, OUTLIERS = 10, 0.2  # runs of MOST; a share of the rest, at either end
FLAT = (2**12, 2**16, 2**20, 2**22)  # elements
WIDTHS, ROWS = (64, 128, 256, 512), 512  # of layers
COPIED = 2**22  # bytes

Part = tuple[str, str]  # "forward" and a unit; "backward" and a parameter, or "tail"; "optimizer" and nothing


class StampedStep:
    """A model whose step notes when each of its parts is done. batches: the sizes that `run` is called with."""

    def __init__(self, settings: Settings, worker: Worker, workload: Workload, batches: Sequence[int]) -> None:
        alone = replace(settings, strategy="single", world_size=1, rank=0, accumulation=1)
        self.engine = Single(alone, worker, workload.build(alone))
        self.batches = {size: worker.batches(workload.batches(replace(alone, batch_size=size))) for size in batches}
        self.ends: dict[str, list[tuple[str, float]]] = {}  # "forward" or "backward" -> its parts, and when each ended
        layers = blocks(self.engine.bare)
        layers[0].register_forward_pre_hook(partial(self._note_end, "forward", "before"))
        # What is between two blocks (a T5's decoder begins so) is counted with the later one.
        for i, layer in enumerate(layers):
            layer.register_forward_hook(partial(self._note_end, "forward", f"block {i}"))
        for name, parameter in self.engine.bare.named_parameters():
            parameter.register_post_accumulate_grad_hook(partial(self._note_end, "backward", name))

    def _note_end(self, phase: str, part: str, *_: object) -> None:
        self.ends[phase].append((part, time.perf_counter()))

    def run(self, size: int) -> dict[Part, float]:
        """Take a step with so many examples; return the seconds of its parts."""
        batch = next(self.batches[size])
        self.ends = {"forward": [], "backward": []}
        begin = time.perf_counter()
        loss = self.engine.forward(batch)
        middle = time.perf_counter()
        self.engine.backward(loss, last=True)
        end = time.perf_counter()
        self.engine.step(self.engine.settings.learning_rate)
        done = time.perf_counter()
        seconds: dict[Part, float] = {}
        for phase, since, stamps in (
            ("forward", begin, [*self.ends["forward"], ("after", middle)]),
            ("backward", middle, [*self.ends["backward"], ("tail", end)]),
            ("optimizer", end, [("", done)]),
        ):
            for name, moment in stamps:
                seconds[phase, name], since = moment - since, moment
        return seconds


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch compute with so many threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def profiles(
    settings: Settings, worker: Worker, workload: Workload, batches: Sequence[int], group: dist.ProcessGroup,
    workers: int, seconds: float,
) -> list[Profile]:  # fmt: skip
    """Return the parts of a step by batch size, as means over the workers. A collective; it takes about `seconds`.

    Batch sizes take turns: what slows the machine down for a while slows all of them down.
    """
    share = threads_per_command(workers)
    runs: dict[int, list[dict[Part, float]]] = {size: [] for size in batches}
    with threads(share):
        stamped = StampedStep(settings, worker, workload, batches)
        rounds, number = LEAST + 1, 0
        while number < rounds:
            begin = time.perf_counter()
            for size in batches:
                worker.pulse.beat()
                dist.barrier(group)
                runs[size].append(stamped.run(size))
            number += 1
            if number == 2:  # the first round makes memory and the optimizer's state
                took = torch.tensor(time.perf_counter() - begin)
                dist.all_reduce(took, op=dist.ReduceOp.MAX, group=group)
                rounds = 1 + max(LEAST, min(MOST, int(seconds / float(took))))
    here = {size: replace(settings, batch_size=size) for size in batches}
    return [profile(here[size], runs[size][1:], workers, share, group) for size in batches]


def profile(
    settings: Settings, runs: list[dict[Part, float]], workers: int, share: int, group: dist.ProcessGroup
) -> Profile:
    """Return what these steps with `settings.batch_size` examples took, part by part. A collective."""
    totals = [sum(run.values()) for run in runs]
    usual = statistics.median(totals) / statistics.fmean(totals)  # one run that something else disturbed counts less
    parts = mean(runs, workers, group, usual)
    forward, backward = ({name: s for (phase, name), s in parts.items() if phase == p} for p in ("forward", "backward"))
    tail = backward.pop("tail")
    return Profile(
        settings.model, settings.length, settings.batch_size, workers, share,
        forward, backward, tail, parts["optimizer", ""], spread(totals, workers, group),
    )  # fmt: skip


def mean(runs: list[dict[Any, float]], workers: int, group: dist.ProcessGroup, factor: float = 1.0) -> dict[Any, float]:
    """Return for every name the mean over runs and workers, times this worker's factor.

    Not medians: a worker that shares its core is interrupted now and then, for several milliseconds. Most short parts
    of a step are not, so their medians would add up to a step without interruptions.
    """
    names = list(runs[-1])
    values = torch.tensor([factor * statistics.fmean(run[name] for run in runs) for name in names], dtype=torch.float64)
    dist.all_reduce(values, group=group)
    return dict(zip(names, (values / workers).tolist(), strict=True))


def spread(seconds: list[float], workers: int, group: dist.ProcessGroup) -> float:
    """Return by how much the slowest worker of a step is later than the mean of all, as the median over the steps."""
    most, mean = (torch.tensor(seconds, dtype=torch.float64) for _ in range(2))
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(mean, group=group)
    return float((most - mean / workers).median())


def small_costs(settings: Settings, workers: int, group: dist.ProcessGroup) -> SmallCosts:
    """Return what copies, updates and layers cost. A collective."""
    with threads(threads_per_command(workers)):
        costs = {
            "copy_byte": copying(group) / COPIED,
            **{f"flat {size}": update(size, settings, group) for size in FLAT},
            **{f"flop {width}": layer(width, group) / (48 * ROWS * width**2) for width in WIDTHS},
        }
    costs = mean([costs | {"process": float(psutil.Process().memory_info().rss)}], workers, group)
    flat = {size: costs[f"flat {size}"] for size in FLAT}
    flop = {width: costs[f"flop {width}"] for width in WIDTHS}
    return SmallCosts(workers, costs["copy_byte"], flat, flop, costs["process"])


def copying(group: dist.ProcessGroup) -> float:
    """Return the seconds that a copy of COPIED bytes takes."""
    source, target = (torch.zeros(COPIED // 4) for _ in range(2))
    return mean_seconds(lambda: target.copy_(source), group)


def layer(width: int, group: dist.ProcessGroup) -> float:
    """Return the seconds of forward and backward in the half of a block that has no attention."""
    inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    module, rows = nn.Sequential(nn.LayerNorm(width), inner), torch.ones(ROWS, width, requires_grad=True)

    def forward_backward() -> None:
        (rows + module(rows)).sum().backward()
        module.zero_grad()

    return mean_seconds(forward_backward, group)


def update(size: int, settings: Settings, group: dist.ProcessGroup) -> float:
    """Return the seconds of clipping, AdamW and zero_grad for one tensor of `size` elements."""
    parameter = nn.Parameter(torch.zeros(size))
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, eps=settings.adam_epsilon, betas=BETAS)

    def step() -> None:
        parameter.grad = gradient
        nn.utils.clip_grad_norm_([parameter], settings.max_grad_norm or 1.0)
        optimizer.step()
        optimizer.zero_grad()

    gradient = torch.full((size,), 1e-3)
    return mean_seconds(step, group)


def mean_seconds(action: Callable[[], object], group: dist.ProcessGroup) -> float:
    """Return the mean of some runs after the first ones, without the outliers; all workers begin together."""
    seconds = []
    for _ in range(MOST):
        dist.barrier(group)
        begin = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begin)
    return float(trim_mean(seconds[WARM_UP:], OUTLIERS))
