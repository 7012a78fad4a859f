"""Find hand-ins whose code is more alike than chance: regions compared after names, layout and order are normalised.

    python -m staff.similar submissions/* --out similar.html
    python -m staff.similar submissions/* --against ../2025/submissions/* --out similar.html
    python -m staff.similar submissions/* --jplag folders      # a folder for each, for JPlag or Dolos

Statements that most hand-ins share do not count: the handout dictates them, or there is only one natural way to write
them. Two hand-ins with exactly the same statements throughout are reported all the same. Our own solution and the known
variants take part in the comparison, under the name "our solutions". A reported pair is a reason to read both and to
ask, never a verdict: staff/integrity.md says what it can and cannot show.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import ast
import difflib
import html
import itertools
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import InputError, exit_on_input_error
from common.paths import atomic_write
from course.table import Course, load_course
from course.todo import find_blocks
from staff.grade.submissions import write_files
from staff.proofs.bank import solved_files
from staff.reports.handed_in import unpacked

OURS = "our solutions"
COMMON = 0.5  # of the hand-ins have the same statement: more, and it does not count
ALIKE = 0.62  # the share of what counts that a pair has in common, from which on it is reported
FEWEST = 12.0  # nats that a pair must share: about five statements that one other in a class of 50 has
SAME = 60  # statements: two hand-ins with at least so many, and no others, are reported however common these are
Regions = dict[str, str]  # region -> what is written for it
Shapes = Counter[tuple[str, str]]  # (region, normalised statement)


@dataclass(frozen=True)
class Pair:
    """Two hand-ins, the share of the smaller one's rare statements that both have, and how much that says."""

    names: tuple[str, str]
    share: float
    evidence: float
    regions: tuple[str, ...]  # that have most of it


def regions_of(code: Mapping[str, bytes], course: Course) -> Regions:
    """Return what is written for each region in its home file; a file that cannot be read has none."""
    bodies: Regions = {}
    for file in dict.fromkeys(region.file for region in course.regions.values()):
        try:
            blocks = find_blocks(code.get(file, b"").decode(errors="replace"), file)
        except InputError:
            continue
        for block in blocks:
            if block.attempted and block.id in course.regions and course.regions[block.id].file == file:
                bodies[block.id] = f"{bodies.get(block.id, '')}{block.body}\n"
    return bodies


def shapes(bodies: Regions) -> Shapes:
    """Return the statements of all regions, without layout, order and the student's own names."""
    return Counter((region, shape) for region, body in bodies.items() for shape in _statements(body))


def _statements(body: str) -> Iterable[str]:
    try:
        tree = ast.parse(body)
    except (SyntaxError, ValueError, RecursionError):
        return []
    own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in reversed([*ast.walk(tree)]):  # from the leaves on: what is sorted below is a normal form already
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
            node.left, node.right = sorted((node.left, node.right), key=ast.dump)
        if isinstance(node, ast.Name) and node.id in own:
            node.id = "_"
        elif isinstance(node, ast.arg):
            node.arg = "_"
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            node.name = "_"
    return [_shape(node) for node in ast.walk(tree) if isinstance(node, ast.stmt)]


def _shape(statement: ast.stmt) -> str:
    """Return a statement without the statements in it, which have shapes of their own."""
    inner = ("body", "orelse", "finalbody", "handlers")
    fields = {
        name: value for name, value in ast.iter_fields(statement) if name not in inner or isinstance(value, ast.AST)
    }
    return f"{type(statement).__name__} " + " ".join(
        ", ".join(map(_text, value)) if isinstance(value, list) else _text(value) for value in fields.values()
    )


def _text(value: object) -> str:
    return ast.dump(value) if isinstance(value, ast.AST) else repr(value)


def pairs(code: Mapping[str, Regions], look_at: Iterable[str]) -> list[Pair]:
    """Return the pairs that are more alike than chance, the most alike first; one of each must be in `look_at`."""
    all_shapes = {name: shapes(bodies) for name, bodies in code.items()}
    holders = Counter(shape for of in all_shapes.values() for shape in of)
    most = max(3, COMMON * len(code))
    weight = {shape: math.log(len(code) / count) for shape, count in holders.items() if count <= most}
    rare = {name: {shape: weight[shape] for shape in of if shape in weight} for name, of in all_shapes.items()}
    chosen, found = {*look_at}, []
    for one, other in itertools.combinations(code, 2):
        if not {one, other} & chosen:
            continue
        shared = rare[one].keys() & rare[other].keys()
        evidence = sum(weight[shape] for shape in shared)
        share = evidence / max(1e-9, min(sum(rare[one].values()), sum(rare[other].values())))
        # Where half of a class has the same code, nothing in it is rare; but nobody writes all of it alike by chance.
        if is_same := all_shapes[one] == all_shapes[other] and all_shapes[one].total() >= SAME:
            shared, share = set(all_shapes[one]), 1.0
        if is_same or (share >= ALIKE and evidence >= FEWEST):
            by_region = dict.fromkeys((region for region, _ in shared), 0.0)
            for region, shape in shared:
                by_region[region] += weight.get((region, shape), 0.0)
            regions = tuple(sorted(by_region, key=lambda region: -by_region[region]))
            found.append(Pair((one, other), share, evidence, regions))
    return sorted(found, key=lambda pair: (-pair.share, -pair.evidence, pair.names))


def page(found: Sequence[Pair], code: Mapping[str, Regions]) -> str:
    """Return a page that shows each pair's regions side by side."""
    text = "<!doctype html><meta charset=utf-8><title>Similar hand-ins</title><style>td{font-family:monospace}</style>"
    for pair in found:
        text += f"<h2>{html.escape(' and '.join(pair.names))}: {pair.share:.0%}</h2>"
        for region in pair.regions:
            left, right = (code[name].get(region, "").splitlines() for name in pair.names)
            one, other = map(html.escape, pair.names)
            text += f"<h3>{region}</h3>{difflib.HtmlDiff(wrapcolumn=70).make_table(left, right, one, other)}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m staff.similar", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("submissions", nargs="+", type=Path, metavar="SUBMISSION", help="a folder or an archive")
    parser.add_argument(
        "--against", nargs="+", type=Path, default=[], help="others to compare with: earlier terms, ..."
    )
    parser.add_argument("--out", type=Path, help="a page with each pair side by side")
    parser.add_argument("--jplag", type=Path, metavar="DIR", help="write the regions of each into a folder of its own")
    arguments = parser.parse_args()
    course = load_course()
    with unpacked([*arguments.submissions, *arguments.against], course) as hand_ins:
        code = {of.name: regions_of(of.code, course) for of in hand_ins} | {OURS: regions_of(solved_files(), course)}
    looked_at = {Path(os.path.abspath(path)) for path in arguments.submissions}
    names = [of.name for of in hand_ins if of.path in looked_at]
    for of in hand_ins:
        if not code[of.name]:
            del code[of.name]  # it has nothing in common with anybody, and must not make the rest look rarer
            print(
                f"note: {of.name} is not compared: {'; '.join(of.problems) or 'no region is solved'}", file=sys.stderr
            )
    found = pairs(code, names)
    for pair in found:
        print(f"{pair.share:4.0%}  {' and '.join(pair.names)}: {', '.join(pair.regions[:8])}")
    if arguments.out:
        with atomic_write(arguments.out) as file:
            file.write(page(found, code))
    if arguments.jplag:
        files = {f"{name}/{id}.py": body.encode() for name, of in code.items() for id, body in of.items()}
        write_files(files, arguments.jplag)
    print(json.dumps({"hand_ins": len(names), "pairs": len(found), "most": round(found[0].share, 2) if found else 0}))


if __name__ == "__main__":
    exit_on_input_error(main)
