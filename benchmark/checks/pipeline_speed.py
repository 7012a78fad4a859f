"""How fast the pipeline is: against the ideal, against torch.distributed.pipelining, and for GPT-2.

    python -m benchmark.checks.pipeline_speed [--only ideal bubble torch gpt2] [--plot pipeline/bubble.png] [--quick]

Everything runs on two cores, with one thread per stage. What is compared runs in turns within a round, so that both
meet the same machine; a figure is the median over the rounds of the ratio within a round, with a bootstrap 95 %
interval. The last line is one JSON object; the exit code is 0 only if every bound holds.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

import torch
from torch import Tensor, nn

from benchmark.measure.intervals import Interval, Samples, interval, shown
from benchmark.measure.turns import Step, take_rounds
from common.errors import exit_on_input_error
from common.figures import COLOURS, figure
from pipeline.partition import WithDevice
from pipeline.pipe import Pipe
from pipeline.timeline import Trace

STAGES = 2
WIDTH, LAYERS, ROWS = 1024, 2, 256  # of a stage; rows in one micro-batch. Large enough that the products take the time
CORES_AT_LEAST, GPT2_AT_LEAST = 0.95, 1.4
TORCH_AT_MOST = {"gpipe": 0.95, "1f1b": 1.00}


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


def forgetting(function: Step, parameters: list[nn.Parameter]) -> Step:
    """The function, after which there are no gradients, so that none has to add to those of another."""

    def step() -> None:
        function()
        for parameter in parameters:
            parameter.grad = None

    return step


def gradient_norm(parameters: list[nn.Parameter]) -> float:
    return float(torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm())


def show(name: str, samples: Samples, promise: str = "") -> float:
    found = interval(samples)
    print(f"{name:44} {shown(found)}  {promise}", flush=True)
    return found[0]


def make_pipe() -> tuple[Pipe, list[nn.Sequential]]:
    stages = [make_stage(seed) for seed in range(STAGES)]
    return Pipe(nn.Sequential(*(WithDevice(stage, f"cpu:{j}") for j, stage in enumerate(stages))), ROWS), stages


def measure_ideal(rounds: int, micro_batches: list[int]) -> tuple[dict[str, float], dict[str, float]]:
    """Two references of a step: K*M/(K+M-1) times faster than stage after stage, and as fast as these cores can be.

    Two cores that share a memory, a cache or, on a rented machine, one physical core are not twice as fast as one. The
    second reference therefore takes M-1 micro-batches at the speed of two stages that run at the same time and never
    wait for each other, and one micro-batch, the bubble, at the speed of one stage after the other. What the pipe lacks
    to it is the pipe's own cost: wake-ups, queues, cutting the graph, and a clock cycle as long as its slower stage.
    """
    pipe, stages = make_pipe()
    parameters = list(pipe.parameters())
    of_ideal, of_cores = {}, {}
    for m in micro_batches:
        x = batch(m)

        def one_after_another(x: Tensor = x) -> None:
            for rows in x.split(ROWS):
                loss_of(stages[1](stages[0](rows))).backward()

        def piped(x: Tensor = x) -> None:
            loss_of(pipe(x)).backward()

        ideal = STAGES * m / (STAGES + m - 1)
        ways = (one_after_another, partial(each_in_a_thread, stages, x), piped)
        plain, apart, mine = take_rounds([forgetting(way, parameters) for way in ways], rounds, warm_up=2).T
        of_ideal[str(m)] = show(f"fraction of the ideal {ideal:.2f}, M={m}", plain / mine / ideal)
        promise, cores = f"at least {CORES_AT_LEAST:.2f}", (apart * (m - 1) + plain) / m / mine
        of_cores[str(m)] = show(f"fraction of what these cores can do, M={m}", cores, promise)
    return of_ideal, of_cores


def each_in_a_thread(stages: list[nn.Sequential], x: Tensor) -> None:
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


def measure_bubble(rounds: int, plot: Path | None) -> None:
    """The share of the workers' time in which they did nothing, from traces, beside (K-1)/(M+K-1): a Markdown table."""
    pipe, _ = make_pipe()
    counts, measured = [1, 2, 4, 8, 16], list[Interval]()
    print("\n| micro-batches M | (K-1)/(M+K-1) | measured bubble [95 %] |\n|---|---|---|", flush=True)
    for m in counts:
        bubbles, x = [], batch(m)
        for _ in range(1 + rounds):
            pipe.trace = Trace()
            loss_of(pipe(x)).backward()
            bubbles.append(pipe.trace.bubble)
        measured.append(interval(bubbles[1:]))
        print(f"| {m} | {ideal_bubble(m):.3f} | {shown(measured[-1])} |", flush=True)
    print()
    if plot is not None:
        draw_bubble(plot, counts, measured)


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


def measure_torch(rounds: int, micro_batches: list[int]) -> dict[str, float]:
    """Step time of the Pipe over that of torch's schedules in two processes; the largest ratio over all M counts."""
    pipe, _ = make_pipe()
    parameters = list(pipe.parameters())
    worst: dict[str, float] = {}
    with torch_processes() as ask:
        for m in micro_batches:
            x = batch(m)
            ratios: dict[str, list[float]] = {name: [] for name in TORCH_AT_MOST}
            for turn in range(-1, rounds):
                for parameter in parameters:
                    parameter.grad = None
                begin = time.perf_counter()
                loss_of(pipe(x)).backward()
                mine, norm = time.perf_counter() - begin, gradient_norm(parameters)
                for name in TORCH_AT_MOST:
                    theirs, their_norm = ask(name, m)
                    assert abs(their_norm / norm - 1) < 1e-4, f"{name} computed other gradients: {their_norm}, {norm}"
                    if turn >= 0:
                        ratios[name].append(mine / theirs)
            for name, samples in ratios.items():
                middle = show(f"step time over torch's {name}, M={m}", samples, f"at most {TORCH_AT_MOST[name]:.2f}")
                worst[name] = max(middle, worst.get(name, 0.0))
    return worst


@contextmanager
def torch_processes() -> Iterator[Callable[[str, int], tuple[float, float]]]:
    """Two processes with a stage each; ask(schedule, M) gives the slower one's seconds and the gradients' norm."""
    context, connections, processes = get_context("spawn"), [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(STAGES):
            mine, theirs = context.Pipe()
            process = context.Process(target=torch_process, args=(rank, f"{folder}/store", theirs), daemon=True)
            process.start()
            connections.append(mine)
            processes.append(process)

        def ask(name: str, m: int) -> tuple[float, float]:
            for connection in connections:
                connection.send((name, m))
            answers = [connection.recv() for connection in connections]
            return max(answer[0] for answer in answers), sum(answer[1] for answer in answers) ** 0.5

        try:
            yield ask
        finally:
            for connection in connections:
                connection.close()
            for process in processes:
                process.join(10)
                if process.is_alive():
                    process.kill()


def torch_process(rank: int, store: str, connection: Connection) -> None:
    """One stage: run the step that is asked for, answer (seconds, squared norm of the gradients)."""
    import torch.distributed as dist

    from pipeline.distributed import make_schedule

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, STAGES), rank=rank, world_size=STAGES)
    stage, schedules = make_stage(rank), {}
    parameters = list(stage.parameters())
    while True:
        try:
            name, m = connection.recv()
        except EOFError:
            break
        if (name, m) not in schedules:
            schedules[name, m] = make_schedule(name, [stage], m, loss_of, torch.device("cpu"))
        x = batch(m)
        inputs = (x,) if rank == 0 else ()
        step = partial(schedules[name, m].step, *inputs, target=x, return_outputs=False)
        for parameter in parameters:
            parameter.grad = None
        dist.barrier()
        begin = time.perf_counter()
        step()
        taken = time.perf_counter() - begin
        connection.send((taken, gradient_norm(parameters) ** 2))
    dist.destroy_process_group()


def measure_gpt2(rounds: int, micro_batches: int = 8) -> float:
    """Step time (forward and backward) of model_parallel over pipeline_parallel: GPT-2 with 4 blocks on 2 stages."""
    from transformers import GPT2Config

    from pipeline.model_parallel import GPT2LMHeadModelParallel

    sizes: dict = {"n_layer": 4, "n_embd": 256, "n_head": 4, "n_positions": 128, "vocab_size": 2000}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
    model = GPT2LMHeadModelParallel(config)
    model.parallelize([f"cpu:{j}" for j in range(STAGES)])
    tokens = torch.randint(0, 2000, (4 * micro_batches, 128))
    model._prepare_pipeline_parallel(len(tokens) // micro_batches)
    parameters = list(model.parameters())

    def step(pipeline_parallel: bool) -> None:
        model.transformer.pipeline_parallel = pipeline_parallel
        loss = model(tokens, labels=tokens).loss
        assert loss is not None
        loss.backward()

    steps = [forgetting(partial(step, is_piped), parameters) for is_piped in (False, True)]
    one_after_another, piped = take_rounds(steps, rounds).T
    promise = f"at least {GPT2_AT_LEAST}"
    return show(f"GPT-2: pipeline over model parallel, M={micro_batches}", one_after_another / piped, promise)


def main() -> None:
    parts = ("ideal", "bubble", "torch", "gpt2")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="rounds per comparison (default: 15)")
    parser.add_argument("--micro_batches", type=int, nargs="+", default=[4, 8, 16], help="M (default: 4 8 16)")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, help="measure only these parts")
    parser.add_argument("--plot", type=Path, help="draw the bubble into this PNG file")
    parser.add_argument(
        "--quick", action="store_true", help="smallest sizes, takes seconds; time limits are not checked"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.micro_batches = 1, [4]
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {load:.1f}, {arguments.rounds} rounds")
    print(f"a stage: {LAYERS} products of ({ROWS}, {WIDTH}) by ({WIDTH}, {WIDTH}) per micro-batch\n")
    result: dict = {}
    holds = True
    if "ideal" in arguments.only:
        of_ideal, of_cores = measure_ideal(arguments.rounds, arguments.micro_batches)
        result |= {"fraction_of_ideal": of_ideal, "fraction_of_cores": of_cores}
        holds &= min(of_cores.values()) >= CORES_AT_LEAST
    if "bubble" in arguments.only:
        measure_bubble(arguments.rounds, arguments.plot)
    if "torch" in arguments.only:
        result["vs_torch"] = measure_torch(arguments.rounds, arguments.micro_batches)
        holds &= all(result["vs_torch"][name] <= bound for name, bound in TORCH_AT_MOST.items())
    if "gpt2" in arguments.only:
        result["gpt2_speedup"] = measure_gpt2(arguments.rounds)
        holds &= result["gpt2_speedup"] >= GPT2_AT_LEAST
    print(json.dumps(result))
    sys.exit(0 if holds or arguments.quick else 1)


if __name__ == "__main__":
    exit_on_input_error(main)
