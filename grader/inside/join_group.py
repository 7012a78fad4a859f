"""Replaces init_process_group in a rank: sends its arguments to the grader, then joins the broker's group.

No port and no file is opened, so tcp://10.10.1.1:23456 of a handout can be joined on any machine. What torch checks
first (the timeout, a missing port, rank or environment variable) is checked here too.
"""

import datetime
import functools
import inspect
import os
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from grader.inside.backend import BrokeredGroup
from grader.wire.connection import Wire
from grader.wire.values import Fields

OF_INIT, OF_NEW_GROUP = inspect.signature(dist.init_process_group), inspect.signature(dist.new_group)


def install(wire: Wire, rank: int, world_size: int) -> None:
    """Let init_process_group and new_group of this process make the grader's groups, for every backend."""
    real_init = dist.init_process_group
    joined = 0

    def create(options: Any, _backend_options: object) -> BrokeredGroup:
        members = options.global_ranks_in_group or list(range(world_size))
        return BrokeredGroup(wire, f"{joined}/{options.group_id}", members, options.group_rank)

    @functools.wraps(real_init)
    def init_process_group(*arguments: Any, **keywords: Any) -> None:
        """Report the arguments to the grader, wait for all ranks, and make the broker's group."""
        nonlocal joined
        given = OF_INIT.bind(*arguments, **keywords).arguments
        if os.getpid() != wire.pid or dist.is_initialized():
            return real_init(*arguments, **keywords)  # the student's own process, or torch's error for joining twice
        fields = rendezvous(given) | {"backend": str(given["backend"]) if given.get("backend") else None}
        joined += 1
        group = {"group": f"{joined}/join", "members": list(range(world_size)), "join": fields}
        wire.answer(wire.post("init_process_group", group, waits=True), announced=True)
        real_init("grader", store=dist.HashStore(), rank=rank, world_size=world_size)

    real_new_group = dist.new_group

    @functools.wraps(real_new_group)
    def new_group(*arguments: object, **keywords: object) -> object:
        """Make the grader's group whatever backend is asked for, as init_process_group does."""
        given = OF_NEW_GROUP.bind(*arguments, **keywords).arguments
        if given.get("backend") is not None and os.getpid() == wire.pid:
            given["backend"] = "grader"
        return real_new_group(**given)

    dist.Backend.register_backend("grader", create, extended_api=True, devices=["cpu"])
    for module in (dist, c10d):
        setattr(module, "init_process_group", init_process_group)  # noqa: B010 (mypy: a function is not assigned to)
        setattr(module, "new_group", new_group)  # noqa: B010


def rendezvous(given: Fields) -> Fields:
    """Return where the student wants to meet: init_method, address, rank and world_size. A missing number is -1.

    Raises what torch does: ValueError for a missing environment variable, a port, a rank or a size; TypeError for a
    timeout of another type, such as a size that is passed by position.
    """
    if not isinstance(given.get("timeout"), datetime.timedelta | None):
        raise TypeError(f"Expected timeout argument to be of type datetime.timedelta, got {given['timeout']}")
    rank, size = int(given.get("rank", -1)), int(given.get("world_size", -1))
    if given.get("store") is not None:
        return {"init_method": None, "address": "a store", "rank": rank, "world_size": size}
    method = given.get("init_method") or "env://"
    parts = urlsplit(method)
    if parts.scheme == "env":
        rank = int(_variable("RANK")) if rank == -1 else rank
        size = int(_variable("WORLD_SIZE")) if size == -1 else size
        address = f"{_variable('MASTER_ADDR')}:{int(_variable('MASTER_PORT'))}"
    elif parts.scheme == "tcp":
        if not parts.hostname or parts.port is None:
            raise ValueError(f"init_method must name a host and a port, tcp://HOST:PORT, got {method}")
        address = f"{parts.hostname}:{parts.port}"
        query = parse_qs(parts.query)  # tcp://HOST:PORT?rank=0&world_size=4
        rank = int(query["rank"][0]) if rank == -1 and "rank" in query else rank
        size = int(query["world_size"][0]) if size == -1 and "world_size" in query else size
    elif parts.scheme == "file":
        address = parts.path
    else:
        raise ValueError(f"init_method must start with tcp://, env:// or file://, got {method}")
    if rank < 0 or size < 1:
        raise ValueError(f"{parts.scheme}:// needs a rank and a world_size, got rank {rank} and world_size {size}")
    return {"init_method": method, "address": address, "rank": rank, "world_size": size}


def _variable(name: str) -> str:
    if not os.environ.get(name):
        raise ValueError(f"env:// needs the environment variable {name}, which is not set: assign it in os.environ")
    return os.environ[name]
