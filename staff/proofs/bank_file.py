"""Grades the entries of a file from elsewhere: `python -m staff.mistakes --bank FILE.toml`.

Entries that loop for ever, end their rank or the process that grades it, or do not apply are reported like all others.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from common.errors import InputError
from staff.proofs.bank import Entry, load_file
from staff.proofs.grading_pool import Test, collect, collect_copies, worker_processes
from staff.proofs.verdict import Tests, Verdict, judge

LONGEST_ERROR = 500  # characters
COPIES = "copies"  # stands for the test of a file's copies; graders have names that begin with test_


def judge_anything(entry: Entry, tests: Tests, seed: int) -> Verdict:
    """Run all these graders on an entry from elsewhere. Whatever keeps it from being graded is its error."""
    try:
        if entry.error:
            raise InputError(entry.error)
        return judge(entry, tests, True, [seed])
    except Exception as error:
        words = str(error) if isinstance(error, (InputError, TimeoutError)) else f"{type(error).__name__}: {error}"
        return Verdict(entry, {}, seed, error=" ".join(words.split())[:LONGEST_ERROR])


def judge_file(entries: Sequence[Entry], workers: int, seed: int) -> Iterator[Verdict]:
    """Yield the verdicts on a file's entries, in order, each with all graders of its task and of the copies it changes.

    If an entry ends the process that grades it, the next one is graded alone, so that the right one is blamed.
    """
    rest, alone = list(entries), False
    tests: Tests | None = None
    copies: dict[str, str] = {}
    while rest:
        ended = False
        with worker_processes(1 if alone else workers) as pool:
            if tests is None:
                task = next((entry.task for entry in rest if not entry.error), None)
                tests = pool.submit(collect, task).result() if task else {}
                copies = pool.submit(collect_copies).result()
            try:
                futures = []
                for entry in rest[:1] if alone else rest:
                    copy = {COPIES: Test(copies[entry.file], "")} if entry.file in copies else {}
                    futures.append(pool.submit(judge_anything, entry, tests | copy, seed))
                for future in futures:
                    verdict = future.result()
                    rest.pop(0)
                    yield verdict
            except BrokenProcessPool:
                ended = True
        if ended and alone:
            yield Verdict(rest.pop(0), {}, seed, error="it ended the process that grades it")
        alone = ended and not alone


def grade_file(path: Path, only: str, workers: int, seed: int) -> bool:
    """Print a line for each entry of a file and one with the figures; whether all were graded, and as `fails` says."""
    entries = [entry for entry in load_file(path) if only in entry.name]
    if not entries:
        raise InputError(f"{path}: no entry matches; check --only")
    verdicts = []
    for verdict in judge_file(entries, workers, seed):
        verdicts.append(verdict)
        print(verdict.as_json(), flush=True)
    errors = sum(bool(verdict.error) for verdict in verdicts)
    complaints = sum(bool(verdict.complaint) for verdict in verdicts)  # those with an error among them
    lost = sum(bool(verdict.points_lost) for verdict in verdicts)
    figures = {"entries": len(verdicts), "lose_points": lost, "errors": errors, "complaints": complaints - errors}
    print(json.dumps(figures | {"seed": seed}))
    return not complaints
