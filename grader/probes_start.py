"""Lets a student's run_gpt2.py start its processes for real: forked from this rank, with gloo on loopback."""

import functools
import json
import multiprocessing
import os
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

from grader import draws
from grader.probes import Context

WORK_TIME = 0.3  # seconds a worker still has to do when it has seen the others
STEPS = 3


def workers(context: Context) -> dict[str, Any]:
    """start_workers(config) with work() replaced by one that notes who runs beside whom.

    Arguments: file, workers, slowest (the rank that works longest: it must be waited for, whichever it is), patience
    (seconds in which all processes must be seen running at once).
    """
    count = context.arguments["workers"]
    _always_fork()
    task = context.load(context.arguments["file"])
    here = os.getpid()

    def work(rank: int, config: Any) -> None:  # its names are those of the student's
        Path(f"started.{rank}.{os.getpid()}").touch()
        limit = time.monotonic() + context.arguments["patience"]
        while os.getpid() != here and time.monotonic() < limit:
            if len(list(Path().glob("started.*"))) >= count:
                Path(f"together.{rank}").touch()
                time.sleep(WORK_TIME * (1 + 2 * (rank == context.arguments["slowest"])))
                break
            time.sleep(0.01)

    _impatient_joins()
    setattr(task, "work", work)  # noqa: B010 (mypy: a module has no such attribute)
    returned = task.start_workers(SimpleNamespace(world_size=count))
    running = multiprocessing.active_children()
    for child in running:
        child.join()
    started = [path.name.split(".") for path in Path().glob("started.*")]
    return {
        "ranks": [int(rank) for _, rank, _ in started],
        "in_this_process": any(int(pid) == here for *_, pid in started),
        "together": len(list(Path().glob("together.*"))) == count,
        "unfinished": len(running),
        "returned": len(returned) if isinstance(returned, list | tuple) else -1,
    }


def _impatient_joins() -> None:
    """A join with a time limit waits for a moment only: real workers take longer than any limit."""
    join = multiprocessing.process.BaseProcess.join

    def limited(self: Any, timeout: float | None = None) -> None:
        join(self, None if timeout is None else min(timeout, 0.05))

    setattr(multiprocessing.process.BaseProcess, "join", limited)  # noqa: B010


def _always_fork() -> None:
    """Whatever way of starting is asked for: a fresh interpreter could not find the student's file, nor our doubles."""
    multiprocessing.set_start_method("fork", force=True)
    fork = multiprocessing.get_context("fork")
    for module in (multiprocessing, torch.multiprocessing):
        setattr(module, "get_context", lambda *_, **__: fork)  # noqa: B010 (mypy: a function is not assigned to)
        setattr(module, "set_start_method", lambda *_, **__: None)  # noqa: B010


def _meet_at_a_free_port() -> None:
    """The workers join at a port of this run, even if 11868 stands in the code: others may be graded beside us."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    os.environ["MASTER_PORT"] = port
    init_process_group = dist.init_process_group

    @functools.wraps(init_process_group)
    def join(backend: Any = None, init_method: Any = None, *arguments: Any, **keywords: Any) -> None:
        os.environ["MASTER_PORT"] = port
        if init_method and init_method.startswith("tcp://"):
            init_method = f"tcp://127.0.0.1:{port}"
        init_process_group(backend, init_method, *arguments, **keywords)

    setattr(dist, "init_process_group", join)  # noqa: B010 (mypy: a function is not assigned to)


def script(context: Context) -> dict[str, Any]:
    """main() on two workers, a GPT-2 of a few hundred weights and drawn blocks. Arguments: file, seed, slowness."""
    _always_fork()
    from common import models, oscar, scaling
    from common.errors import InputError

    models.quiet_transformers()  # no progress bars in what a student reads
    seed, slowness = context.arguments["seed"], context.arguments["slowness"]
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "bos_token_id": 0,
        "eos_token_id": 0,
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 16,
    }
    GPT2LMHeadModel(GPT2Config(vocab_size=64, **sizes)).save_pretrained("pretrained")
    ids = torch.from_numpy(draws.examples(seed, 32)[0])
    blocks = SimpleNamespace(train=list(ids[:24]), validation=list(ids[24:]))
    oscar.load_blocks, models.load_tokenizer = lambda *_: blocks, lambda *_, **__: range(8)  # type: ignore
    scaling.report_scaling = lambda *_, **__: None  # figures are drawn elsewhere
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name, None)
    _meet_at_a_free_port()
    task = context.load(context.arguments["file"])
    sys.argv[1:] = [
        "--model_name_or_path", "pretrained", "--world_size", "2", "--batch_size", "8", "--n_epochs", "1",
        "--max_steps", str(STEPS), "--model_max_length", "8", "--output_dir", "out", "--overwrite_output_dir",
        "--no_cuda", "--join_seconds", str(20 * slowness), "--hang_seconds", str(10 * slowness),
    ]  # fmt: skip
    failed = ""
    try:
        task.main()
    except InputError as error:
        failed = str(error)
    records = [json.loads(path.read_text()) for path in sorted(Path("out").glob("rank*.json"))]
    losses = [[iteration["loss"] for iteration in record["iterations"]] for record in records]
    return {"failed": failed, "records": len(records), "losses": losses, "steps": STEPS}
