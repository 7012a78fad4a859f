"""The next step of a student: the first open region whose needs are written, with its place and its command."""

from collections.abc import Collection, Sequence
from pathlib import Path

from common.errors import InputError
from course.table import Course
from course.todo import Block, find_blocks


def open_regions(course: Course, tree: Path) -> dict[str, int]:
    """Region -> line of its TODO in its home file, for every region whose placeholder is still there."""
    found: dict[str, int] = {}
    for file in dict.fromkeys(region.file for region in course.regions.values()):
        blocks = [block for block in _blocks(tree, file) if not block.attempted]
        for block in reversed(blocks):  # of several parts the first counts
            if block.id in course.regions and course.regions[block.id].file == file:
                found[block.id] = block.line
    return found


def open_in_script(tree: Path, file: str) -> tuple[str, ...]:
    """The regions of a file that are open, copies of earlier ones included: it cannot run to its end before."""
    return tuple(dict.fromkeys(block.id for block in _blocks(tree, file) if not block.attempted))


def _blocks(tree: Path, file: str) -> list[Block]:
    try:
        return find_blocks((tree / file).read_text(encoding="utf-8"), file)
    except (OSError, ValueError, InputError):  # a file that cannot be read is reported by its own tests
        return []


def next_step(course: Course, tree: Path, failed: Sequence[str] = (), asked: Collection[str] = ()) -> str:
    """One line: what to do next; "" if nothing is left.

    The first region that has just failed; otherwise an open one whose needs are written, one of `asked` before others.
    """
    if failed:
        return f"next: {failed[0]}; `python -m pytest --hint {failed[0]}` shows a hint, " + _command(failed[0])
    still_open = open_regions(course, tree)
    for id in sorted(course.in_order_of_needs(), key=lambda id: id not in asked):
        if id in still_open and not set(course.all_needs(id)) & still_open.keys():
            region = course.regions[id]
            place = f"{region.file}:{still_open[id]}"
            return f"next: {id} {region.title}, {place} (steps: {course.readme(id)}); " + _command(id)
    return ""


def _command(region: str) -> str:
    return f"`python -m pytest --region {region}` grades it"
