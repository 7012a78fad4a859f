"""What a graded test works with: runs of a student's code, remembered, and failures in a student's words.

@pytest.mark.graded("2a.3", points=3)
def test_gather_and_scatter_leave_the_mean_on_every_worker(grade):
    result = grade.run("grader.probes_sync:average", 3, ...)      # result.values: or the verdict why not
    grade.fail("expected ..., got ...")                           # wrong; the seed is added
"""

import ast
import json
import os
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from common.course import Course
from common.todo import Block, find_blocks
from grader import ranks
from grader.outcome import Result
from grader.verdicts import Crashed, Verdict, Wrong, builds_on, not_attempted, verdict_of

DEADLINE = 20.0  # seconds for one run, which takes well under one; more under a slow autograder
LOAD_DEADLINE = 10.0
SEED_BITS = 30


class Session:
    """What the graded tests of one pytest run share: the student's tree, one seed, and every run made so far."""

    def __init__(self, tree: Path, course: Course, seed: int | None = None) -> None:
        self.tree, self.course = tree, course
        self.seed = int.from_bytes(os.urandom(4), "big") >> (32 - SEED_BITS) if seed is None else seed
        self.slowness = float(os.environ.get("COS598D_SLOWNESS", "1"))  # a factor for the deadlines
        self.runs: dict[str, Result] = {}

    def run(
        self, probe: str, world_size: int, arguments: dict, deadline: float = DEADLINE, payloads: bool = False
    ) -> Result:
        told = {name: value for name, value in arguments.items() if name != "each"}  # which follows from the seed
        key = json.dumps([probe, world_size, payloads, told], sort_keys=True)
        if key not in self.runs:
            limit = deadline * self.slowness
            self.runs[key] = ranks.run(
                probe, world_size, arguments, deadline=limit, tree=self.tree, keep_payloads=payloads
            )
        return self.runs[key]


class Grade:
    """One graded test's view: the region it grades, and the file that holds it."""

    def __init__(self, session: Session, region: str, test: str) -> None:
        self.session, self.region = session, region
        self.row = session.course.regions[region]
        self.file = self.row.file
        self.seed = session.seed
        self.draw = np.random.default_rng([self.seed, *test.encode()])
        self.last: Result | None = None  # the run that the test has just looked at

    def check_attempted(self) -> None:
        """Raises NotAttempted where the placeholder of the handout still stands alone."""
        mine = [block for block in self.blocks(self.file) if block.id == self.region]
        if mine and not any(block.attempted for block in mine):
            raise not_attempted(self.region)

    def check_written(self, *files: str) -> None:
        """Raises Skipped if a region of these files is open, for a run that would take long to come to it."""
        for block in (block for file in files for block in self.blocks(file)):
            if not block.attempted and block.id != self.region:
                raise builds_on(block.id)

    def blocks(self, file: str) -> list[Block]:
        """The regions of a student's file; none where it cannot be read: running it will say what is wrong."""
        try:
            return find_blocks((self.session.tree / file).read_text(encoding="utf-8"), file)
        except (OSError, ValueError):
            return []

    def run(
        self, probe: str, world_size: int, deadline: float = DEADLINE, payloads: Any = False, **arguments: Any
    ) -> Result:
        """Run a probe on the student's file; how it ended is in the result. The same run is made only once.

        With `payloads` the result keeps what each rank handed to its collectives. Raises the verdict at once if the
        file does not even load.
        """
        arguments = {"file": self.file, "seed": self.seed} | arguments
        self.must_load(str(arguments["file"]))
        self.last = self.session.run(probe, world_size, arguments, deadline, payloads)
        return self.last

    def must_load(self, file: str) -> None:
        """Raises the verdict if a file does not even load: then nothing in it earns points."""
        self.last = self.session.run("grader.probes:load", 1, {"file": file}, LOAD_DEADLINE)
        if verdict := self.verdict(self.last):
            raise type(verdict)(f"{file} cannot be loaded: {verdict}")

    def values(self, probe: str, world_size: int, **arguments: Any) -> list[Any]:
        """What the probe returned on each rank; raises the verdict if one did not return."""
        result = self.run(probe, world_size, **arguments)
        self.must_return(result)
        return result.values

    def must_return(self, result: Result) -> None:
        if verdict := self.verdict(result):
            raise verdict

    def verdict(self, result: Result) -> Verdict | None:
        """Why a run did not return; a crash in the lines of another region says which."""
        verdict = verdict_of(result, self.region)
        if isinstance(verdict, Crashed) and (other := self.crashed_in(result)) not in ("", self.region):
            return Crashed(f"{verdict}\n  this line belongs to region {other}: mend that first")
        return verdict

    def crashed_in(self, result: Result) -> str:
        """The region whose lines the innermost of the student's frames is in; "" if it is in none."""
        frames = next((rank.error.trace for rank in result.ranks if rank.error and rank.error.trace), [])
        for frame in reversed(frames):
            inside = [block.id for block in self.blocks(frame.file) if block.line < frame.line < block.end_line]
            if inside:
                return inside[0]
        return ""

    def lacking(self, result: Result, message: str) -> Verdict:
        """Something expected was not seen: because the run ended before, or else `message`."""
        return self.verdict(result) or Wrong(self.with_seed(message))

    def fail(self, message: str) -> NoReturn:
        raise Wrong(self.with_seed(message))

    def with_seed(self, message: str) -> str:
        return f"{message} (inputs drawn with seed {self.seed}; --seed {self.seed} draws them again)"

    def imports_only_allowed(self, *files: str) -> None:
        """Fails for an import, at the top or inside a function, that course.toml does not list for the file."""
        for file in files:
            allowed = self.session.course.allowed_imports(file)
            for line, module in imported(self.session.tree / file, file):
                if allowed is not None and not any(f"{module}.".startswith(f"{name}.") for name in allowed):
                    raise Wrong(f"{file}:{line} imports {module}; the course allows here only {', '.join(allowed)}")
            self.must_load(file)


def imported(path: Path, file: str) -> list[tuple[int, str]]:
    """Line and module of every import of a file. Raises Crashed where it is no Python."""
    try:
        tree = ast.parse(path.read_bytes(), file)
    except (OSError, SyntaxError, ValueError) as error:
        raise Crashed(f"{file} cannot be read: {type(error).__name__}: {error}") from None
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.lineno, node.module or "." * node.level))
    return sorted(found)
