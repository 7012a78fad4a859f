"""Holds what the graded tests of one pytest run share: the student's tree, one seed, and every run made so far."""

import hashlib
import os
import secrets
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np

from course.table import Course
from course.todo import Block, find_blocks
from grader import imports, ranks
from grader.given_files import given_common
from grader.ranks.outcome import Result
from grader.wire.request import RankFunction, Request, Source
from grader.wire.values import Fields

AFTER_ONE_TIMEOUT, AFTER_SEVERAL = 2.0, 1.0  # seconds for a run of a region where others have met their deadline
MAX_REMEMBERED = 384 << 20  # bytes of all runs that are remembered
SEED_BITS = 48  # so many that no code can try all of them


class Session:
    """A run with the same arguments is made once. A region that timed out is given seconds afterwards."""

    def __init__(self, tree: Path, course: Course, seed: int | None = None) -> None:
        self.tree, self.course = tree, course
        self.seed = secrets.randbits(SEED_BITS) if seed is None else seed
        self.slowness = float(os.environ.get("COS598D_SLOWNESS", "1"))  # a factor for the deadlines
        self.runs: dict[str, Result] = {}
        self.timeouts: Counter[str] = Counter()  # runs that met their deadline, by region
        self._libraries: dict[str, list[str]] = {}  # by file

    @cached_property
    def given(self) -> Fields | None:
        return given_common(self.tree, self.course)

    def libraries_of(self, file: str) -> list[str]:
        """Return what the process that forks ranks loads once for all that load this file, see imports.py."""
        if file not in self._libraries:
            self._libraries[file] = imports.libraries(self.tree, file, self.course)
        return self._libraries[file]

    def result_of(self, request: Request, region: str = "") -> Result:
        """Return the result of a run for a test of this region; make it only if it was not made before."""
        key = fingerprint(request)
        if key not in self.runs:
            limited = request.within(self._limit(request.deadline, region) * self.slowness)
            self._remember(key, region, ranks.run(limited, tree=self.tree, given=self.given))
        return self.runs[key]

    def _remember(self, key: str, region: str, result: Result) -> None:
        """Keep a result, and drop the oldest ones if all together take too much memory."""
        self.runs[key] = result
        while len(self.runs) > 1 and sum(run.size for run in self.runs.values()) > MAX_REMEMBERED:
            self.runs.pop(next(iter(self.runs)))
        if result.took_too_long:
            self.timeouts.update({region, *(region_at(self.tree, rank.where) for rank in result.ranks)} - {""})

    def _limit(self, deadline: float, region: str) -> float:
        """Return the seconds for a run: few if this region, or one that it needs, has timed out before."""
        built_on = {region, *self.course.all_needs(region)} if region else set()
        before = max((self.timeouts[one] for one in built_on), default=0)
        if before == 0:
            return deadline
        return min(deadline, AFTER_ONE_TIMEOUT if before == 1 else AFTER_SEVERAL)


def blocks_of(tree: Path, file: str) -> list[Block]:
    """Return the regions of a student's file; none if it cannot be read: running it will say what is wrong."""
    try:
        return find_blocks((tree / file).read_text(encoding="utf-8"), file)
    except (OSError, ValueError):
        return []


def region_at(tree: Path, where: str) -> str:
    """Return the region that holds file:line; "" if none does."""
    file, _, line = where.rpartition(":")
    blocks = blocks_of(tree, file) if file else []
    return next((block.id for block in blocks if block.line < int(line) < block.end_line), "")


def fingerprint(value: object) -> str:
    """Return a text that is the same for equal arguments of a run, the arrays in them included."""
    if isinstance(value, Request | RankFunction | Source):
        return fingerprint(vars(value))
    if isinstance(value, Mapping):
        return fingerprint([(name, value[name]) for name in sorted(value)])
    if isinstance(value, list | tuple):
        return f"[{','.join(map(fingerprint, value))}]"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest()}"
    return repr(value)
