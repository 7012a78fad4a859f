"""Lets a student's run_gpt2.py start its processes for real, as the script does it, with gloo on loopback.

The script asks for forkserver, whose children begin without the parent's memory: target and arguments are pickled, the
file is imported again, and the environment is that of the first start. Here children are forked, which is quicker, and
then made to begin in the same way.
"""

import functools
import json
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from multiprocessing import context as contexts
from multiprocessing import popen_fork
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

from grader.inside.context import Context
from grader.inside.tools import surroundings
from grader.probes.sync import meet
from grader.wire import drawn
from grader.wire.values import Fields

COUNTED = signal.SIGUSR2  # from the zygote, when it has counted as many processes as the run asks for
WORK_TIME = 0.3  # seconds a worker still has to do when it has seen the others, unless somebody waits for it
STEPS = 3
BLOCKS = 24  # all of them in every step, so that a step's mean loss is the same for every partition of the data


class NotPicklableError(TypeError):
    """What fork would pass on and forkserver cannot."""


class _Fresh:
    """A process as forkserver starts it: from its pickle, with the file imported again. Stands for a Process."""

    def __init__(self, process: Any, environment: dict[str, str], prepare: Callable[[], None]) -> None:
        self._environment, self._prepare = environment, prepare
        contexts.set_spawning_popen(self)  # type: ignore[arg-type]
        try:
            self._pickled = bytes(ForkingPickler.dumps(process))
        except Exception as error:
            raise NotPicklableError(
                "this Process cannot be started by the script: forkserver pickles target and arguments, so use a "
                f"top-level function of the file, not a lambda or a nested function ({error})"
            ) from None
        finally:
            contexts.set_spawning_popen(None)

    def duplicate_for_child(self, descriptor: int) -> int:
        return descriptor

    def _bootstrap(self, parent_sentinel: int) -> int:
        os.environ.clear()
        os.environ.update(self._environment)
        self._prepare()
        return pickle.loads(self._pickled)._bootstrap(parent_sentinel=parent_sentinel)


def start_as_the_script_does(task: ModuleType, prepare: Callable[[], None]) -> None:
    """From now on forkserver and spawn fork, and their children begin afresh; `prepare` puts doubles into `task`."""
    at_first_start: dict[str, str] = {}

    def again() -> None:
        _import_again(task)
        prepare()

    def forkserver(process: object) -> popen_fork.Popen:
        if not at_first_start:
            at_first_start.update(os.environ)
        return popen_fork.Popen(_Fresh(process, at_first_start, again))  # type: ignore[arg-type]

    def spawn(process: object) -> popen_fork.Popen:
        return popen_fork.Popen(_Fresh(process, dict(os.environ), again))  # type: ignore[arg-type]

    setattr(contexts.ForkServerProcess, "_Popen", staticmethod(forkserver))  # noqa: B010 (mypy: it is a method)
    setattr(contexts.SpawnProcess, "_Popen", staticmethod(spawn))  # noqa: B010


def _import_again(task: ModuleType) -> None:
    """Run the file again, into the same module: what start_workers has left in its globals is gone."""
    kept = {name: value for name, value in vars(task).items() if name.startswith("__")}
    vars(task).clear()
    vars(task).update(kept)
    assert task.__spec__ and task.__spec__.loader, "loaded by a context"
    task.__spec__.loader.exec_module(task)


def setup(context: Context) -> Fields:
    """setup(rank, world_size, backend). Arguments: file, backend, environment (set before), mine (see `meet`)."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update(context.arguments["environment"])
    task = context.load(context.arguments["file"])
    before = surroundings(torch.nn.Module())
    task.setup(context.rank, context.world_size, context.arguments["backend"])
    after = surroundings(torch.nn.Module()) | {"the process group": False}
    now = {name: os.environ.get(name) for name in context.arguments["environment"]}
    joined = dist.is_initialized() and [dist.get_rank(), dist.get_world_size()]
    changed = [name for name in before if before[name] != after[name]]
    right = joined == [context.rank, context.world_size]
    return {"joined": right, "environment": now, "changed": changed, "sums": meet(context)}


def workers(context: Context) -> Fields:
    """start_workers(config) with work() replaced by one that notes who runs beside whom.

    Arguments: file, children (as many workers), slowest (the rank that works longest: it must be waited for, whichever
    it is), patience (seconds in which all processes must be seen running at once).
    """
    a = context.arguments
    _expect_to_be_counted()
    multiprocessing.set_start_method("forkserver", force=True)
    task = context.load(a["file"])
    here, number = os.getpid(), own_numbers()

    def work(rank: int, config: object) -> None:  # its names are those of the student's
        rank = rank if isinstance(rank, int) else -1
        Path(f"started.{rank}.{os.getpid()}").touch()
        limit, mine = time.monotonic() + a["patience"], 0
        while os.getpid() != here and time.monotonic() < limit:
            if len(list(Path().glob("started.*"))) >= a["children"]:
                mine = number(limit - time.monotonic())
                Path(f"together.{rank}").touch()
                _work_until_waited_for(WORK_TIME * (1 + 2 * (rank == a["slowest"])))
                break
            time.sleep(0.01)
        Path(f"given.{rank}.{mine}").write_text(str(getattr(config, "world_size", type(config).__name__)))

    work.__module__, work.__qualname__ = task.__name__, "work"  # pickled by name, as the student's is
    _watch_joins()
    start_as_the_script_does(task, lambda: setattr(task, "work", work))
    setattr(task, "work", work)  # noqa: B010 (mypy: a module has no such attribute)
    from common.config import Gpt2Config

    nothing: dict[str, Any] = {field.name: None for field in fields(Gpt2Config)}
    config = Gpt2Config(**nothing | {"world_size": a["children"], "rank": 0, "rank_on_node": 0})
    returned = task.start_workers(config)
    running = multiprocessing.active_children()
    for child in running:
        child.join()
    started = [path.name.split(".") for path in Path().glob("started.*")]
    is_list = isinstance(returned, list | tuple)
    strange = [type(item).__name__ for item in returned if not hasattr(item, "exitcode")] if is_list else []
    return {
        "ranks": [int(rank) for _, rank, _ in started],
        "in_this_process": any(int(pid) == here for *_, pid in started),
        "together": len(list(Path().glob("together.*"))) == a["children"],
        "unfinished": len(running),
        "returned": len(returned) if is_list else -1,
        "strange": strange,
        "given": sorted({path.read_text()[:80] for path in Path().glob("given.*")}),
        "numbers": numbers_in("given"),
    }


def _expect_to_be_counted() -> None:
    """Processes started from now on keep the signal until they ask for it."""
    if hasattr(signal, "sigtimedwait"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {COUNTED})


def own_numbers() -> Callable[[float], int]:
    """number(patience), in a worker: what the zygote has told this process, as soon as it has seen all of them at once.
    0 if the time is up, or where it cannot count."""
    known: dict[int, int] = {}  # by process: a worker that is forked has its parent's

    def number(patience: float) -> int:
        if hasattr(signal, "sigtimedwait") and os.getpid() not in known:
            told = signal.sigtimedwait({COUNTED}, max(patience, 0.0))
            known[os.getpid()] = told.si_status if told else 0
        return known.get(os.getpid(), 0)

    return number


def numbers_in(name: str) -> list[int]:
    """The numbers of the processes that have left a file `name`.rank.number, or `name`.number."""
    parts = [path.name.split(".")[-1] for path in Path().glob(f"{name}.*")]
    return sorted(int(part) for part in parts if part.isascii() and part.isdigit())


class _Blocks(list):
    """Blocks of text; `tell` is called once, when half of them or more were read."""

    def __init__(self, blocks: Iterable[torch.Tensor], tell: Callable[[], None]) -> None:
        super().__init__(blocks)
        self._unread, self._tell = set(range(len(self))), tell

    def _read(self, *places: int) -> None:
        before = 2 * len(self._unread) > len(self)
        self._unread.difference_update(places)
        if before and 2 * len(self._unread) <= len(self):
            self._tell()

    def __getitem__(self, place: Any) -> Any:
        self._read(*(range(len(self))[place] if isinstance(place, slice) else [range(len(self))[place]]))
        return super().__getitem__(place)

    def __iter__(self) -> Iterator[Any]:
        self._read(*range(len(self)))
        return super().__iter__()


def _watch_joins() -> None:
    """A join without a limit tells the worker that it is waited for. One with a limit waits for a moment only: real
    workers take longer than any limit."""
    join = multiprocessing.process.BaseProcess.join

    def watched(self: Any, timeout: float | None = None) -> None:
        if timeout is None and self.pid:
            Path(f"waited_for.{self.pid}").touch()
        join(self, None if timeout is None else min(timeout, 0.05))

    setattr(multiprocessing.process.BaseProcess, "join", watched)  # noqa: B010


def _work_until_waited_for(seconds: float) -> None:
    """Be busy for so long. Whoever waits for this process has done what is asked of it, and need not wait on."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit and not Path(f"waited_for.{os.getpid()}").exists():
        time.sleep(0.01)


def _meet_at_a_free_port(joined: Callable[[], None]) -> None:
    """The workers join at a port of this run, even if 11868 stands in the code: others may be graded beside us.
    `joined` is called in each that has."""
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
        joined()

    setattr(dist, "init_process_group", join)  # noqa: B010 (mypy: a function is not assigned to)


def prepare_files(a: Fields) -> SimpleNamespace:
    """A GPT-2 of a few hundred weights in ./pretrained, and drawn blocks; the command line that trains it."""
    from common.models import load

    load.quiet_transformers()  # no progress bars in what a student reads
    torch.manual_seed(a["drawn"])
    sizes: Fields = {
        "vocab_size": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 16,
    }
    sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained("pretrained")
    ids = torch.from_numpy(drawn.examples(a["drawn"], BLOCKS + 8)[0])
    sys.argv[1:] = [
        "--model_name_or_path", "pretrained", "--world_size", "2", "--batch_size", str(BLOCKS), "--n_epochs",
        str(STEPS), "--model_max_length", "8", "--output_dir", "out", "--overwrite_output_dir", "--no_cuda",
        "--learning_rate", "0.01", "--join_seconds", str(20 * a["slowness"]), "--hang_seconds",
        str(10 * a["slowness"]),
    ]  # fmt: skip
    return SimpleNamespace(train=list(ids[:BLOCKS]), validation=list(ids[BLOCKS:]))


def script(context: Context) -> Fields:
    """main() on two workers. Arguments: file, drawn (seed of model and blocks), children, patience, slowness."""
    from common.data import oscar
    from common.errors import InputError
    from common.models import load
    from task2b_allreduce import scaling

    a = context.arguments
    blocks, here, number = prepare_files(a), os.getpid(), own_numbers()
    flags = sys.argv[1:]

    def leave(name: str) -> None:
        Path(f"{name}.{number(a['patience'])}").touch()

    def load_blocks(*_: object) -> SimpleNamespace:
        if os.getpid() == here:
            raise InputError("the script's own process reads the training data: only its workers may read it")
        return SimpleNamespace(
            train=_Blocks(blocks.train, functools.partial(leave, "read")), validation=blocks.validation
        )

    oscar.load_blocks, load.load_tokenizer = load_blocks, lambda *_, **__: range(8)  # type: ignore
    scaling.report_scaling = lambda *_, **__: None  # figures are drawn elsewhere
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name, None)
    _meet_at_a_free_port(functools.partial(leave, "joined"))
    task = context.load(a["file"])
    _expect_to_be_counted()
    start_as_the_script_does(task, lambda: leave("started"))
    sys.argv[1:] = flags
    failed = ""
    try:
        task.main()
    except InputError as error:
        failed = str(error)
    records = [json.loads(path.read_text()) for path in sorted(Path("out").glob("rank*.json"))]
    losses = [[iteration["loss"] for iteration in record["iterations"]] for record in records]
    numbers = {name: numbers_in(name) for name in ("joined", "read")}
    return {"failed": failed, "records": len(records), "losses": losses, "numbers": numbers}
