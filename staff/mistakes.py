"""Run the graders on every known mistake and every unusual but correct solution; show what is caught, and how.

    python -m staff.mistakes                   each mistake against the tests that must catch it
    python -m staff.mistakes --task 2a         those of one task
    python -m staff.mistakes --region 2b.1     the entries that change a region or must fail one of its tests
    python -m staff.mistakes --draw 300        as many, drawn anew each time
    python -m staff.mistakes --times 5         with five seeds for the inputs: a single one can catch by luck
    python -m staff.mistakes --bank FILE.toml  the entries of a file from elsewhere, each against all tests of its task

The banks (staff/banks) say what a mistake is, which tests must fail and which words their messages must hold. Variants
are run against every test of the file they change. Exit code 0 only if every mistake is caught by the tests and with
the words that it names, every variant passes, and every test fails for at least one mistake. With --bank, every line of
stdout is a JSON object: see staff/banks/mistakes/README.md.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
import os
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from common.errors import InputError, exit_on_input_error
from course.table import load_course
from staff.proofs.bank import Entry, load_bank, load_file
from staff.proofs.grading_pool import collect, worker_processes
from staff.proofs.verdict import Tests, Verdict, graders_of, judge_all


def is_about(entry: Entry, region: str, tests: Tests) -> bool:
    """Whether an entry changes a region, or must fail a test of it; a patch of a variant may change any of its file."""
    changed = {place.partition("/")[0] for place in entry.bodies}
    if entry.patch and not entry.is_mistake:
        changed |= {test.region for test in tests.values() if test.file == entry.file}
    return region in changed.union(tests[test].region for test in entry.fails)


def show(verdict: Verdict) -> None:
    """One entry, and below it the messages of the tests that must fail, or of all that failed where it went wrong."""
    complaint = f"   <-- {verdict.complaint} (--seed {verdict.seed})" if verdict.complaint else ""
    print(f"{verdict.entry}{complaint}")
    for test in verdict.failed if complaint else verdict.entry.fails:
        print(f"    {test}: {verdict.results[test].message}")
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


def main(argv: Sequence[str] | None = None) -> None:
    options = _options(argv)
    bank = load_file(options.bank) if options.bank else load_bank()
    tests, copies = collect()
    by_task: dict[str, Tests] = {entry.task: {} for entry in bank}
    for name, test in tests.items():
        by_task.setdefault(test.task, {})[name] = test
    entries = select(bank, by_task, options)
    seeds = range(options.seed, options.seed + options.times)
    with worker_processes(options.workers) as pool:
        calls = [(entry, graders_of(entry, by_task[entry.task], copies), seeds) for entry in entries]
        verdicts = judge_all(pool, calls)
        sys.exit(report_file(verdicts, options.seed) if options.bank else report_bank(verdicts, by_task, options))


def select(bank: list[Entry], tests: dict[str, Tests], options: argparse.Namespace) -> list[Entry]:
    """Return the entries that --task, --region, --only and --draw ask for.

    Raises:
        InputError: there is none, or a mistake names a test that its task does not have.
    """
    entries = [entry for entry in bank if options.task in (None, entry.task) and options.only in entry.name]
    for entry in entries if not options.bank else ():
        if unknown := set(entry.fails) - set(tests[entry.task]):
            raise InputError(f"{entry}: the task has no test {min(unknown)}; fix `fails`")
    if options.region:
        entries = [entry for entry in entries if is_about(entry, options.region, tests[entry.task])]
    if not entries:
        raise InputError(f"{options.bank or 'staff/banks'}: no entry matches; check --task, --region and --only")
    if options.draw:
        entries = random.sample(entries, min(options.draw, len(entries)))
    return entries


def report_file(judged: Iterable[Verdict], seed: int) -> int:
    """Print a line for each entry of a file and one with the figures; 0 if all were graded, and as `fails` says."""
    verdicts = []
    for verdict in judged:
        verdicts.append(verdict)
        print(verdict.as_json(), flush=True)
    errors = sum(bool(verdict.error) for verdict in verdicts)
    complaints = sum(bool(verdict.complaint) for verdict in verdicts)  # those with an error among them
    lost = sum(bool(verdict.graded.points_lost) for verdict in verdicts)
    figures = {"entries": len(verdicts), "lose_points": lost, "errors": errors, "complaints": complaints - errors}
    print(json.dumps(figures | {"seed": seed}))
    return bool(complaints)


def report_bank(judged: Iterable[Verdict], tests: dict[str, Tests], options: argparse.Namespace) -> int:
    """Print every entry, and what is not as it must be; 0 if all is."""
    verdicts = []
    for verdict in judged:
        verdicts.append(verdict)
        show(verdict)
    caught = {test for verdict in verdicts if verdict.entry.is_mistake for test in verdict.failed}
    tasks = [options.task] if options.task else list(tests)
    wanted = [name for task in tasks for name, test in tests[task].items() if options.region in (None, test.region)]
    idle = [] if options.only or options.draw else [test for test in wanted if test not in caught]
    for test in idle:
        print(f"no mistake in the bank makes {test} fail")
    figures = summarize(verdicts)
    for verdict in verdicts:  # once more at the end, where a long output is read first
        if verdict.complaint:
            print(f"{verdict.entry}: {verdict.complaint} (--seed {verdict.seed})")
    print(json.dumps(figures))
    return bool(idle or any(verdict.complaint for verdict in verdicts))


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    course = load_course()
    ids = {row.marker: id for id, row in course.tasks.items()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    one = parser.add_mutually_exclusive_group()
    one.add_argument(
        "--task", type=lambda name: ids.get(name, name), choices=course.tasks,
        help="id or marker of a task in course.toml (default: all tasks)",
    )  # fmt: skip
    one.add_argument(
        "--region", choices=course.regions, metavar="REGION",
        help="only entries that change this region or must fail a test of it",
    )  # fmt: skip
    one.add_argument(
        "--bank", type=Path, metavar="FILE.toml",
        help="grade the entries of this file, each with all tests of its task; prints one line of JSON for each",
    )  # fmt: skip
    parser.add_argument("--draw", type=int, metavar="N", help="only N of these entries, drawn anew each time")
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
        "--workers", type=int, default=min(2, os.cpu_count() or 1), help="entries graded in parallel (%(default)s)"
    )
    options = parser.parse_args(argv)
    if options.times < 1:
        raise InputError(f"--times: expected at least 1, got {options.times}")
    if options.draw is not None and options.draw < 1:
        raise InputError(f"--draw: expected at least 1, got {options.draw}")
    if options.region:
        options.task = course.regions[options.region].task
    return options


if __name__ == "__main__":
    exit_on_input_error(main)
