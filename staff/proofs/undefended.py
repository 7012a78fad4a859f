"""Switches single defences off, to prove that each is needed: an attack that gains nothing without it proves nothing.

For staff/attacks.py alone, as a supervisor of its own: the one that grades students imports nothing of this. The names
come in its job, in a process that no submission is in.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import ast
import atexit
import dataclasses
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grader import compare, grading, imports, memory_limits, ranks
from grader.arithmetic import FLOAT32, Tolerance
from grader.ranks import broker, one_run, peer, zygote_process
from grader.ranks.outcome import Failure, RankResult, Result
from grader.wire import values
from staff.sandbox import supervisor
from tests.beyond import test_grid, test_one_f_one_b
from tests.gradients import test_averaging as averaging
from tests.start import test_joining
from tests.task1 import test_bert
from tests.task2b import test_loaders as loaders
from tests.task2b import test_partitions as partitions
from tests.task4 import test_traffic as traffic
from tests.training import loop_shared
from tests.training import test_ddp as ddp
from tests.training import test_sampling as sampling


def switch_off(names: Sequence[str]) -> None:
    """In the process of the graders, before pytest is there. Names of walls are for others; see supervisor."""
    for name in names:
        if name in SWITCHES:
            SWITCHES[name]()


def replace(owner: object, name: str, value: object) -> None:
    """Set what is there. A name that has gone would leave its defence on, and its attacks would prove nothing."""
    if not hasattr(owner, name):
        raise AttributeError(f"{owner} has no {name} to switch off: where has it moved to?")
    setattr(owner, name, value)


def _one_process() -> None:
    """A student's code runs in the graders' own process, as in most autograders, and so do exit handlers."""
    replace(ranks, "run", _run_here)
    replace(ranks, "start", lambda: None)
    leave = os._exit

    def exit_as_usual(code: int) -> None:
        atexit._run_exitfuncs()
        leave(code)

    replace(os, "_exit", exit_as_usual)


class NoWire:
    """Stands where a rank's line to the grader was."""

    def __init__(self) -> None:
        self.pending: dict[int, Any] = {}

    def event(self, name: str, data: dict) -> None:
        """Nobody listens."""


def _run_here(world_size: int, arguments: dict[str, Any], **options: object) -> Result:
    """What ranks.run does, without ranks; the value is whatever object the student's code made."""
    import pytest

    from grader.inside.context import Context
    from grader.inside.run_source import run_source

    Context.join = lambda *_: None  # type: ignore[assignment, method-assign]
    tree, results = str(options["tree"]), []
    sys.path.insert(0, tree)
    for rank in range(world_size):
        job = {"arguments": arguments, "tree": tree}
        packed = values.pack(one_run.rank_job(job, rank) | {"world_size": world_size})
        header, body = values.LENGTHS.unpack_from(packed)
        start = values.LENGTHS.size
        own_job = values.unpack(packed[start : start + header], packed[-body:] if body else b"", values.to_tensor)
        try:
            value = run_source(Context(NoWire(), own_job))  # type: ignore[arg-type]
            results.append(RankResult(rank, "returned", value))
        except pytest.exit.Exception:
            raise
        except Exception as error:
            results.append(RankResult(rank, "raised", error=Failure(type(error).__name__, str(error))))
    return Result(results, None, [], 0.0)


def _pickles() -> None:
    """Values come as pickles, as torch.multiprocessing and its queues send them."""
    plain = values.unpack

    def unpack(header: bytes, body: bytes, make: values.MakeArray) -> Any:
        return pickle.loads(header) if header[:1] == b"\x80" else plain(header, body, make)

    replace(values, "unpack", unpack)


def _everyone_knows_all() -> None:
    """Every rank is told what all of them start with."""
    own = one_run.rank_job

    def all_jobs(job: dict, rank: int) -> dict:
        rank_job = own(job, rank)
        rank_job["arguments"]["all"] = job["arguments"].get("each", [])
        return rank_job

    replace(one_run, "rank_job", all_jobs)


def _no_origins() -> None:
    """Nobody asks whether a student's line or a library makes a call."""
    parse = broker.parse_call

    def parse_call(rank: int, message: dict) -> Any:
        return parse(rank, message | {"inside": ""})

    replace(broker, "parse_call", parse_call)


def _no_deadlines() -> None:
    """A run may take as long as it likes; only the deadline of all tests together is left."""
    initialise = grading.Session.__init__

    def patient(session: grading.Session, *arguments: Any) -> None:
        initialise(session, *arguments)
        session.slowness = 1e6

    replace(grading.Session, "__init__", patient)


def _no_limits_of_messages() -> None:
    for limit in ("MAX_HEADER", "MAX_BODY"):
        replace(values, limit, 1 << 40)


def _no_sweep() -> None:
    """Neither the zygote nor the supervisor looks for what is left."""
    _in_the_zygote("grader.inside.zygote", {"kill_all": "lambda _: set()", "KILL_TIME": "1"})


def _in_the_zygote(module: str, changes: Mapping[str, str]) -> None:
    """Replace these names of a module, by code, in the process that starts the ranks, before it begins."""
    popen, code = subprocess.Popen, f"import {module}; "
    code += "; ".join(f"{module}.{name} = {value}" for name, value in changes.items())

    def start(command: list[str], **options: Any) -> Any:
        if command[2:3] == ["-c"]:
            command[3] = command[3].replace("; main(", f"; {code}; main(")
        return popen(command, **options)

    replace(zygote_process.subprocess, "Popen", start)


def _nan_is_small() -> None:
    """Comparisons ask whether an error is too large, which it is not if it is no number."""

    def close(got: object, expected: np.ndarray, total: float, slack: float = 1.0) -> bool:
        limit = slack * (1e-5 * np.linalg.norm(np.ravel(expected)) + 1e-7 * total)
        return got is not None and not np.any(np.abs(np.asarray(got, np.float64) - expected) > limit)

    def numbers_close(got: object, expected: np.ndarray, tolerance: Tolerance = FLOAT32) -> bool:
        return close(got, expected, tolerance.total, tolerance.slack)

    replace(compare, "close", numbers_close)


def _import_statements_only() -> None:
    """Of what a file imports only its own import statements are seen."""

    def imported(path: Path, file: str) -> list[tuple[int, str]]:
        nodes = ast.walk(ast.parse(path.read_bytes(), file))
        return [(node.lineno, alias.name) for node in nodes if isinstance(node, ast.Import) for alias in node.names]

    replace(imports, "imported", imported)
    replace(imports, "_students", lambda *_: [])


def _ranks_are_believed() -> None:
    """What a rank says of itself counts without anything beside it that is computed here."""
    replace(partitions, "texts", lambda _, count: [f"text {number}" for number in range(count)])
    for module, name in (
        (partitions, "must_be_exact"), (loaders, "check_divided_at_random"), (averaging, "check_used"),
        (traffic, "check_recorded_first"),
        (test_joining, "check_group"), (sampling, "check_trained_on"), (test_bert, "check_logits"),
        (ddp, "check_own_gradients_sent"), (test_one_f_one_b, "check_messages"), (test_grid, "check_sums"),
    ):  # fmt: skip
        replace(module, name, lambda *_: None)
    replace(loop_shared.Training, "parameters", _believed)
    no_sums = {"path": __file__, "before": 0, "lines": ["sums_over_group = lambda own: []"]}
    joining = test_joining.join_group
    replace(test_joining, "join_group", dataclasses.replace(joining, sources=(*joining.sources, no_sums)))


def _measured_ranks_write() -> None:
    """A rank whose memory is looked at may write files."""
    ask = zygote_process.ZygoteProcess.request

    def request(self: Any, **message: Any) -> None:
        ask(self, **message | ({"measures": False} if "measures" in message else {}))

    replace(zygote_process.ZygoteProcess, "request", request)


def _believed(training: loop_shared.Training, rank: int, number: int) -> dict[str, np.ndarray]:
    """The parameters before a step, as the rank tells them; after the last step, those before it."""
    training.used[rank].append({})  # no gradients are followed from step to step
    made = training.ranks[rank].steps
    return training.weights | (made[min(number, len(made) - 1)].data["parameters"] if made else {})


SWITCHES: dict[str, Callable[[], None]] = {
    "process": _one_process,
    "json": _pickles,
    "each": _everyone_knows_all,
    "origin": _no_origins,
    "output": lambda: replace(peer, "MAX_OUTPUT", 1 << 40),
    "deadlines": _no_deadlines,
    "messages": _no_limits_of_messages,
    "sweep": _no_sweep,
    "finite": _nan_is_small,
    "imports": _import_statements_only,
    "evidence": _ranks_are_believed,
    "measure": lambda: replace(memory_limits, "check", lambda *_: None),
    "no_files": _measured_ranks_write,
}


if __name__ == "__main__":
    supervisor.main(lambda job: switch_off(job.off))
