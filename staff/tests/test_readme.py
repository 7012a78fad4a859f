"""The README says what is there: its tables are those of course.toml, its tree that of the files."""

import re
import subprocess

from common.paths import ROOT
from course.table import load_course

README = (ROOT / "README.md").read_text(encoding="utf-8")
COURSE = load_course()


def rows(heading, text=README):
    """The cells of the first table under a heading, without its first two lines."""
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_table_of_regions_is_that_of_the_course():
    bonus = sum(region.points for region in COURSE.regions.values() if region.task in COURSE.bonus_tasks)
    *table, total, of_bonus = rows("Regions and points")

    assert [total[-1], of_bonus[-1]] == [str(COURSE.total), str(bonus)]
    beyond = (ROOT / "beyond" / "README.md").read_text(encoding="utf-8")
    *of_beyond, sum_of_beyond = rows("The regions", beyond)
    assert sum_of_beyond[-1] == str(bonus)
    said = [(id, file, points) for id, _, file, points in [*table, *of_beyond]]
    assert said == [(region.id, region.file, str(region.points)) for region in COURSE.regions.values()]


def test_make_demo_runs_the_same_command_in_the_handout():
    """The README describes one demo to both, so both Makefiles must run it."""
    recipes = [
        re.search(r"^demo: setup\n\t(.*)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
        for path in ("Makefile", "staff/handout/files/Makefile")
    ]

    assert all(recipes) and len({recipe[1] for recipe in recipes if recipe}) == 1


def tree():
    """The names in the first column of the file tree, and the Python files named behind a folder as folder/file."""
    named = set()
    for line in README.split("## The file tree\n")[1].split("```")[1].splitlines():
        first, _, rest = line.partition("   ")
        if "/" in first or "." in first or "Makefile" in first:
            names = first.split()
            named |= {name.rstrip("/") for name in names}
            named |= {names[0] + file for file in re.findall(r"\w+\.py", rest) if names[0].endswith("/")}
    return named - {"handout."}


def test_what_the_file_tree_names_is_there():
    assert {name for name in tree() if not (ROOT / name).exists()} == set()


def test_the_file_tree_names_every_file_and_folder_at_the_top():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    top = {file.split("/")[0] for file in tracked if not file.startswith(".")}

    assert top - {"requirements.txt", "constraints.txt"} <= {name.split("/")[0] for name in tree()}
