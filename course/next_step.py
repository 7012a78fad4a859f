"""The next step of a student: the first open region whose needs are written, with its place and its command."""

from collections.abc import Collection, Sequence
from pathlib import Path

from common.errors import InputError
from course.table import Course
from course.todo import Block, find_blocks


def open_regions(course: Course, tree: Path) -> dict[str, int]:
    """Region -> line of its TODO in its home file, for every region whose placeholder is still there."""
    lines: dict[str, int] = {}
    for block in _home_blocks(course, tree):
        if not block.attempted:
            lines.setdefault(block.id, block.line)  # of several parts the first counts
    return lines


def open_in_script(tree: Path, file: str) -> tuple[str, ...]:
    """The regions of a file that are open, copies of earlier ones included: it cannot run to its end before."""
    return tuple(dict.fromkeys(block.id for block in _blocks(tree, file) if not block.attempted))


def _home_blocks(course: Course, tree: Path) -> list[Block]:
    """The blocks of every region in its home file, in order."""
    files = dict.fromkeys(region.file for region in course.regions.values())
    homes = {id: region.file for id, region in course.regions.items()}
    return [block for file in files for block in _blocks(tree, file) if homes.get(block.id) == file]


def _blocks(tree: Path, file: str) -> list[Block]:
    try:
        return find_blocks((tree / file).read_text(encoding="utf-8"), file)
    except (OSError, ValueError, InputError):  # a file that cannot be read is reported by its own tests
        return []


def next_region(course: Course, tree: Path, asked: Collection[str] = ()) -> str:
    """An open region whose needs are written, one of `asked` before others; "" if none is open."""
    still_open = open_regions(course, tree)
    order = sorted(course.in_order_of_needs(), key=lambda id: id not in asked)
    return next((id for id in order if id in still_open and not set(course.all_needs(id)) & still_open.keys()), "")


def next_step(course: Course, tree: Path, failed: Sequence[str] = (), asked: Collection[str] = ()) -> str:
    """One line: what to do next; "" if nothing is left. A region that has just failed comes before open ones."""
    if failed:
        return f"next: {failed[0]}; `python -m pytest --hint {failed[0]}` shows a hint, " + _command(failed[0])
    if id := next_region(course, tree, asked):
        region = course.regions[id]
        place = f"{region.file}:{open_regions(course, tree)[id]}"
        return f"next: {id} {region.title}, {place} (steps: {course.readme(id)}); " + _command(id)
    return ""


def written(course: Course, tree: Path) -> dict[str, tuple[str, ...]]:
    """Region -> what is written for it in its home file, part by part; a file that is not valid Python is left out."""
    bodies: dict[str, tuple[str, ...]] = {}
    for block in _home_blocks(course, tree):
        bodies[block.id] = (*bodies.get(block.id, ()), block.body)
    return bodies


def _command(region: str) -> str:
    return f"`python -m pytest --region {region}` grades it"
