"""Run the graders on every known mistake and every unusual but correct solution; show what is caught, and how.

    python -m staff.mistakes                   each mistake against the tests that must catch it
    python -m staff.mistakes --task 2a --all   the mistakes of one task, each against every test of the task
    python -m staff.mistakes --cover           a minimal set that makes every test fail once: part of `make test`
    python -m staff.mistakes --times 5         with five seeds for the inputs: a single one can catch by luck
    python -m staff.mistakes --minutes 14      as many as fit, in a new order each time; says how many were left out
    python -m staff.mistakes --again           what is not as it must be is graded once more, alone, and then counts

The banks (staff/banks) say what a mistake is, which tests must fail and which words their messages must hold. Variants
are run against every test of the file they change; with --all, every test of their task. Exit code 0 only if every
mistake is caught by the tests and with the words that it names, every variant passes, and every test fails for at least
one mistake.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
import os
import random
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from common.errors import InputError, exit_on_input_error
from course.table import load_course
from staff.proofs.bank import Entry, apply, copy_tree, load_bank
from staff.proofs.cover import cover
from staff.proofs.grading_pool import Seen, Test, collect, grade, tree_folder, worker_processes

LINE = re.compile(r":\d+(?=\b)")
STUDENTS = re.compile(r"(wrong|crashed|deadlocked|timed out|not attempted): (?!internal grader error)")
MARKS = {"passed": ".", "failed": "F", "skipped": "s"}
Tests = dict[str, Test]


@dataclass(frozen=True)
class Verdict:
    """What the graders said to one entry, with inputs drawn from `seed`."""

    entry: Entry
    seen: dict[str, Seen]
    seed: int = 0

    @property
    def failed(self) -> list[str]:
        return [test for test, seen in self.seen.items() if seen.outcome == "failed"]

    @property
    def complaint(self) -> str:
        """What is not as it must be; "" if all is."""
        if not self.entry.is_mistake:
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


def judge(entry: Entry, tests: Tests, everything: bool, seeds: Iterable[int]) -> Verdict:
    """Run an entry's graders on a tree of its own, once for each seed; the first verdict that is not as it must be.

    `tests` are all graders of its task.
    """
    names: Iterable[str] = tests
    if not everything:
        names = entry.fails or [name for name, test in tests.items() if test.file in ("", entry.file)]
    with tree_folder() as tree:
        copy_tree(tree)
        apply(entry, tree)
        for seed in seeds:
            verdict = Verdict(entry, grade(tree, [tests[name].id for name in names], seed), seed)
            if verdict.complaint:
                break
        return verdict


def check_names(bank: Sequence[Entry], tests: dict[str, Tests]) -> None:
    """Raises InputError for a test that a mistake names and its task does not have."""
    for entry in bank:
        if unknown := set(entry.fails) - set(tests[entry.task]):
            raise InputError(f"{entry}: the task has no test {min(unknown)}; fix `fails`")


def show(verdict: Verdict, columns: Sequence[str]) -> None:
    """One row of the matrix, and below it the messages of the tests that must fail, or of all where it went wrong."""
    marks = "".join(MARKS[verdict.seen[test].outcome] if test in verdict.seen else " " for test in columns)
    complaint = f"   <-- {verdict.complaint} (--seed {verdict.seed})" if verdict.complaint else ""
    print(f"{marks} | {verdict.entry}{complaint}")
    for test in verdict.failed if complaint else verdict.entry.fails:
        print(f"{'':{len(marks)}} |     {test}: {verdict.seen[test].message}")
    sys.stdout.flush()


def summarize(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """The figures; names the mistakes that count as one."""
    mistakes: dict[tuple, list[Verdict]] = {}
    variants = []
    for verdict in verdicts:
        if verdict.entry.is_mistake:
            mistakes.setdefault((verdict.entry.task, verdict.row), []).append(verdict)
        else:
            variants.append(verdict)
    for same in mistakes.values():
        if len(same) > 1:
            names = " | ".join(verdict.entry.name for verdict in same)
            print(f"same failures and messages, counted once in task {same[0].entry.task}: {names}")
    return {
        "mistakes": len(mistakes),
        "caught": sum(all(verdict.failed for verdict in same) for same in mistakes.values()),
        "caught_by_name": sum(not any(verdict.complaint for verdict in same) for same in mistakes.values()),
        "variants": len(variants),
        "accepted": sum(not verdict.complaint for verdict in variants),
    }


def until(futures: Sequence[Future[Verdict]], seconds: float) -> Iterator[Future[Verdict]]:
    """Yield the futures in order. After `seconds`, those that have not begun are cancelled, and not yielded."""
    end = time.monotonic() + seconds
    for future in futures:
        if time.monotonic() > end:
            for other in futures:  # all at once: while one is waited for, the pool begins the next
                other.cancel()
        if not future.cancelled():
            yield future


def main(argv: Sequence[str] | None = None) -> None:
    options = _options(argv)
    bank = [entry for entry in load_bank() if options.task in (None, entry.task) and options.only in entry.name]
    if options.cover:
        bank = cover(bank)
    if options.minutes < float("inf"):
        random.shuffle(bank)  # so that every entry has its turn, whatever is left out
    if not bank:
        raise InputError("no entry matches; check --task and --only")
    verdicts = []
    with worker_processes(options.workers) as pool:
        tests = {task: pool.submit(collect, task).result() for task in sorted({entry.task for entry in bank})}
        check_names(bank, tests)
        columns = [test for names in tests.values() for test in names]
        for number, test in enumerate(columns):
            print(f"{'|' * number}+{'-' * (len(columns) - number)} {test}")
        seeds = range(options.seed, options.seed + options.times)
        futures = [pool.submit(judge, entry, tests[entry.task], options.all, seeds) for entry in bank]
        for future in until(futures, 60 * options.minutes):
            verdicts.append(future.result())
            show(verdicts[-1], columns)
        for i, verdict in enumerate(verdicts):
            if options.again and verdict.complaint:
                future = pool.submit(judge, verdict.entry, tests[verdict.entry.task], options.all, [verdict.seed])
                verdicts[i] = future.result()  # nothing else runs now
                print("once more, alone:")
                show(verdicts[i], columns)
    left_out = len(bank) - len(verdicts)
    if left_out:
        print(f"{left_out} of {len(bank)} entries did not fit into {options.minutes} minutes")
    caught = {test for verdict in verdicts if verdict.entry.is_mistake for test in verdict.failed}
    idle = [] if options.only or left_out else [test for test in columns if test not in caught]
    for test in idle:
        print(f"no mistake in the bank makes {test} fail")
    figures = summarize(verdicts)
    for verdict in verdicts:  # once more at the end, where a long output is read first
        if verdict.complaint:
            print(f"{verdict.entry}: {verdict.complaint} (--seed {verdict.seed})")
    print(json.dumps(figures))
    sys.exit(1 if idle or any(verdict.complaint for verdict in verdicts) else 0)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    tasks = load_course().tasks
    ids = {row.marker: id for id, row in tasks.items()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--task", type=lambda name: ids.get(name, name), choices=tasks,
        help="id or marker of a task in course.toml (default: all tasks)",
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="run every test of the task on every entry")
    parser.add_argument(
        "--cover", action="store_true", help="a minimal set of mistakes that makes every test fail once; no variants"
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="grade what is not as it must be once more, alone; then that verdict counts",
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only entries whose name contains TEXT")
    parser.add_argument(
        "--seed",
        type=int,
        default=random.randrange(2**30),
        help="seed of the inputs, to repeat an earlier run (default: random)",
    )
    parser.add_argument(
        "--times", type=int, default=1, help="number of seeds per entry, counting up from --seed (%(default)s)"
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start no new entry after this many minutes"
    )
    parser.add_argument(
        "--workers", type=int, default=min(2, os.cpu_count() or 1), help="entries graded in parallel (%(default)s)"
    )
    options = parser.parse_args(argv)
    if options.times < 1:
        raise InputError(f"--times: expected at least 1, got {options.times}")
    if not options.minutes > 0:
        raise InputError(f"--minutes: expected more than 0, got {options.minutes}")
    return options


if __name__ == "__main__":
    exit_on_input_error(main)
