"""Judges where and as whom the ranks join a process group, and the processes that run_gpt2.py starts."""

import re

from grader.calls import Call
from grader.grading import Grade
from grader.outcome import Result
from grader.verdicts import builds_on, last_words, not_attempted

COURSE_ADDRESSES = ("127.0.0.1:11868", "localhost:11868")
PATIENCE = 3.0  # seconds in which all processes must be seen running at once


def check_join(grade: Grade) -> None:
    """join(config) meets at the given address and port, with the given size, rank and backend."""
    for world_size, backend in ((3, "gloo"), (2, "nccl"), (1, "gloo")):
        host = f"10.10.1.{grade.draw.integers(2, 250)}"
        port = int(grade.draw.integers(2000, 60000))
        config = {"master_ip": host, "master_port": port, "backend": backend}
        result = grade.run("grader.probes_sync:join", world_size, config=config)
        _check_joined(grade, result, f"{host}:{port}", world_size, backend)
        for rank, value in enumerate(result.values):
            if not value["joined"]:
                grade.fail(f"rank {rank} has left the process group again when join() returns")
            if value["changed"]:
                grade.fail(f"join() changes {value['changed'][0]} on rank {rank}: leave it as it was")


def check_setup_address(grade: Grade) -> None:
    """setup(rank, world_size, backend) meets at the course's address."""
    result = grade.run("grader.probes_sync:setup", 3, backend="gloo", environment={})
    for rank, join in enumerate(_joins(grade, result)):
        _check_address(grade, rank, join, COURSE_ADDRESSES)


def check_setup(grade: Grade) -> None:
    """setup(rank, world_size, backend) joins as it was told.

    An address that is set already may be kept, or replaced by the course's literal: both are in use.
    """
    host, port = "10.10.1.3", str(grade.draw.integers(2000, 9000))
    for world_size, backend in ((2, "gloo"), (3, "nccl")):
        environment = {"MASTER_ADDR": host, "MASTER_PORT": port}
        result = grade.run("grader.probes_sync:setup", world_size, backend=backend, environment=environment)
        for rank, join in enumerate(_joins(grade, result)):
            _check_identity(grade, rank, join, world_size, backend)
            _check_address(grade, rank, join, (f"{host}:{port}", *COURSE_ADDRESSES))
        grade.must_return(result)


def _check_joined(grade: Grade, result: Result, address: str, world_size: int, backend: str) -> None:
    for rank, join in enumerate(_joins(grade, result)):
        _check_identity(grade, rank, join, world_size, backend, "config.backend")
        _check_address(grade, rank, join, (address,))
    grade.must_return(result)


def _joins(grade: Grade, result: Result) -> list[Call]:
    """Each rank's call of init_process_group."""
    joins = [next((call for call in rank.calls if call.name == "init_process_group"), None) for rank in result.ranks]
    for rank, join in enumerate(joins):
        if join is None:
            raise grade.lacking(result, f"rank {rank} never called init_process_group")
    return [join for join in joins if join]


def _check_identity(grade: Grade, rank: int, join: Call, world_size: int, backend: str, given: str = "backend") -> None:
    asked = join.data
    if (asked["rank"], asked["world_size"]) != (rank, world_size):
        grade.fail(
            f"{world_size} processes were started, and rank {rank} joins as rank {asked['rank']} of "
            f"{asked['world_size']} ({join.where}): in a real run all would wait"
        )
    if asked["backend"] not in (None, backend) or (asked["backend"] is None and backend != "gloo"):
        grade.fail(
            f"rank {rank}: {given} is {backend} in this run, got {asked['backend']} ({join.where}): pass {given} on, "
            "and name no backend yourself"
        )


def _check_address(grade: Grade, rank: int, join: Call, accepted: tuple[str, ...]) -> None:
    if join.data["address"] not in accepted:
        grade.fail(f"rank {rank}: expected to meet at {accepted[0]}, got {join.data['address']} ({join.where})")


def check_started(grade: Grade) -> None:
    """start_workers starts a process for every rank, all before it waits for the first, and waits for all."""
    for world_size, slowest in ((3, 0), (2, 1)):
        patience = PATIENCE * grade.session.slowness
        setting = {"workers": world_size, "slowest": slowest, "patience": patience}
        (value,) = grade.values("grader.probes_start:workers", 1, **setting)
        if value["in_this_process"]:
            grade.fail("work() runs in the script's own process: target=work is to be named, not called")
        if value["unfinished"]:
            grade.fail(f"{value['unfinished']} processes still run when start_workers returns: join every one of them")
        started = sorted(value["ranks"])
        if started != list(range(world_size)):
            grade.fail(
                f"expected work(rank, config) in {world_size} processes, ranks 0 to {world_size - 1}, got {started}"
            )
        if not value["together"]:
            grade.fail("the processes run one after the other: start all of them before you wait for the first")
        if value["returned"] != world_size:
            grade.fail(f"expected the list of {world_size} processes back, got {value['returned']}")


def check_script(grade: Grade) -> None:
    """The whole script: both workers train on parts of their own and end with the same weights."""
    grade.check_written(grade.file, "common/data_partition.py")  # the start alone takes many seconds
    result = grade.run("grader.probes_start:script", 1, deadline=60.0, slowness=grade.session.slowness)
    stderr = result.ranks[0].stderr
    if todo := re.search(r"NotImplementedError: TODO ([0-9a-z]+\.[0-9]+)", stderr):
        raise not_attempted(grade.region) if todo[1] == grade.region else builds_on(todo[1])
    grade.must_return(result)
    value, said = result.values[0], last_words(stderr)
    if value["failed"]:
        grade.fail(f"the script ended with an error: {value['failed']}\n{said}")
    if value["records"] != 2:
        grade.fail(f"expected the record of 2 workers, got {value['records']}\n{said}")
    if any(len(losses) != value["steps"] for losses in value["losses"]):
        grade.fail(
            f"expected {value['steps']} losses of each worker, got {[len(losses) for losses in value['losses']]}"
        )
    if value["losses"][0] == value["losses"][1]:
        grade.fail("both workers record the same losses: they train on the same examples")
