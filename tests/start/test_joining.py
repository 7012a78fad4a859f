"""Joining a process group: 2a.1 at a tcp:// address, 2b.6 through the environment.

The rank itself reports the arguments of init_process_group. They count only if the group works: over it, ranks add up
numbers of which each rank knows only its own, and every rank must receive the sum.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest

from grader.arithmetic import Tolerance, close, norm
from grader.compare import Expected, check
from grader.grading import Grade
from grader.in_rank import in_rank, run_to_any_end
from grader.ranks.calls import Call
from grader.ranks.outcome import Result
from grader.wire import drawn
from grader.wire.values import Fields
from tests.training import loop_shared

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, Tensor, dist, nn, torch, unchanged
    from tests.training.config_in_rank import make_config

graded = pytest.mark.graded
CRASHES = loop_shared.CRASHES
GLUE = "task2a_gather_scatter/run_glue.py"
COURSE_HOST, COURSE_PORT = "127.0.0.1", "11868"
OF_A_SCHEDULER = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "5", "BACKEND": "mpi"}
OF_ANOTHER = {  # what a scheduler or an earlier call has set, and the function must not use
    "join": {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"} | OF_A_SCHEDULER,
    "setup": OF_A_SCHEDULER,
}


class JoinSetting(NamedTuple):
    """How a group is joined. `environment`: variables that are already set; `of_another`: so are OF_ANOTHER."""

    ranks: int
    host: str = COURSE_HOST
    port: str = COURSE_PORT
    backend: str = "gloo"
    environment: tuple[str, ...] = ()
    of_another: bool = False

    @property
    def already_set(self) -> dict[str, str]:
        values = {"MASTER_ADDR": self.host, "MASTER_PORT": self.port}
        return {name: values[name] for name in self.environment}


# --- what a rank does ---


def set_environment(context: Context) -> None:
    import os

    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update(context.arguments["environment"])


def refuse_to_join(context: Context) -> None:
    """Let torch's function fail, as it does if the other workers never come, and a store be no way to join."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the other workers did not come")

    def no_store(*_: object, **__: object) -> None:
        raise RuntimeError("a store is made, but the group is joined at a URL: pass init_method")

    set_environment(context)
    dist.TCPStore = no_store  # type: ignore[assignment, misc]
    if context.arguments["fails"]:
        dist.init_process_group = torch.distributed.distributed_c10d.init_process_group = fail


def sums_over_group(own: Tensor) -> list[Tensor]:
    """Return the sum of all ranks' numbers, over the joined group and over a new group of the same ranks."""
    sums: list[Tensor] = []
    for make in (lambda: None, dist.new_group) if dist.is_initialized() else ():
        number = own.clone()
        dist.all_reduce(number, group=make())
        sums.append(number)
    return sums


@in_rank(
    uses=["tests/training/config_in_rank.py", set_environment, refuse_to_join, sums_over_group], preload=["scripts"],
    first="refuse_to_join", join=False,
)  # fmt: skip
def join_group(context: Context, lesson: ModuleType, inputs: Tensor) -> Fields:
    """Call join(config), or setup(rank, world_size, backend), and return what it leaves."""
    import os

    arguments = context.arguments
    with unchanged(nn.Module()) as changed:
        try:
            if arguments["calls"] == "join":
                lesson.join(make_config(context, "GlueConfig", **arguments["config"]))
            else:
                lesson.setup(context.rank, context.world_size, arguments["config"]["backend"])
        except RuntimeError:
            if not arguments["fails"]:
                raise
            return {"raised": True}
    group = [dist.get_rank(), dist.get_world_size()] if dist.is_initialized() else []
    return {
        "raised": False,
        "joined": group == [context.rank, context.world_size],
        "environment": {name: os.environ.get(name) for name in arguments["environment"]},
        "changed": [name for name in changed if name != "the process group"],
        "sums": sums_over_group(inputs),
    }


# --- what is right ---


def check_joined(grade: Grade, calls: str, setting: JoinSetting) -> None:
    """Check that every rank joins with the right address, rank, size and backend, and that the group works."""
    config = {"master_ip": setting.host, "master_port": int(setting.port), "backend": setting.backend}
    environment = setting.already_set | (OF_ANOTHER[calls] if setting.of_another else {})
    numbers = [drawn.generator(grade.seed, 6, setting.ranks, rank).normal(size=3) for rank in range(setting.ranks)]
    arguments: Fields = {"calls": calls, "config": config, "environment": environment}
    result = run_to_any_end(grade, join_group, numbers, fails=False, **arguments)
    for rank, call in enumerate(calls_of_joining(grade, result)):
        check_call(grade, rank, call, calls, setting)
    grade.must_return(result)
    expected = {
        "joined": Expected(True, f"there is no process group of size {setting.ranks} when {calls}() returns"),
        "changed": Expected([], f"{calls}() changes {{got}}, but must leave it unchanged"),
    }
    for name, value in setting.already_set.items():
        set_again = f"{name}={value} is set already, but {calls}() changes it to {{got}}: keep existing values"
        expected[name] = Expected(value, set_again)
    for rank, got in enumerate(result.values):
        check(grade, f"on rank {rank}, ", got | got["environment"], expected)
    check_group(grade, result, numbers)


def calls_of_joining(grade: Grade, result: Result) -> list[Call]:
    """Return each rank's call of init_process_group."""
    calls = [next((call for call in rank.calls if call.name == "init_process_group"), None) for rank in result.ranks]
    for rank, call in enumerate(calls):
        if call is None:
            workers = "1 worker" if len(calls) == 1 else f"{len(calls)} workers"
            raise grade.lacking(result, f"in a run with {workers}, rank {rank} never called init_process_group")
    return [call for call in calls if call]


def check_call(grade: Grade, rank: int, call: Call, calls: str, setting: JoinSetting) -> None:
    """Check that init_process_group is called with this rank, size, backend and address.

    The rank reports the address as torch would find it: from tcp://, else MASTER_ADDR and MASTER_PORT.
    """
    got = {
        "place": f"rank {call.data['rank']} of {call.data['world_size']}",
        "backend": call.data["backend"] or "gloo",  # torch's choice, where the course has no GPU
        "address": call.data["address"].replace("localhost", COURSE_HOST),
    }
    started = (
        f"{setting.ranks} processes were started, but rank {rank} joins as {{got}} ({call.where}): in a real run, "
    )
    name = "config.backend" if calls == "join" else "backend"
    rank_and_size = "rank and world_size"
    if calls == "join":
        rank_and_size = "config.rank and config.world_size (config.rank_on_node begins at 0 on every node)"
    backend = f"expected the backend {{expected}} ({name}), got {{got}} ({call.where}): pass {name}"
    source = "build it from config.master_ip and config.master_port"
    if setting.of_another:
        source += ", whatever MASTER_ADDR and MASTER_PORT are already (setdefault keeps an old value)"
    if calls == "setup":
        source = (
            "all ranks meet where rank 0 listens, so set the same MASTER_ADDR and MASTER_PORT on each, where they are "
            "not set already"
        )
    address = f"expected the address {{expected}}, got {{got}} ({call.where})"
    if already := " and ".join(f"{name}={value}" for name, value in setting.already_set.items()):
        keep = "keep existing values, each by itself (os.environ.setdefault), and join with env://"
        address, source = f"{already} is set already, so {address}", keep
    expected = {
        "place": Expected(
            f"rank {rank} of {setting.ranks}", started + f"all ranks would wait forever; pass {rank_and_size}"
        ),
        "backend": Expected(setting.backend, f"{backend} to init_process_group"),
        "address": Expected(f"{setting.host}:{setting.port}", f"{address}: {source}"),
    }
    check(grade, f"rank {rank}: ", got, expected)


def check_group(grade: Grade, result: Result, numbers: list[np.ndarray]) -> None:
    """Check that each rank sent its own number and received the sum, over the joined group and the new one."""
    for rank, one in enumerate(result.ranks):
        sent = [call.sent_arrays().ravel() for call in one.calls if call.name == "all_reduce"][-2:]
        sums = result.values[rank]["sums"]
        complete = len(sent) == len(sums) == 2 and all(np.array_equal(number, numbers[rank]) for number in sent)
        exact = Tolerance(norm(numbers))
        if not complete or not all(close(total, np.sum(numbers, axis=0), exact) for total in sums):
            words = "an all_reduce over the group that was joined does not give the sum of all ranks"
            grade.fail(observed=f"rank {rank}: {words}")


def draw_address(grade: Grade, ports: int) -> tuple[str, str]:
    return f"10.10.1.{grade.draw.integers(2, 250)}", str(grade.draw.integers(2000, ports))


# --- the graded tests ---


def check_failure(grade: Grade, calls: str) -> None:
    """Check that the exception of a join that fails reaches the caller."""
    config = {"master_ip": COURSE_HOST, "master_port": int(COURSE_PORT), "backend": "gloo"}
    result = run_to_any_end(grade, join_group, [None], calls=calls, config=config, environment={}, fails=True)
    grade.must_return(result)
    if not result.values[0]["raised"]:
        grade.fail(
            f"init_process_group raised an exception, but {calls}() returns as if the group was joined: do not catch it"
        )


def check_join(grade: Grade) -> None:
    """Check that join(config) uses address, port, size, rank and backend of the configuration."""
    for ranks, backend, of_another in ((3, "gloo", False), (2, "nccl", True), (1, "gloo", False)):
        setting = JoinSetting(ranks, *draw_address(grade, 60000), backend, of_another=of_another)
        check_joined(grade, "join", setting)
    check_failure(grade, "join")


@graded("2a.1", weight=2)
def test_the_group_is_joined_where_and_as_it_was_told(grade: Grade) -> None:
    check_join(grade)


@graded("2a.1", absence=True)
def test_task2a_imports_only_what_the_course_allows(grade: Grade) -> None:
    grade.imports_only_allowed(GLUE)


@graded("2b.6")
def test_setup_joins_at_the_courses_address(grade: Grade) -> None:
    check_joined(grade, "setup", JoinSetting(3))
    check_joined(grade, "setup", JoinSetting(1))
    check_failure(grade, "setup")


@graded("2b.6")
def test_setup_joins_with_the_rank_size_and_backend_it_was_given(grade: Grade) -> None:
    host, port = draw_address(grade, 9000)
    both = ("MASTER_ADDR", "MASTER_PORT")
    check_joined(grade, "setup", JoinSetting(2, host, port, environment=both))
    check_joined(grade, "setup", JoinSetting(3, host, port, "nccl", environment=both, of_another=True))
    check_joined(grade, "setup", JoinSetting(2, port=port, environment=("MASTER_PORT",)))
    check_joined(grade, "setup", JoinSetting(2, host, environment=("MASTER_ADDR",)))
