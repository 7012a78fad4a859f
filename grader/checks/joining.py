"""Judges where and as whom the ranks join a process group, and that they meet there.

What init_process_group was told comes from the rank itself. It counts only beside a collective over the group that was
joined, of numbers that each rank got alone: their sum has to come back.
"""

from typing import Any

import numpy as np

from grader.grading import Grade
from grader.ranks.calls import Call
from grader.ranks.outcome import Result
from grader.wire import drawn


def check_join(grade: Grade) -> None:
    """join(config) meets at the given address and port, with the given size, rank and backend."""
    for world_size, backend in ((3, "gloo"), (2, "nccl"), (1, "gloo")):
        host = f"10.10.1.{grade.draw.integers(2, 250)}"
        port = int(grade.draw.integers(2000, 60000))
        config = {"master_ip": host, "master_port": port, "backend": backend}
        result = run_join(grade, "grader.probes.sync:join", world_size, config=config)
        _check_joined(grade, result, f"{host}:{port}", world_size, backend)
        for rank, value in enumerate(result.values):
            if not value["joined"]:
                grade.fail(f"rank {rank} is no longer in the process group when join() returns")
        check_met(grade, result)
        for rank, value in enumerate(result.values):
            if value["changed"]:
                grade.fail(f"join() changes {value['changed'][0]} on rank {rank}, but must leave it unchanged")


def run_join(grade: Grade, probe: str, world_size: int, **arguments: Any) -> Result:
    """A probe that joins and then sums a number of each rank over the group."""
    return grade.run(probe, world_size, payloads=True, each=_numbers(grade, world_size), **arguments)


def _numbers(grade: Grade, world_size: int) -> list[np.ndarray]:
    return [drawn.generator(grade.seed, 6, world_size, rank).normal(size=3) for rank in range(world_size)]


def check_met(grade: Grade, result: Result) -> None:
    """Each rank has handed in its own number, and has got the sum of all, over the joined group and one made of it."""
    numbers = _numbers(grade, len(result.ranks))
    for rank, mine in enumerate(result.ranks):
        sent = [call.sent_arrays().ravel() for call in mine.calls if call.name == "all_reduce"][-2:]
        sums = result.values[rank]["sums"]
        whole = len(sent) == len(sums) == 2 and all(np.array_equal(number, numbers[rank]) for number in sent)
        if not whole or not all(np.shape(total) == (3,) and np.allclose(total, sum(numbers)) for total in sums):
            grade.fail(f"rank {rank}: an all_reduce over the group that was joined does not give the sum of all ranks")


def _check_joined(grade: Grade, result: Result, address: str, world_size: int, backend: str) -> None:
    for rank, join in enumerate(joins(grade, result)):
        check_identity(grade, rank, join, world_size, backend, "config.backend")
        check_address(grade, rank, join, (address,))
    grade.must_return(result)


def joins(grade: Grade, result: Result) -> list[Call]:
    """Each rank's call of init_process_group."""
    found = [next((call for call in rank.calls if call.name == "init_process_group"), None) for rank in result.ranks]
    for rank, join in enumerate(found):
        if join is None:
            raise grade.lacking(result, f"rank {rank} never called init_process_group")
    return [join for join in found if join]


def check_identity(grade: Grade, rank: int, join: Call, world_size: int, backend: str, given: str = "backend") -> None:
    asked = join.data
    if (asked["rank"], asked["world_size"]) != (rank, world_size):
        grade.fail(
            f"{world_size} processes were started, but rank {rank} joins as rank {asked['rank']} of "
            f"{asked['world_size']} ({join.where}): in a real run, all ranks would wait forever"
        )
    if asked["backend"] not in (None, backend) or (asked["backend"] is None and backend != "gloo"):
        grade.fail(
            f"rank {rank}: expected the backend {backend} ({given}), got {asked['backend']} ({join.where}): "
            f"pass {given} to init_process_group"
        )


def check_address(grade: Grade, rank: int, join: Call, accepted: tuple[str, ...]) -> None:
    if join.data["address"] not in accepted:
        grade.fail(f"rank {rank}: expected the address {accepted[0]}, got {join.data['address']} ({join.where})")
