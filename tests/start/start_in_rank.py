"""Runs start_workers() and main() of a run_gpt2.py in a rank; sent to ranks as source.

A process that runs work() leaves files whose names have its process id.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

if TYPE_CHECKING:  # what it finds in a rank
    from multiprocessing.process import BaseProcess

    from grader.inside.tools import Context
    from grader.wire.values import Fields

WORK_TIME = 0.3  # seconds a worker works after all others have started, unless the script waits for it


# --- start_workers() ---


def watch_joins() -> None:
    """Let a join without a time limit leave a file for the worker that it waits for, and cut one with a limit short:
    real workers take longer than any limit."""
    join = multiprocessing.process.BaseProcess.join

    def watched(self: BaseProcess, timeout: float | None = None) -> None:
        if timeout is None and self.pid:
            Path(f"waited_for.{self.pid}").touch()
        join(self, None if timeout is None else min(timeout, 0.05))

    setattr(multiprocessing.process.BaseProcess, "join", watched)  # noqa: B010 (mypy: a method is not assigned to)


def make_work(arguments: Fields) -> Callable[[int, object], None]:
    """Return a work() that notes its arguments, and whether all other workers run at the same time.

    Arguments: workers (how many), slowest (the rank that works longest), patience (seconds in which all processes must
    run at once).
    """
    here, patience = os.getpid(), arguments["patience"]

    def work(rank: int, config: object) -> None:  # parameters have the same names as the student's
        rank = rank if isinstance(rank, int) else -1
        Path(f"started.{rank}.{os.getpid()}").touch()
        limit = time.monotonic() + patience
        while os.getpid() != here and time.monotonic() < limit:
            if len(list(Path().glob("started.*"))) >= arguments["workers"]:
                Path(f"together.{rank}").touch()
                work_until_waited_for(WORK_TIME * (3 if rank == arguments["slowest"] else 1))
                break
            time.sleep(0.01)
        Path(f"given.{rank}.{os.getpid()}").write_text(str(getattr(config, "world_size", type(config).__name__)))

    return work


def notes_of_workers(here: int) -> Fields:
    """Return what the workers have noted; `here` is the script's own process."""
    started = [path.name.split(".") for path in Path().glob("started.*")]
    return {
        "in_this_process": any(int(pid) == here for *_, pid in started),
        "ranks": sorted(int(rank) for _, rank, _ in started),
        "together": len(list(Path().glob("together.*"))),
        "configs": sorted({path.read_text()[:80] for path in Path().glob("given.*")}),
    }


def work_until_waited_for(seconds: float) -> None:
    """Work for so long, or until the script waits for this process, which is what it should do."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit and not Path(f"waited_for.{os.getpid()}").exists():
        time.sleep(0.01)


# --- main() ---


def set_command_line(context: Context) -> None:
    """Set the flags of a run in which every step uses all blocks, so that its loss is the same for any partition.

    Arguments: blocks (how many train), steps, slowness (a factor for all limits of time).
    """
    a = context.arguments
    sys.argv[1:] = [
        "--model_name_or_path", "pretrained", "--world_size", "2", "--batch_size", str(a["blocks"]), "--n_epochs",
        str(a["steps"]), "--model_max_length", "8", "--output_dir", "out", "--overwrite_output_dir", "--no_cuda",
        "--learning_rate", "0.01", "--join_seconds", str(20 * a["slowness"]), "--hang_seconds", str(10 * a["slowness"]),
    ]  # fmt: skip


def save_tiny_gpt2(context: Context) -> None:
    """Save a GPT-2 of a few hundred weights, without dropout, in ./pretrained. Argument: model_seed."""
    from common.models import load

    load.quiet_transformers()  # no progress bars in the output for the student
    torch.manual_seed(context.arguments["model_seed"])
    sizes: dict[str, Any] = {"vocab_size": 64, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes)).save_pretrained("pretrained")


def replace_surroundings(context: Context) -> None:
    """Let the script train on this rank's inputs and its workers join at a free port, before it is loaded."""
    from common.data import oscar
    from common.errors import InputError
    from common.models import load
    from task2b_allreduce import scaling

    arguments, here = context.arguments, os.getpid()

    def load_blocks(*_: object) -> SimpleNamespace:
        if os.getpid() == here:
            raise InputError("the script's own process reads the training data: only its workers may read it")
        blocks, count = list(context.inputs), arguments["blocks"]
        return SimpleNamespace(train=blocks[:count], validation=blocks[count:])

    def load_tokenizer(*_: object, **__: object) -> range:
        """Return what stands for a tokenizer: the script asks it only for its length, the size of the vocabulary."""
        return range(8)

    save_tiny_gpt2(context)
    oscar.load_blocks, load.load_tokenizer = load_blocks, load_tokenizer  # type: ignore
    scaling.report_scaling = lambda *_, **__: None  # other tests judge it
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name, None)
    meet_at_a_free_port()


def recorded_losses() -> list[list[float]]:
    """Return the losses in each worker's record."""
    records = [json.loads(path.read_text()) for path in sorted(Path("out").glob("rank*.json"))]
    return [[iteration["loss"] for iteration in record["iterations"]] for record in records]


def meet_at_a_free_port() -> None:
    """Let the workers join at a free port, whichever port the code has: another run may use it at the same time."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    os.environ["MASTER_PORT"] = port
    init_process_group = dist.init_process_group

    @functools.wraps(init_process_group)
    def join(backend: str | None = None, init_method: str | None = None, *arguments: Any, **keywords: Any) -> None:
        os.environ["MASTER_PORT"] = port
        if init_method and init_method.startswith("tcp://"):
            init_method = f"tcp://127.0.0.1:{port}"
        init_process_group(backend, init_method, *arguments, **keywords)

    setattr(dist, "init_process_group", join)  # noqa: B010 (mypy: a function is not assigned to)
