"""One entry of a bank, graded: what the graders said, and what of it is not as it must be."""

import json
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

from common.errors import InputError
from course.table import load_course
from staff.grade.submissions import clean_files, write_files
from staff.proofs.bank import Entry, apply, copy_tree
from staff.proofs.grading_pool import Result, Test, grade, tree_folder, worker_processes

LONGEST_ERROR = 500  # characters
COPIES = "copies"  # stands for the test of a file's copies; graders have names that begin with test_

LINE = re.compile(r":\d+(?=\b)")
STUDENTS = re.compile(r"(wrong|crashed|deadlocked|timed out|not attempted): (?!internal grader error)")
Tests = dict[str, Test]


@dataclass(frozen=True)
class Verdict:
    """What the graders said to one entry, with inputs drawn from `seed`; `error` says why it was not graded."""

    entry: Entry
    results: dict[str, Result]
    seed: int = 0
    points_lost: dict[str, int] = field(default_factory=dict)
    warned: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def failed(self) -> list[str]:
        return [test for test, result in self.results.items() if result.outcome == "failed"]

    @property
    def complaint(self) -> str:
        """What is not as it must be; "" if all is."""
        if self.error:
            return f"not graded: {self.error}"
        if self.entry.kind == "variants":
            accepted = bool(self.results) and all(result.outcome == "passed" for result in self.results.values())
            return "" if accepted else "not accepted"
        if missing := [test for test in self.entry.fails if test not in self.failed]:
            return f"{'caught, but not' if self.failed else 'not caught'} by {', '.join(missing)}"
        if broken := [test for test in self.failed if not STUDENTS.match(self.results[test].message)]:
            return f"the grader itself fails in {', '.join(broken)}"
        texts = {test: self.results[test].message.lower() for test in self.entry.fails}
        unsaid = [word for test, words in self.entry.fails.items() for word in words if word.lower() not in texts[test]]
        return f"caught, but the message does not say {', '.join(map(repr, unsaid))}" if unsaid else ""

    @property
    def row(self) -> tuple:
        """Two mistakes with the same row count as one: the same outcomes and messages, but for line numbers."""
        results = sorted(self.results.items())
        return tuple((test, result.outcome, LINE.sub(":", result.message)) for test, result in results)

    def as_json(self) -> str:
        """The line for an entry of --bank."""
        row: dict[str, object] = {"name": self.entry.name, "task": self.entry.task}
        if self.error:
            return json.dumps(row | {"error": self.error})
        failed = {test: self.results[test].message for test in self.failed}
        row |= {"points_lost": self.points_lost, "failed": failed, "warned": self.warned}
        return json.dumps(row | ({"complaint": self.complaint} if self.complaint else {}))


Call = tuple[Entry, Tests, Sequence[int]]  # an entry, the graders to run on it, and a seed for each time


def judge(entry: Entry, tests: Tests, seeds: Sequence[int]) -> Verdict:
    """Run these graders on a tree of the entry's own, once for each seed; the first verdict that is not as it must be.

    Whatever keeps the entry from being graded is its error.
    """
    seed = seeds[0]
    try:
        if entry.error:
            raise InputError(entry.error)
        with tree_folder() as tree:
            copy_tree(tree)
            apply(entry, tree)
            if entry.kind == "file":
                solved = load_course().regions
                write_files(clean_files(tree, solved), tree)  # a test of copies looks between TODO and END TODO
            for seed in seeds:
                graded = grade(tree, [test.id for test in tests.values()], seed)
                verdict = Verdict(entry, graded.results, seed, graded.points_lost, graded.warned)
                if verdict.complaint:
                    break
            return verdict
    except Exception as error:
        words = str(error) if isinstance(error, (InputError, TimeoutError)) else f"{type(error).__name__}: {error}"
        return Verdict(entry, {}, seed, error=" ".join(words.split())[:LONGEST_ERROR])


def judge_all(pool: Executor, calls: Sequence[Call], workers: int, seconds: float = float("inf")) -> Iterator[Verdict]:
    """Yield the verdicts in order; after `seconds`, no other entry is begun.

    If an entry ends the process that grades it, the next one is graded alone, so that the right one is blamed.
    """
    end, next_call = time.monotonic() + seconds, 0
    try:
        for future in until([pool.submit(judge, *call) for call in calls], seconds):
            yield future.result()
            next_call += 1
        return
    except BrokenProcessPool:
        pass
    with worker_processes(1) as alone:
        try:
            yield alone.submit(judge, *calls[next_call]).result()
        except BrokenProcessPool:
            entry, _, seeds = calls[next_call]
            yield Verdict(entry, {}, seeds[0], error="it ended the process that grades it")
    with worker_processes(workers) as others:
        yield from judge_all(others, calls[next_call + 1 :], workers, end - time.monotonic())


def until(futures: Sequence[Future[Verdict]], seconds: float) -> Iterator[Future[Verdict]]:
    """Yield the futures in order. After `seconds`, those that have not begun are cancelled, and not yielded."""
    end = time.monotonic() + seconds
    for future in futures:
        if time.monotonic() > end:
            for other in futures:  # all at once: while one is waited for, the pool begins the next
                other.cancel()
        if not future.cancelled():
            yield future


def graders_of(entry: Entry, tests: Tests, copies: dict[str, str], everything: bool) -> Tests:
    """Choose the graders that run on an entry, of all those of its task.

    A file from elsewhere meets all of them, and that of the copies it changes.
    """
    if entry.kind == "file":
        copy = {COPIES: Test(copies[entry.file], "")} if entry.file in copies else {}
        return tests | copy
    if everything:
        return tests
    chosen = entry.fails or [name for name, test in tests.items() if test.file == entry.file]
    return {name: tests[name] for name in chosen}
