"""staff.similar on a class of 48 that is made from the bank: right variants drawn at random, and 12 copies."""

import ast
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from common.paths import ROOT
from course.table import load_course
from course.todo import find_blocks, replace_block
from staff.grade import result_store
from staff.grade.class_files import write_class
from staff.grade.submissions import write_files
from staff.proofs.bank import VARIANTS, load_bank, solved_files
from staff.similar import pairs, regions_of
from staff.tests.rows import entry, row

pytestmark = pytest.mark.medium
COURSE = load_course()
Bodies = dict[tuple[str, int], str]  # region, part


def choices() -> dict[tuple[str, int], list[str]]:
    """The solution and every right variant of each region's parts; bonus lessons are left out."""
    found: dict[tuple[str, int], list[str]] = {}
    for file in dict.fromkeys(region.file for region in COURSE.regions.values() if not region.bonus):
        for block in find_blocks(solved_files()[file].decode(), file):
            if COURSE.regions[block.id].file == file:
                found[block.id, block.part] = [block.body]
    for variant in load_bank():
        for place, body in variant.bodies.items() if variant.kind == VARIANTS else ():
            region, _, part = place.partition("/")
            if (region, int(part or 1)) in found:
                found[region, int(part or 1)].append(body)
    return found


def copied(body: str, rng: random.Random) -> str:
    """Return the same code with other names, layout and, where it is possible, order."""
    tree = ast.parse(body)
    own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names = {name: f"my_{rng.randrange(10**6)}" for name in sorted(own)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = names.get(node.id, node.id)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
            node.left, node.right = node.right, node.left
        block = getattr(node, "body", None)
        if isinstance(block, list) and len(block) > 1:
            i = rng.randrange(len(block) - 1)
            block[i], block[i + 1] = block[i + 1], block[i]
    return f"# all my own work\n{ast.unparse(tree)}"


def write_hand_in(folder: Path, bodies: Bodies) -> None:
    files = {}
    for file in dict.fromkeys(COURSE.regions[region].file for region, _ in bodies):
        text = solved_files()[file].decode()
        for block in reversed(find_blocks(text, file)):
            if (block.id, block.part) in bodies and COURSE.regions[block.id].file == file:
                text = replace_block(text, block, bodies[block.id, block.part])
        files[file] = text.encode()
    write_files(files, folder)


def test_copies_with_other_names_and_order_are_found_and_hardly_anybody_else(tmp_path):
    rng, parts = random.Random(2), choices()
    draws = [{part: rng.choice(bodies) for part, bodies in parts.items()} for _ in range(36)]
    for i in range(12):  # half of them copy everything, the others 7 of 10 parts
        kept = [part for part in parts if i < 6 or rng.random() < 0.7]
        own = {part: rng.choice(bodies) for part, bodies in parts.items()}
        draws.append(own | {part: copied(draws[i][part], rng) for part in kept})
    for i, bodies in enumerate(draws):
        write_hand_in(tmp_path / f"class/s{i:02}", bodies)

    out = tmp_path / "similar.html"
    (tmp_path / "class/cut.zip").write_bytes(b"PK")
    words = [*sorted((tmp_path / "class").iterdir()), "--out", out, "--jplag", tmp_path / "jplag"]
    done = subprocess.run(
        [sys.executable, "-m", "staff.similar", *map(str, words)], cwd=ROOT, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("note: cut is not compared: cut.zip: expected") and done.stderr.count("note") == 1
    *lines, last = done.stdout.splitlines()
    found = {line.split("%  ")[1].split(":")[0] for line in lines}
    copies = {f"s{i:02} and s{36 + i:02}" for i in range(12)}
    assert {f"s{i:02} and s{36 + i:02}" for i in range(6)} <= found and len(found & copies) >= 11, done.stdout
    assert len(found - copies) <= 1 and json.loads(last)["pairs"] == len(found)
    assert "s00 and s36" in out.read_text() and "my_" in out.read_text()
    assert len(list((tmp_path / "jplag/s00").glob("*.py"))) == len({region for region, _ in parts})


def test_whoever_has_the_same_code_is_found_even_where_it_is_that_of_the_whole_class():
    same = regions_of(solved_files(), COURSE)
    short = {"1.2": same["1.2"]}

    found = pairs({"ada": same, "bob": same, "our solutions": same, "eve": short, "eva": short}, ["ada", "bob", "eve"])

    assert {(pair.names, pair.share) for pair in found} == {
        (("ada", "bob"), 1.0),
        (("ada", "our solutions"), 1.0),
        (("bob", "our solutions"), 1.0),
    }


def test_equal_hand_ins_are_on_the_overview_without_asking(tmp_path):
    for name, digest in (("ada", "1"), ("bob", "1"), ("eve", "2")):
        of = row(entry("1.1", "passed"), name=name, unreadable=False, wall_s=1.0, peak_pss_mb=1, hand_in=digest)
        result_store.keep(tmp_path, of, of.report, "")

    write_class(tmp_path, [], COURSE, "")

    page = (tmp_path / "index.html").read_text()
    assert "Identical submissions" in page and '<td class="name">ada, bob</td>' in page
