"""The gates of the handout: everything that would give a solution away, or leave a student without help.

A line or a name counts as leaked wherever it is: in code, a comment, a README, a hint. A formula counts in code only:
prose may teach it.
"""

import ast
import builtins
import functools
import keyword
import re
import tokenize
import tomllib
from collections.abc import Iterable

from common.errors import InputError
from course.table import Course
from course.todo import find_blocks, read_tokens
from staff.handout.regions import Region

_MARKER = re.compile(r"\b(begin|end)[\s_-]*solution", re.IGNORECASE)
_NO_NAMES = {*keyword.kwlist, *dir(builtins), "self"}
_OPENING = set("([{")
_LAST_COMMA = {(",", closing) for closing in ")]}"}  # goes away when a statement is written on one line
_NAMES_OF_A_SECRET = 2  # a line with fewer names, such as `return x`, stands in every program


def find_leaks(files: dict[str, bytes], regions: list[Region], course: Course) -> list[str]:
    """Every reason not to give these files out, one line each; `regions` are those that must not be solved in them."""
    problems = []
    texts = {name: text for name, content in files.items() if (text := _decoded(content)) is not None}
    for name, text in texts.items():
        if name.endswith(".py"):
            problems += _broken_code(name, text, regions)
        problems += [
            f"{name}:{number}: a solution marker remains: {line.strip()}"
            for number, line in enumerate(text.split("\n"), start=1)
            if _MARKER.search(line)
        ]
    problems += _leaked_lines(texts, regions, course.handout.common_lines)
    problems += _leaked_names(texts, regions, course.handout.taught_names)
    return problems + _without_help(texts, course)


def _decoded(content: bytes) -> str | None:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return None  # a picture


def _broken_code(name: str, text: str, regions: list[Region]) -> list[str]:
    """The file compiles, and `submit.py carry` will find each of its regions, not yet attempted."""
    try:
        compile(text, name, "exec", dont_inherit=True)
        open_todos = [block.id for block in find_blocks(text, name) if not block.attempted] if "TODO" in text else []
    except (SyntaxError, InputError) as error:
        return [f"{name}: does not compile without its solutions: {error}"]
    expected = [region.id for region in regions if region.file == name]
    return [] if open_todos == expected else [f"{name}: expected the open TODOs {expected}, got {open_todos}"]


def solution_lines(body: str) -> list[list[str]]:
    """The lines of a body that say something, as tokens without comments; a statement of several lines joined, too.

    The line that only opens such a statement, `f(`, is left out: it stands in every program that calls f.
    """
    lines: dict[int, list[tokenize.TokenInfo]] = {}
    statements: list[list[tokenize.TokenInfo]] = [[]]
    for token in read_tokens(body, "solution"):
        if token.type == tokenize.NEWLINE:
            statements.append([])
        elif token.type != tokenize.COMMENT and token.string.strip():
            lines.setdefault(token.start[0], []).append(token)
            statements[-1].append(token)
    token_lines = []
    for tokens in [*lines.values(), *statements]:
        names = {token.string for token in tokens if token.type == tokenize.NAME} - _NO_NAMES
        words = [token.string for token in tokens]
        if len(names) >= _NAMES_OF_A_SECRET and words[-1] not in _OPENING:
            pairs = zip(words, [*words[1:], ""], strict=True)
            token_lines.append([word for word, after in pairs if (word, after) not in _LAST_COMMA])
    return token_lines


def _squeezed(line: str) -> str:
    return re.sub(r"\s+", "", line)


def _leaked_lines(texts: dict[str, str], regions: list[Region], common: Iterable[str]) -> list[str]:
    harmless = {_squeezed(line) for line in common}
    # Longest word of a secret line -> the line without blanks -> its pattern and region: a pattern is only tried on
    # the few lines that have this word.
    secrets: dict[str, dict[str, tuple[re.Pattern, str]]] = {}
    for region in regions:
        for tokens in solution_lines(region.body):
            spaced = r"\s*".join(map(re.escape, tokens))
            # not as a part of a longer expression, nor as the head of the function that it calls
            pattern = re.compile(rf"(?<![\w.])(?<!\bdef ){spaced}(?!\w|\.\w|[(\[+*/])")
            if (text := _squeezed("".join(tokens))) not in harmless:
                word = max(re.findall(r"\w+", " ".join(tokens)), key=len)
                secrets.setdefault(word, {})[text] = pattern, region.id
    return [
        f"{name}:{number}: a line of the solution of {id} appears here: {line.strip()}"
        for name, text in texts.items()
        for number, line in enumerate(text.split("\n"), start=1)
        for word in dict.fromkeys(re.findall(r"\w+", line))
        for pattern, id in secrets.get(word, {}).values()
        if pattern.search(line)
    ]


def _leaked_names(texts: dict[str, str], regions: list[Region], taught: Iterable[str]) -> list[str]:
    """Names that the solutions alone use, found in prose. English words cannot be told from names, and are let be."""
    in_code = {name for file, text in texts.items() if file.endswith(".py") for name in _names(text)}
    owner = {name: region for region in regions for name in _names(region.body)}
    secrets = {name for name in owner if _is_coined(name)} - in_code - set(taught) - _NO_NAMES
    return [
        f"{file}:{number}: the name {word}, which only solution {owner[word].id} uses, appears here: {line.strip()}"
        for file, text in texts.items()
        for number, line in enumerate(text.split("\n"), start=1)
        for word in sorted(secrets.intersection(re.findall(r"\w+", line)))
    ]


@functools.lru_cache(maxsize=1024)  # several handouts of nearly the same files may be made, one after the other
def _names(text: str) -> set[str]:
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return set()  # reported as code that does not compile
    values = [
        getattr(node, field, None) for node in nodes for field in ("id", "attr", "arg", "name", "asname", "module")
    ]
    return {part for value in values if isinstance(value, str) for part in value.split(".")}


def _is_coined(name: str) -> bool:
    return "_" in name.strip("_") or not (name.islower() or name.istitle() or name.isupper())


def _without_help(texts: dict[str, str], course: Course) -> list[str]:
    """Every region has its hints in the handout's course.toml, which ends before the staff's part, and on its page a
    section whose heading names it."""
    try:
        table = tomllib.loads(texts.get("course.toml", ""))
    except tomllib.TOMLDecodeError as error:
        return [f"course.toml: does not parse once the staff's part is cut off: {error}"]
    problems = [
        f"course.toml: the staff's part is not cut off: [{key}]" for key in ("handout", "hidden") if key in table
    ]
    for id, row in course.regions.items():
        if table.get("regions", {}).get(id, {}).get("hints") != list(row.hints):
            problems.append(f"course.toml: the handout's copy lacks the hints of region {id}")
        if not re.search(
            rf"^#+ .*(?<![\w.]){re.escape(id)}(?!\w|\.\d)", texts.get(course.readme(id), ""), re.MULTILINE
        ):
            problems.append(f"{course.readme(id)}: expected a section whose heading names {id}, got none")
    return problems
