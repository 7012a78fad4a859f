"""Makes the Markdown of a handout follow the course, and finds what leads nowhere in it: links, commands, regions.

Of what the source has and this handout does not, a link becomes plain text; a row of a table, a command in a block of
code, a picture and a sentence that name it are left out, also a sentence, a row and a line of a drawing about a task
that the course does not have; a command for a region asks for one that the course has.
Whatever then still leads nowhere is a mistake in the text, in any course.
"""

import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from course.table import Course

FENCE = re.compile(r"^```")
COMMAND = re.compile(r"^(?:\w+=\S+ )*(?:python|torchrun|sbatch|srun|diff|paste)\b")
FILE = re.compile(r"(?<![\w/.<*$-])(?:\./)?((?:[\w-]+/)+[\w-]+\.(?:py|md|sbatch|sh|toml))\b")
MODULE = re.compile(r"\bpython -m ([a-z]\w*(?:\.\w+)*)")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
CODE = re.compile(r"`[^`\n]+`")
GRADE = re.compile(r"(--region|--hint|grader\.debug|pytest -m) ([0-9a-z]+\.[0-9]+|[a-z]+\w*)\b")
REGION = re.compile(r"(?<![\w.])([0-9a-z]+\.[0-9]+)(?![\w%]|\.\d| (?:ms|s|GB|MB|million|minutes|times)\b)")
TASK = re.compile(r"\b[Tt]ask (\d[ab]?)\b|\b(P)ipeline\b")
BONUS = re.compile(r"\bbonus\b", re.IGNORECASE)
DRAWN = re.compile(r"(?:task (\d[ab]?)|(p)ipeline) {2}")  # begins a task's lines in a drawing
SENTENCE = re.compile(r"(?:(?<=[.:!?)]\s)|^)(?:`[^`]*`|[^`.!?]|[.!?](?!\)?(?:\s|$)))+[.!?]\)?(?:\s+|$)")
START = re.compile(r"\s*(?:[-*]|\d+\.)?\s*(?:\*\*[^*]+\*\*)?\s*")


@dataclass(frozen=True)
class Follower:
    """What a handout has: its files, and the regions that are in it, open or `solved`. `source` has the files of the
    tree that it is made of."""

    course: Course
    files: Collection[str]
    source: Collection[str]
    solved: Collection[str]

    def follow(self, text: str, page: str) -> str:
        """Return a page without what leads to files and regions that this handout lacks."""
        blocks = []
        text = GRADE.sub(self._region, text)
        for block in re.split(r"(^```.*\n(?:(?!```).*\n)*```$|\n\n+)", text, flags=re.MULTILINE):
            lines = block.split("\n")
            if FENCE.match(block):
                lines = self._code(self._drawing(lines))
            elif lines[0].startswith("|"):
                lines = [line for line in lines if not line.startswith("|") or not self._leads_away(line, page)]
            else:
                lines = self._prose(block, page).split("\n")
            blocks.append(LINK.sub(lambda link: self._link(link, page), "\n".join(lines)))
        return "".join(blocks)

    def _drawing(self, lines: list[str]) -> list[str]:
        """The lines of a block of code without those that draw a task which the course does not have."""
        kept: list[str] = []
        is_lost = False
        for line in lines:
            if row := DRAWN.match(line):
                is_lost = (row[1] or row[2]) not in self.course.tasks
            elif line and not line.startswith(" "):
                is_lost = False
            if not is_lost:
                kept.append(line)
        return kept

    def _code(self, lines: list[str]) -> list[str]:
        """The lines of a block of code without commands that lead away, and loops of such; nothing if none is left."""
        commands: list[list[str]] = []
        for line in lines[1:-1]:
            inside_loop = bool(commands) and commands[-1][0].startswith("for ") and commands[-1][-1] != "done"
            if inside_loop:
                commands[-1].append(line)
            else:
                commands.append([line])
        kept = [words for words in commands if not any(self._is_lost(line, COMMAND) for line in words)]
        inside = [line for words in kept for line in words]
        return [lines[0], *inside, lines[-1]] if any(map(str.strip, inside)) else []

    def _prose(self, text: str, page: str) -> str:
        """A paragraph or list without its sentences that name what is not there."""
        kept = []
        for item in re.split(r"(?m)^(?=\s*(?:[-*]|\d+\.) )", text):
            start = START.match(item).group()  # type: ignore[union-attr]
            sentences = SENTENCE.findall(item[len(start) :]) or [item[len(start) :]]
            rest = item[len(start) + sum(map(len, sentences)) :]
            if self._names_what_is_lost(start):  # "- **Task 4** counts": in bold at its beginning
                continue
            there = [one for one in sentences if not self._leads_away(LINK.sub(r"\2", one), page)]
            if there == sentences:
                kept.append(item)
            elif there or rest.strip():
                kept.append((start + "".join(there) + rest).rstrip() + item[len(item.rstrip()) :])
        return "".join(kept)

    def _leads_away(self, text: str, page: str) -> bool:
        return (
            self._is_lost(text)
            or self._names_what_is_lost(text)
            or any(self._is_dropped(link[3], page) for link in LINK.finditer(text))
        )

    def _names_what_is_lost(self, text: str) -> bool:
        """Return whether a text names regions or tasks that are not here, and none that is; or else the bonus lessons,
        and there are none."""
        course = self.course
        ids = {*REGION.findall(text)} & {*course.regions, *course.dropped}
        tasks = {(number or pipeline).lower() for number, pipeline in TASK.findall(text)}
        if ids or tasks:
            return not (ids & {*course.regions, *self.solved} or tasks & course.tasks.keys())
        has_folder = any(name.startswith("beyond/") for name in self.files)
        return ("beyond/" in text and not has_folder) or (bool(BONUS.search(text)) and not course.bonus_regions)

    def _is_lost(self, text: str, only: re.Pattern[str] | None = None) -> bool:
        """Return whether a text names a file of the source that is not here; `only` texts of this form."""
        named = FILE.findall(text) if only is None or only.match(text.strip()) else []
        return any(name in self.source and name not in self.files for name in named)

    def _is_dropped(self, link: str, page: str) -> bool:
        target = target_of(link, page)
        return target in self.source and target not in self.files

    def _region(self, command: re.Match[str]) -> str:
        names = {*self.course.dropped, *(row.marker for row in self.course.dropped.values())}
        if command[2] not in names - graded_by_name(self.course):
            return command.group()
        first = next(iter(self.course.regions.values()))
        return f"{command[1]} {first.id if '.' in command[2] else first.marker}"

    def _link(self, link: re.Match[str], page: str) -> str:
        return ("" if link[1] else link[2]) if self._is_dropped(link[3], page) else link.group()


def target_of(link: str, page: str) -> str:
    """The file or folder that a link of a page leads to, from the top; the page itself for "#heading"."""
    path = link.partition("#")[0]
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page


def graded_by_name(course: Course) -> set[str]:
    """What the graders can be asked for."""
    return {*course.regions, *(task.marker for task in course.tasks.values())}


def dead_ends(texts: Mapping[str, str], files: Collection[str], course: Course) -> Iterator[str]:
    """A line for each link, command and region of Markdown pages that leads nowhere in a handout of these files."""
    there = {*files, *(folder for file in files for folder in _folders(file))}
    headings = {page: set(_anchors(text)) for page, text in texts.items()}
    for page, text in texts.items():
        in_code = False
        for number, line in enumerate(text.split("\n"), start=1):
            in_code ^= bool(FENCE.match(line))
            where = f"{page}:{number}: "
            commands = [line] if in_code else [code.strip("`") for code in CODE.findall(line)]
            for link in LINK.finditer("" if in_code else CODE.sub("", line)):
                if "://" in link[3] or link[3].startswith("mailto:"):
                    continue
                target, heading = target_of(link[3], page), link[3].partition("#")[2]
                if target not in there or (heading and heading not in headings.get(target, ())):
                    yield f"{where}the link {link[3]} leads nowhere; fix it, or ship the page"
            for command in filter(COMMAND.match, map(str.strip, commands)):
                yield from (f"{where}the command {command!r} names {name}, which does not ship"
                            for name in _absent(command, there))  # fmt: skip
            for command in commands:
                yield from (f"{where}{flag} {name} names a region or task that the course does not have"
                            for flag, name in GRADE.findall(command) if name not in graded_by_name(course))  # fmt: skip


def _folders(file: str) -> list[str]:
    parts = file.split("/")[:-1]
    return ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


def _absent(command: str, there: Collection[str]) -> Iterator[str]:
    """What a command names of our folders that is not there; a program of somebody else is not looked for."""
    yield from (name for name in FILE.findall(command) if name.partition("/")[0] in there and name not in there)
    for module in MODULE.findall(command):
        path = module.replace(".", "/")
        if path.partition("/")[0] in there and not {f"{path}.py", f"{path}/__main__.py"} & {*there}:
            yield module


def _anchors(text: str) -> Iterable[str]:
    """The names by which a heading can be linked to, as GitHub makes them."""
    for heading in re.findall(r"^#+ +(.*)$", text, re.MULTILINE):
        plain = LINK.sub(r"\2", heading).replace("`", "").lower()
        yield re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
