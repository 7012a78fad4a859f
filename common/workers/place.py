"""Where a worker is among the others: from the flags, or from torchrun's environment; checked before it joins."""

from argparse import Namespace
from collections.abc import Mapping

from common.config import Place
from common.errors import InputError
from common.flags import integer_of, or_default
from common.workers.machine import device_and_backend, workers_on_machine

WORLD_SIZES = range(1, 65)
NOT_GIVEN = -1  # a rank; scripts of others pass it to say that there is one worker
PORT = 6585
COURSE_PORT = 11868  # of the course's `setup`


def place_worker(flags: Namespace, environment: Mapping[str, str]) -> Place:
    """Return the place of this worker, from the flags or from torchrun's environment.

    The rank among all workers is the first of: --local_rank, torchrun's RANK, --local-rank (which
    torch.distributed.launch passes), and 0 where there is one worker.
    """
    under_torchrun = "RANK" in environment and "WORLD_SIZE" in environment
    torchrun = environment if under_torchrun else {}

    def number(name: str, flag: str, default: int) -> int:
        value: int | None = getattr(flags, flag)
        if value is None or value == NOT_GIVEN:
            return integer_of(torchrun, name, default, f"--{flag}")
        return value  # the environment may hold anything then

    world_size = number("WORLD_SIZE", "world_size", 1)
    alone = 0 if world_size == 1 else NOT_GIVEN
    rank = number("RANK", "local_rank", alone if flags.dashed_local_rank == NOT_GIVEN else flags.dashed_local_rank)
    rank_on_node = integer_of(torchrun, "LOCAL_RANK", rank)
    master_ip = or_default(flags.master_ip, torchrun.get("MASTER_ADDR", "127.0.0.1"))
    master_port = number("MASTER_PORT", "master_port", PORT)
    workers = workers_on_machine(world_size, master_ip, environment)
    no_cuda, backend = device_and_backend(workers, flags.no_cuda, flags.backend, speaks=rank == 0)
    return _checked(Place(rank, rank_on_node, world_size, master_ip, master_port, backend, no_cuda))


def place_starter(flags: Namespace, world_size: int, port: int, environment: Mapping[str, str]) -> Place:
    """Return the place of a script that starts its workers itself; `world_size` and `port` are its defaults."""
    if {flags.local_rank, flags.dashed_local_rank} != {NOT_GIVEN} or "RANK" in environment:
        raise InputError(
            "this script starts its workers itself, on this machine: do not pass --local_rank or use torchrun, "
            "or start task3_ddp/run_gpt2.py"
        )
    world_size = or_default(flags.world_size, world_size)
    master_ip, master_port = or_default(flags.master_ip, "127.0.0.1"), or_default(flags.master_port, port)
    no_cuda, backend = device_and_backend(world_size, flags.no_cuda, flags.backend, speaks=True)
    return _checked(Place(0, 0, world_size, master_ip, master_port, backend, no_cuda))


def _checked(place: Place) -> Place:
    """Return the place. Raises InputError for a rank, a world size or a port that cannot be."""
    if place.world_size not in WORLD_SIZES:
        sizes = f"{WORLD_SIZES[0]} to {WORLD_SIZES[-1]}"
        raise InputError(f"--world_size: expected {sizes} workers, got {place.world_size}")
    if not 0 <= place.rank < place.world_size:
        got = "it was not given" if place.rank == NOT_GIVEN else f"got {place.rank}"
        raise InputError(
            f"--local_rank: expected 0 to {place.world_size - 1} with --world_size {place.world_size}; {got}"
        )
    if not 1023 < place.master_port < 65536:
        raise InputError(f"--master_port: expected 1024 to 65535 (lower ones need root), got {place.master_port}")
    return place
