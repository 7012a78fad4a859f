"""Gives a graded test its tools: runs of a student's code, which are remembered, and failures with their messages.

@pytest.mark.graded("x.1", weight=3)
def test_gather_and_scatter_leave_the_mean_on_every_worker(grade):
    result = run(grade, average, inputs)           # in_rank.py; result.values, or the verdict why there are none
    grade.fail("divide by the number of workers")  # wrong, with the cause; the seed is added
    grade.fail(observed="expected ..., got ...")   # wrong, and nobody knows why
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

import numpy as np

from course.todo import Block
from grader import imports, verdicts
from grader.ranks.outcome import DEBUGGER, Result
from grader.session import Session, blocks_of, region_at
from grader.verdicts import Crashed, NotAttempted, Verdict, Wrong
from grader.wire.request import Request


class Grade:
    """One graded test: the region it grades, the file that holds it, and the reasons for crashes in its test file."""

    def __init__(self, session: Session, region: str, test: str, crashes: Mapping[str, str] | None = None) -> None:
        self.session, self.region, self.crashes = session, region, crashes
        self.row = session.course.regions[region]
        self.file = self.row.file
        self.seed = session.seed
        self.draw = np.random.default_rng([self.seed, *test.encode()])
        self.last: Result | None = None  # the run that the test has just looked at

    def number(self, name: str, below: int) -> int:
        """Draw a number that ranks may get. They never get the seed: from it they could compute all other inputs."""
        return int(np.random.default_rng([self.seed, *name.encode()]).integers(below))

    def check_attempted(self) -> None:
        """Raise NotAttempted if no part of the region is written: the handout's placeholder is all there is."""
        parts = self.parts()
        if parts and not any(block.attempted for block in parts):
            raise verdicts.not_attempted(self.region)

    def check_written(self, *files: str) -> None:
        """Raise Skipped if a region of these files is not written, before a run that would take long to reach it."""
        for block in (block for file in files for block in blocks_of(self.session.tree, file)):
            if not block.attempted and block.id != self.region:
                raise verdicts.builds_on(block.id)

    def parts(self) -> list[Block]:
        """Return the parts of this region in its home file."""
        return [block for block in blocks_of(self.session.tree, self.file) if block.id == self.region]

    def result_of(self, request: Request) -> Result:
        """Return how a run on the student's file ended. The same run is made only once."""
        self.last = self.session.result_of(
            replace(request, libraries=self.session.libraries_of(request.file)), self.region
        )
        return self.last

    def must_return(self, result: Result) -> None:
        if verdict := self.verdict(result):
            raise verdict

    def verdict(self, result: Result) -> Verdict | None:
        """Say why a run did not return, None if it did; a crash in the lines of another region says which."""
        verdict = verdicts.verdict_of(result, self.region, self.crashes)
        parts = self.parts()
        if isinstance(verdict, NotAttempted) and any(block.attempted for block in parts):
            unwritten = [block.line for block in parts if not block.attempted]
            return (
                verdicts.part_unwritten(self.region, self.file, unwritten, len(parts))
                if unwritten
                else verdicts.placeholder_left(self.region, self.file)
            )
        if isinstance(verdict, Crashed) and (other := self.crashed_in(result)) not in ("", self.region):
            where = f"this line belongs to region {other}: if its tests pass, look at what your lines give to it"
            verdict.observed += f"\n  {where}"
        debugged = [rank.rank for rank in result.ranks if rank.error and rank.error.type == DEBUGGER]
        if verdict and debugged:
            command = f"python -m grader.debug {self.region} --rank {debugged[0]}"
            verdict.cause = f"a debugger cannot use the terminal while the graders run; use `{command}` instead"
        return verdict

    def crashed_in(self, result: Result) -> str:
        """Return the region that holds the innermost of the student's frames; "" if none does."""
        frames = next((rank.error.trace for rank in result.ranks if rank.error and rank.error.trace), [])
        regions = (region_at(self.session.tree, f"{frame.file}:{frame.line}") for frame in reversed(frames))
        return next(filter(None, regions), "")

    def lacking(self, result: Result, message: str) -> Verdict:
        """Return a verdict on something missing: why the run ended before it, or else `message`."""
        return self.verdict(result) or Wrong(observed=message, seed=self.seed)

    def fail(self, cause: str = "", observed: str = "", kind: str = "") -> NoReturn:
        """Raise that a value is wrong; the arguments are those of a verdict, at least one of the first two."""
        assert cause or observed
        raise Wrong(cause, observed, kind, self.seed)

    def imports_only_allowed(self, *files: str) -> None:
        """Fail for an import, at the top or inside a function, that course.toml does not list for the file."""
        for file in files:
            if complaint := imports.complaint(self.session.tree, file, self.session.course):
                raise Wrong(complaint)
