"""One entry of a bank, graded: what the graders said, and what of it is not as it must be."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from staff.proofs.bank import Entry, apply, as_handed_in, copy_tree
from staff.proofs.grading_pool import Seen, Test, grade, tree_folder

LINE = re.compile(r":\d+(?=\b)")
STUDENTS = re.compile(r"(wrong|crashed|deadlocked|timed out|not attempted): (?!internal grader error)")
Tests = dict[str, Test]


@dataclass(frozen=True)
class Verdict:
    """What the graders said to one entry, with inputs drawn from `seed`; `error` says why it was not graded."""

    entry: Entry
    seen: dict[str, Seen]
    seed: int = 0
    points_lost: dict[str, int] = field(default_factory=dict)
    warned: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def failed(self) -> list[str]:
        return [test for test, seen in self.seen.items() if seen.outcome == "failed"]

    @property
    def complaint(self) -> str:
        """What is not as it must be; "" if all is."""
        if self.error:
            return f"not graded: {self.error}"
        if self.entry.kind == "variants":
            accepted = bool(self.seen) and all(seen.outcome == "passed" for seen in self.seen.values())
            return "" if accepted else "not accepted"
        if missing := [test for test in self.entry.fails if test not in self.failed]:
            return f"{'caught, but not' if self.failed else 'not caught'} by {', '.join(missing)}"
        if broken := [test for test in self.failed if not STUDENTS.match(self.seen[test].message)]:
            return f"the grader itself fails in {', '.join(broken)}"
        said = {test: self.seen[test].message.lower() for test in self.entry.fails}
        unsaid = [word for test, words in self.entry.fails.items() for word in words if word.lower() not in said[test]]
        return f"caught, but the message does not say {', '.join(map(repr, unsaid))}" if unsaid else ""

    @property
    def row(self) -> tuple:
        """Two mistakes with the same row count as one: the same outcomes and messages, but for line numbers."""
        return tuple((test, seen.outcome, LINE.sub(":", seen.message)) for test, seen in sorted(self.seen.items()))

    def as_json(self) -> str:
        """The line for an entry of --bank."""
        row: dict[str, object] = {"name": self.entry.name, "task": self.entry.task}
        if self.error:
            return json.dumps(row | {"error": self.error})
        failed = {test: self.seen[test].message for test in self.failed}
        row |= {"points_lost": self.points_lost, "failed": failed, "warned": self.warned}
        return json.dumps(row | ({"complaint": self.complaint} if self.complaint else {}))


def judge(entry: Entry, tests: Tests, everything: bool, seeds: Iterable[int]) -> Verdict:
    """Run an entry's graders on a tree of its own, once for each seed; the first verdict that is not as it must be.

    `tests` are all graders of its task.
    """
    names = names_of(entry, tests, everything)
    with tree_folder() as tree:
        copy_tree(tree)
        apply(entry, tree)
        if entry.kind == "file":
            as_handed_in(tree)  # the test of the copies compares what stands between TODO and END TODO
        for seed in seeds:
            graded = grade(tree, [tests[name].id for name in names], seed)
            verdict = Verdict(entry, graded.seen, seed, graded.points_lost, graded.warned)
            if verdict.complaint:
                break
        return verdict


def names_of(entry: Entry, tests: Tests, everything: bool) -> list[str]:
    """The graders that run on an entry."""
    if everything:
        return list(tests)
    return list(entry.fails) or [name for name, test in tests.items() if test.file in ("", entry.file)]
