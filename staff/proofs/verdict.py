"""One entry of a bank, graded: what the graders said, and what of it is not as it must be."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from common.errors import InputError
from grader.verdicts import GRADER_FAILED
from staff.grade.submissions import write_files
from staff.proofs.bank import FILE, VARIANTS, BankEntry, changed_files
from staff.proofs.grading_pool import Graded, GraderResult, Test, grade, worker_processes

LONGEST_ERROR = 500  # characters
COPIES = "copies"  # stands for the test of a file's copies; graders have names that begin with test_
Tests = dict[str, Test]


@dataclass(frozen=True)
class Judged:
    """What the graders said to one entry, with inputs drawn from `seed`; `error` says why it was not graded."""

    entry: BankEntry
    graded: Graded = field(default_factory=Graded)
    seed: int = 0
    error: str = ""

    @property
    def results(self) -> dict[str, GraderResult]:
        return self.graded.results

    @property
    def failed(self) -> list[str]:
        return [test for test, result in self.results.items() if result.outcome == "failed"]

    @property
    def complaint(self) -> str:
        """What is not as it must be; "" if all is."""
        if self.error:
            return f"not graded: {self.error}"
        if self.entry.kind == VARIANTS:
            accepted = bool(self.results) and all(result.outcome == "passed" for result in self.results.values())
            return "" if accepted else "not accepted"
        if missing := [test for test in self.entry.fails if test not in self.failed]:
            return f"{'caught, but not' if self.failed else 'not caught'} by {', '.join(missing)}"
        if broken := [test for test in self.failed if self.results[test].kind == GRADER_FAILED]:
            return f"the grader itself fails in {', '.join(broken)}"
        texts = {test: self.results[test].message.lower() for test in self.entry.fails}
        unsaid = [word for test, words in self.entry.fails.items() for word in words if word.lower() not in texts[test]]
        return f"caught, but the message does not say {', '.join(map(repr, unsaid))}" if unsaid else ""

    @property
    def row(self) -> tuple:
        """Two mistakes with the same row count as one: the same outcomes and messages."""
        return tuple((test, result.outcome, result.message) for test, result in sorted(self.results.items()))

    def __str__(self) -> str:
        """One line, and below it the messages of the tests that must fail, or of all that failed if it went wrong."""
        head = f"{self.entry}   <-- {self.complaint} (--seed {self.seed})" if self.complaint else str(self.entry)
        tests = self.failed if self.complaint else self.entry.fails
        return "\n".join([head, *(f"    {test}: {self.results[test].message}" for test in tests)])

    def as_json(self) -> str:
        """The line for an entry of --bank."""
        row: dict[str, object] = {"name": self.entry.name, "task": self.entry.task}
        if self.error:
            return json.dumps(row | {"error": self.error})
        failed = {test: self.results[test].message for test in self.failed}
        row |= {"points_lost": self.graded.points_lost, "failed": failed, "warned": self.graded.warned}
        return json.dumps(row | ({"complaint": self.complaint} if self.complaint else {}))


def graders_of(entry: BankEntry, tests: Tests, copies: dict[str, str]) -> Tests:
    """Choose the graders that run on an entry. A file from elsewhere meets all those of its task, and that of the
    copies it changes."""
    if entry.kind == FILE:
        copy = {COPIES: Test(copies[entry.file], "")} if entry.file in copies else {}
        return {name: test for name, test in tests.items() if test.task == entry.task} | copy
    chosen = entry.fails or [name for name, test in tests.items() if test.file == entry.file]
    return {name: tests[name] for name in chosen}


class JudgeCall(NamedTuple):
    """The arguments of `judge`."""

    entry: BankEntry
    tests: Tests
    seeds: Sequence[int]
    tries: int = 1


def judge(entry: BankEntry, tests: Tests, seeds: Sequence[int], tries: int = 1) -> Judged:
    """Run these graders on a tree of the entry's own, once for each seed; the first verdict that is not as it must be.

    With two `tries` only what is twice not as it must be, with the same inputs, counts: among a thousand runs on a busy
    machine one is interrupted.
    """
    for seed in seeds:
        for _ in range(tries):
            verdict = _judge_once(entry, tests, seed)
            if not verdict.complaint:
                break
        else:
            break
    return verdict


def _judge_once(entry: BankEntry, tests: Tests, seed: int) -> Judged:
    """Whatever keeps an entry from being graded is its error: those from elsewhere may do anything."""
    try:
        if entry.error:
            raise InputError(entry.error)
        with tempfile.TemporaryDirectory() as tree:
            write_files(changed_files(entry), Path(tree))
            return Judged(entry, grade(Path(tree), [test.id for test in tests.values()], seed), seed)
    except Exception as error:  # one entry must not end the others of its bank
        words = str(error) if isinstance(error, (InputError, TimeoutError)) else f"{type(error).__name__}: {error}"
        return Judged(entry, seed=seed, error=" ".join(words.split())[:LONGEST_ERROR])


def judge_all(calls: Sequence[JudgeCall], workers: int) -> Iterator[Judged]:
    """Yield the verdict of each call of `judge`, in order, from this many processes.

    When one of them dies, the calls that are left get one at a time, so that it is known which entry ends it.
    """
    done = 0
    while done < len(calls):
        with worker_processes(workers) as pool:
            try:
                for future in [pool.submit(judge, *call) for call in calls[done:]]:
                    yield future.result()
                    done += 1
            except BrokenProcessPool:
                if workers == 1:
                    entry, _, seeds, _ = calls[done]
                    yield Judged(entry, seed=seeds[0], error="it ended the process that grades it")
                    done += 1
                workers = 1
