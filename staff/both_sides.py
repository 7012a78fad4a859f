"""Check every region twice: as the only open region, and as the only solved one.

    python -m staff.both_sides [--region 2a.3 ...]

Open: its tests say "not attempted", tests that depend on it may be skipped, all others pass. Solved: only this region
and those its tests depend on are solved; their tests pass, those of all other regions say "not attempted". Last line of
stdout: {"regions": n, "open": n, "solved": n}; exit code 0 only if both checks succeed for all regions.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
import os
import random
import sys
from collections.abc import Sequence

from common.errors import InputError, exit_on_input_error
from course.table import load_course
from staff.grade.hand_ins import grader_files
from staff.grade.submissions import clean_files, write_files
from staff.proofs.grading_pool import Graded, Test, collect, grade, tree_folder, worker_processes

COURSE = load_course()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--region", nargs="*", default=list(COURSE.regions), help="regions to check (default: all)")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(2**30), help="seed of the graders' inputs (default: random)"
    )
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.region) - set(COURSE.regions):
        raise InputError(f"--region: expected some of {', '.join(COURSE.regions)}; got {min(unknown)}")
    tests, _ = collect()
    sides = [("open", id, set(COURSE.regions) - {id}) for id in arguments.region]
    sides += [("solved", id, with_needs(id, tests)) for id in arguments.region]
    with worker_processes(min(2, os.cpu_count() or 1)) as pool:
        futures = [pool.submit(graded, solved, arguments.seed) for _, _, solved in sides]
        right = {"regions": len(arguments.region), "open": 0, "solved": 0}
        for (side, id, solved), future in zip(sides, futures, strict=True):
            try:
                result = future.result()
            except TimeoutError as too_late:  # a busy machine, perhaps; the other regions are still worth a look
                print(f"{id} {side}: {too_late}", flush=True)
                continue
            right[side] += show(f"{id} {side}", unexpected(solved, tests, result.statuses), result)
    print(json.dumps(right))
    sys.exit(0 if right["open"] == right["solved"] == right["regions"] else 1)


def needs(test: Test) -> set[str]:
    """Every region but its own that a test builds on."""
    return set(COURSE.all_needs(test.region, *test.needs)) - {test.region}


def needs_to_count(test: Test, tests: dict[str, Test]) -> set[str]:
    """The same; a test of absence counts when the others of its region pass, so it needs what they need."""
    others = [other for other in tests.values() if test.absence and other.region == test.region]
    return needs(test).union(*map(needs, others))


def with_needs(region: str, tests: dict[str, Test]) -> set[str]:
    """A region and all that its tests build on."""
    return {region}.union(*(needs(test) for test in tests.values() if test.region == region))


def graded(solved: set[str], seed: int) -> Graded:
    """Grade the handout with these regions solved."""
    with tree_folder() as tree:
        write_files(clean_files(solved=solved), tree)
        return grade(tree, grader_files(), seed)


def unexpected(solved: set[str], tests: dict[str, Test], statuses: dict[str, str]) -> list[str]:
    """Tests whose status is not what it must be while only these regions are solved."""

    def expected(test: Test) -> list[str]:
        if test.region not in solved:
            return ["not attempted"]
        return ["passed"] if needs_to_count(test, tests) <= solved else ["passed", "skipped"]

    return [
        f"{name} [{test.region}]: expected {' or '.join(expected(test))}, got {statuses.get(name)}"
        for name, test in tests.items()
        if statuses.get(name) not in expected(test)
    ]


def show(name: str, wrong: Sequence[str], graded: Graded) -> bool:
    print(f"{name}: {f'{len(wrong)} unexpected results' if wrong else 'OK'}", flush=True)
    for line in wrong:
        test = graded.results.get(line.partition(" ")[0])
        print(f"    {line}: {test.message if test else ''}", flush=True)
    return not wrong


if __name__ == "__main__":
    exit_on_input_error(main)
