"""Everything around joining a process group that is not part of the lesson.

    with process_group(config, join) as worker:    # `join` is region 2a.1: it calls init_process_group
        ...

Before `join`, it chooses the network interface that leads to the master, and the workers announce themselves. So a
worker that was started twice, runs another task or has another --world_size is reported at once, and a missing worker
after --join_seconds. After `join`, if a worker dies or none makes progress, one of them reports who waits where, and
all exit with code 3 (watch.py). A script without a process group is watched, too: it exits if it makes no progress.
"""

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from common.config import RunConfig
from common.errors import InputError
from common.workers.channel import Process
from common.workers.collectives import CollectiveLog, turn_on_recorder
from common.workers.machine import interfaces, own_address
from common.workers.pulse import Pulse, noted_calls
from common.workers.roll_call import Roll, call_the_roll
from common.workers.watch import Watchdog, stop


@dataclass(frozen=True)
class Worker:
    """One of `world_size` processes that train together."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    pulse: Pulse = field(default_factory=Pulse, repr=False, compare=False)
    collectives: CollectiveLog = field(default_factory=CollectiveLog, repr=False, compare=False)

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0, which checks folders, prints and keeps the metrics."""
        return self.rank == 0

    def batches(self, loader: Iterable) -> Iterator:
        """Yield the batches of a loader on this worker's device; each shows the watchdog that the worker is alive."""
        self.pulse.beat()
        try:
            for batch in loader:
                self.pulse.beat()
                if isinstance(batch, dict):
                    yield {name: tensor.to(self.device) for name, tensor in batch.items()}
                else:
                    yield batch.to(self.device)
        finally:
            self.pulse.beat()
            self.pulse.rests = True


@contextlib.contextmanager
def process_group(config: RunConfig, join: Callable[[RunConfig], None] | None = None) -> Iterator[Worker]:
    """Yield this process as a Worker; with `join`, it is a member of a process group until the end of the block.

    Raises InputError if the group cannot be joined. Exits with code 3 if contact is lost inside the block.
    """
    worker = Worker(config.rank, config.world_size, choose_device(config))
    if join is None:
        if config.world_size > 1:
            raise InputError(f"--world_size: this script runs on one worker, got {config.world_size}; see task 2a")
        # Without a group, it looks at this process alone: there is no other rank, and no file of calls.
        watch = Watchdog(config, worker.pulse, Roll({0: Process()}, {}), {}, in_group=False)
        try:
            yield worker
        finally:
            watch.close()
        return
    turn_on_recorder()
    choose_interface(config.master_ip)
    with contextlib.ExitStack() as files:
        roll, notes = _meet(config, join, files)
        share_cores(config.rank, roll)
        watch = Watchdog(config, worker.pulse, roll, notes)
        try:
            with noted_calls(worker.pulse, notes[config.rank]):
                yield worker
        except BaseException as error:  # Ctrl-C, too: the other ranks learn who has ended, and why
            if isinstance(error, RuntimeError) and _is_lost_contact(error) and config.world_size > 1:
                watch.lost_contact(_reason(error), error.__traceback__)
            watch.failed(error)
            if "Duplicate GPU" in str(error):
                raise InputError(f"{_reason(error)}; NCCL needs a GPU for each worker: add --no_cuda") from error
            raise
        watch.leave_together()
    if dist.is_initialized():
        dist.destroy_process_group()


def _meet(
    config: RunConfig, join: Callable[[RunConfig], None], files: contextlib.ExitStack
) -> tuple[Roll, dict[int, int]]:
    """Call the roll and join; return the roll, and the files for the calls of the ranks on this machine.

    Each rank opens the others' files before it joins. When all have joined, the names are no longer needed, and without
    them nothing is left behind, however the run ends.
    """
    own, name = tempfile.mkstemp(prefix="cos598d_rank_")
    files.callback(os.close, own)
    try:
        roll = call_the_roll(config, name)
        notes = {config.rank: own}
        for rank, process in roll.processes.items():
            with contextlib.suppress(OSError):  # it is on another machine
                notes[rank] = os.open(process.notes, os.O_RDONLY) if rank != config.rank else own
        with _deadline(config):
            _join(config, join)
    finally:
        Path(name).unlink()
    for rank in notes.keys() - {config.rank}:
        files.callback(os.close, notes[rank])
    return roll, notes


@contextlib.contextmanager
def _deadline(config: RunConfig) -> Iterator[None]:
    """End the process with one line if the block takes longer than --join_seconds."""

    def end() -> None:
        late = f"init_process_group did not return within {config.join_seconds:g} s (--join_seconds)"
        print(f"error: rank {config.rank}: {late}", file=sys.stderr)
        stop(2)

    timer = threading.Timer(config.join_seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def choose_device(config: RunConfig) -> torch.device:
    """Return a GPU for each worker of this machine, in turn; the CPU if there is none."""
    if config.no_cuda or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", config.rank_on_node % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def share_cores(rank: int, roll: Roll) -> None:
    """Divide the cores of this machine among its workers: if each used all, they would wait for each other."""
    if "OMP_NUM_THREADS" not in os.environ:
        own = roll.processes[rank]
        sharing = sum(process.shares_cores_with(own) for process in roll.processes.values())
        torch.set_num_threads(max(1, len(own.cores) // sharing))


def choose_interface(master_ip: str) -> None:
    """Tell gloo and NCCL to use the interface that leads to `master_ip`, unless the user named one.

    By itself gloo takes the interface of the host name. On a node with a control and an experiment network that can
    be the wrong one: slow at best, and on CloudLab against the rules. Raises InputError for an interface that this
    machine does not have: gloo's own words would not say which it has.
    """
    named, known = os.environ.get("GLOO_SOCKET_IFNAME", ""), sorted(set(interfaces().values()))
    if unknown := [name for name in named.split(",") if known and name and name not in known]:
        raise InputError(
            f"GLOO_SOCKET_IFNAME: this machine has no interface {unknown[0]}; it has {', '.join(known)}; unset the "
            "variable: the interface towards --master_ip is found without it"
        )
    if name := interface_towards(master_ip):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def interface_towards(address: str) -> str | None:
    """Return the name of this machine's interface for packets to `address`; None if the system does not say."""
    with contextlib.suppress(OSError):
        return interfaces().get(own_address(address))
    return None


def _join(config: RunConfig, join: Callable[[RunConfig], None]) -> None:
    # For a join through the environment: what --master_ip and --master_port said, unless it is set already.
    os.environ.setdefault("MASTER_ADDR", config.master_ip)
    os.environ.setdefault("MASTER_PORT", str(config.master_port))
    try:
        join(config)
    except NotImplementedError:
        raise  # an unsolved TODO says by itself what to do
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"rank {config.rank} could not join the process group: {reason}") from error
    if not dist.is_initialized():
        raise InputError("the process group was not joined: init_process_group was not called (region 2a.1)")
    joined = (dist.get_rank(), dist.get_world_size())
    if joined != (config.rank, config.world_size):
        wanted = f"rank {config.rank} of {config.world_size}"
        raise InputError(f"expected to join as {wanted}, but joined as rank {joined[0]} of {joined[1]} (region 2a.1)")


def _reason(error: BaseException) -> str:
    """The first sentence of gloo's message without the place in its sources, or what NCCL calls its last error."""
    general, _, last = str(error).partition("Last error:")
    sentence = (last.strip() or general).splitlines()[0].split(". ")[0]
    return sentence.split("] ", 1)[-1][:120]


_SIGNS = ("closed by peer", "connection reset", "broken pipe", "connection refused", "socket closed", "timed out")
_MISUSE = ("invalid usage", "invalid argument", "ncclinvalid", "duplicate gpu", "unhandled cuda error")  # of NCCL


def _is_lost_contact(error: RuntimeError) -> bool:
    text = str(error).lower()
    if any(sign in text for sign in _MISUSE):
        return False
    return isinstance(error, dist.DistError) or any(sign in text for sign in _SIGNS)
