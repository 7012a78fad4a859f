"""Run the graders on every known mistake and every unusual but correct solution; show what is caught, and how.

    python -m staff.mistakes                   each mistake against the tests that must catch it
    python -m staff.mistakes --task 2a         those of one task
    python -m staff.mistakes --region 2b.1     the entries that change a region or must fail one of its tests
    python -m staff.mistakes --draw 200        as many, drawn anew each time; what goes wrong is tried once more
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
from staff.proofs.bank import BankEntry, load_bank, load_file
from staff.proofs.grading_pool import collect
from staff.proofs.verdict import JudgeCall, Judged, Tests, graders_of, judge_all


def main(argv: Sequence[str] | None = None) -> None:
    options = _options(argv)
    tests, copies = collect()
    entries = select(load_file(options.bank) if options.bank else load_bank(), tests, options)
    seeds, tries = range(options.seed, options.seed + options.times), 2 if options.draw else 1
    verdicts = []
    for verdict in judge_all(
        [JudgeCall(e, graders_of(e, tests, copies), seeds, tries) for e in entries], options.workers
    ):
        verdicts.append(verdict)
        print(verdict.as_json() if options.bank else verdict, flush=True)
    complaints = [verdict for verdict in verdicts if verdict.complaint]
    if options.bank:
        idle, figures = [], figures_of_file(verdicts) | {"seed": options.seed}
    else:
        idle, figures = uncaught(verdicts, tests, options), figures_of_bank(verdicts)
        for verdict in complaints:  # once more at the end, where a long output is read first
            print(f"{verdict.entry}: {verdict.complaint} (--seed {verdict.seed})")
    print(json.dumps(figures))
    sys.exit(bool(complaints or idle))


def select(entries: Sequence[BankEntry], tests: Tests, options: argparse.Namespace) -> list[BankEntry]:
    """The entries that --task, --region, --only and --draw ask for.

    Raises:
        InputError: there is none, or one of the bank names a test that its task does not have.
    """
    for entry in entries if not options.bank else ():
        if unknown := [test for test in entry.fails if test not in tests or tests[test].task != entry.task]:
            raise InputError(f"{entry}: the task has no test {unknown[0]}; fix `fails`")
    entries = [entry for entry in entries if options.task in (None, entry.task) and options.only in entry.name]
    if options.region:
        entries = [entry for entry in entries if options.region in regions_of(entry, tests)]
    if not entries:
        raise InputError(f"{options.bank or 'staff/banks'}: no entry matches; check --task, --region and --only")
    return random.sample(entries, min(options.draw, len(entries))) if options.draw else entries


def regions_of(entry: BankEntry, tests: Tests) -> set[str]:
    """The regions that an entry changes or whose tests it must fail; a variant's patch may change any of its file."""
    changed = {place.partition("/")[0] for place in entry.bodies} | {tests[test].region for test in entry.fails}
    if entry.patch and not entry.is_mistake:
        changed |= {test.region for test in tests.values() if test.file == entry.file}
    return changed


def uncaught(verdicts: Iterable[Judged], tests: Tests, options: argparse.Namespace) -> list[str]:
    """The tests of a task, a region or the course that no mistake has failed, where all were graded; names them."""
    if options.only or options.draw:
        return []
    failed = {test for verdict in verdicts if verdict.entry.is_mistake for test in verdict.failed}
    tests_of_task = {name: test for name, test in tests.items() if options.task in (None, test.task)}
    wanted = [name for name, test in tests_of_task.items() if options.region in (None, test.region)]
    idle = [name for name in wanted if name not in failed]
    for name in idle:
        print(f"no mistake in the bank makes {name} fail")
    return idle


def figures_of_file(verdicts: Sequence[Judged]) -> dict[str, int]:
    errors = sum(bool(verdict.error) for verdict in verdicts)
    complaints = sum(bool(verdict.complaint) for verdict in verdicts)  # those with an error among them
    lost = sum(bool(verdict.graded.points_lost) for verdict in verdicts)
    return {"entries": len(verdicts), "lose_points": lost, "errors": errors, "complaints": complaints - errors}


def figures_of_bank(verdicts: Sequence[Judged]) -> dict[str, int]:
    """The figures; names the mistakes that count as one."""
    mistakes: dict[tuple, list[Judged]] = {}
    for verdict in verdicts:
        if verdict.entry.is_mistake:
            mistakes.setdefault((verdict.entry.task, verdict.row), []).append(verdict)
    for same in mistakes.values():
        if len(same) > 1:
            names = " | ".join(verdict.entry.name for verdict in same)
            print(f"same failures and messages, counted once in task {same[0].entry.task}: {names}")
    variants = [verdict for verdict in verdicts if not verdict.entry.is_mistake]
    return {
        "mistakes": len(mistakes),
        "caught": sum(all(verdict.failed for verdict in same) for same in mistakes.values()),
        "caught_by_name": sum(not any(verdict.complaint for verdict in same) for same in mistakes.values()),
        "variants": len(variants),
        "accepted": sum(not verdict.complaint for verdict in variants),
    }


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    course = load_course()
    ids = {row.marker: id for id, row in course.tasks.items()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, add_one_of = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add_one_of(
        "--task", type=lambda name: ids.get(name, name), choices=course.tasks,
        help="id or marker of a task in course.toml (default: all tasks)",
    )  # fmt: skip
    add_one_of(
        "--region", choices=course.regions, metavar="REGION", help="entries that change it or must fail a test of it"
    )
    add_one_of(
        "--bank", type=Path, metavar="FILE.toml", help="the entries of this file; prints one line of JSON for each"
    )
    add("--draw", type=int, metavar="N", help="only N of these entries, drawn anew each time")
    add("--only", default="", metavar="TEXT", help="only entries whose name contains TEXT")
    add("--seed", type=int, default=random.randrange(2**30), help="of the inputs, to repeat a run (default: random)")
    add("--times", type=int, default=1, help="number of seeds per entry, counting up from --seed (%(default)s)")
    add("--workers", type=int, default=min(2, os.cpu_count() or 1), help="entries graded in parallel (%(default)s)")
    options = parser.parse_args(argv)
    for name in ("draw", "times", "workers"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise InputError(f"--{name}: expected at least 1, got {value}")
    if options.region:
        options.task = course.regions[options.region].task
    return options


if __name__ == "__main__":
    exit_on_input_error(main)
