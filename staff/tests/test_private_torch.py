"""docs/private_torch.md lists every private name of others that the code uses, and no other."""

import ast
import re

from common.paths import ROOT

TABLE = (ROOT / "docs" / "private_torch.md").read_text(encoding="utf-8")
DOCUMENTED = {"_asdict", "_replace", "_exit", "_current_frames", "_getframe"}  # by Python
DEFINED = re.compile(r"(?:def|class|self\.|cls\.|^ *)(?: *)(_[a-z]\w*)(?: *[(:=,]|\b)", re.MULTILINE)


def test_every_private_name_of_torch_is_listed_with_its_files():
    folders = ("common", "course", "task*", "pipeline", "beyond", "benchmark", "cluster", "grader", "handin", "staff")
    files = [
        path for folder in folders for path in ROOT.glob(f"{folder}/**/*.py") if "staff/tests/" not in path.as_posix()
    ]
    ours = DOCUMENTED.union(*(DEFINED.findall(path.read_text(encoding="utf-8")) for path in files))
    used = {
        (node.attr, path.relative_to(ROOT).as_posix())
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr) and node.attr not in ours
    }

    rows = TABLE.splitlines()
    assert used
    assert {(name, file) for name, file in used if not any(name in row and file in row for row in rows)} == set()


def test_every_listed_name_is_still_in_one_of_its_files():
    gone = set()
    for names, files in re.findall(r"^\| (.*?) \| ([\w/.]+\.py.*?) \|", TABLE, re.MULTILINE):
        text = "".join((ROOT / file).read_text(encoding="utf-8") for file in files.split(", "))
        gone |= {name for name in re.findall(r"(?<!\w)_[a-zA-Z]\w+", names) if name not in text}

    assert gone == set()
