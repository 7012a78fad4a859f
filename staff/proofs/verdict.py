"""One entry of a bank, graded: what the graders said, and what of it is not as it must be."""

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

from common.errors import InputError
from staff.grade.submissions import write_files
from staff.proofs.bank import Entry, changed_files
from staff.proofs.grading_pool import Graded, GradingPool, Result, Test, grade, tree_folder

LONGEST_ERROR = 500  # characters
COPIES = "copies"  # stands for the test of a file's copies; graders have names that begin with test_

LINE = re.compile(r":\d+(?=\b)")
GRADER_FAILED = "crashed: internal grader error"
Tests = dict[str, Test]


@dataclass(frozen=True)
class Verdict:
    """What the graders said to one entry, with inputs drawn from `seed`; `error` says why it was not graded."""

    entry: Entry
    graded: Graded = field(default_factory=Graded)
    seed: int = 0
    error: str = ""

    @property
    def results(self) -> dict[str, Result]:
        return self.graded.results

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
        if broken := [test for test in self.failed if self.results[test].message.startswith(GRADER_FAILED)]:
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
        row |= {"points_lost": self.graded.points_lost, "failed": failed, "warned": self.graded.warned}
        return json.dumps(row | ({"complaint": self.complaint} if self.complaint else {}))


Call = tuple[Entry, Tests, Sequence[int]]  # an entry, the graders to run on it, and a seed for each time


def judge(entry: Entry, tests: Tests, seeds: Sequence[int]) -> Verdict:
    """Run these graders on a tree of the entry's own, once for each seed; the first verdict that is not as it must be.

    What is not as it must be is graded a second time, with the same inputs, and that counts: among thousands of runs on
    a busy machine some are interrupted. Whatever keeps the entry from being graded is its error.
    """
    verdict = Verdict(entry, seed=seeds[0], error=entry.error)
    for seed in seeds if not entry.error else ():
        for _ in range(2):
            verdict = _judge_once(entry, tests, seed)
            if not verdict.complaint or entry.kind == "file":
                break
        if verdict.complaint:
            break
    return verdict


def _judge_once(entry: Entry, tests: Tests, seed: int) -> Verdict:
    try:
        with tree_folder() as tree:
            write_files(changed_files([entry]), tree)
            return Verdict(entry, grade(tree, [test.id for test in tests.values()], seed), seed)
    except Exception as error:  # whatever an entry from elsewhere may cause
        words = str(error) if isinstance(error, (InputError, TimeoutError)) else f"{type(error).__name__}: {error}"
        return Verdict(entry, seed=seed, error=" ".join(words.split())[:LONGEST_ERROR])


def judge_all(pool: GradingPool, calls: Sequence[Call]) -> Iterator[Verdict]:
    """Yield the verdicts in order."""
    futures = [pool.submit(judge, *call) for call in calls]
    for (entry, _, seeds), future in zip(calls, futures, strict=True):
        try:
            yield future.result()
        except BrokenProcessPool:
            yield Verdict(entry, seed=seeds[0], error="it ended the process that grades it")


def graders_of(entry: Entry, tests: Tests, copies: dict[str, str]) -> Tests:
    """Choose the graders that run on an entry, of all those of its task.

    A file from elsewhere meets all of them, and that of the copies it changes.
    """
    if entry.kind == "file":
        copy = {COPIES: Test(copies[entry.file], "")} if entry.file in copies else {}
        return tests | copy
    chosen = entry.fails or [name for name, test in tests.items() if test.file == entry.file]
    return {name: tests[name] for name in chosen}
