"""docs/private_torch.md lists every private name of others that the code uses, and no other."""

import ast
import re
import tomllib
from collections.abc import Iterator

from torch.distributed import ProcessGroup

from common.paths import ROOT
from grader.inside.backend import BrokeredGroup

TABLE = (ROOT / "docs" / "private_torch.md").read_text(encoding="utf-8")
DOCUMENTED = {"_asdict", "_replace", "_exit", "_current_frames", "_getframe"}  # by Python
PRIVATE = re.compile(r"_[a-zA-Z]")


def private_names(tree: ast.Module) -> Iterator[str]:
    """Private attributes, except those of self and cls, and what is imported by such names or from such modules."""
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case (
                ast.Attribute(attr=name) | ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(str(name)), *_])
            ):
                names = [name]
            case ast.Import(names=aliases):
                names = [part for alias in aliases for part in alias.name.split(".")]
            case ast.ImportFrom(module=str(module), names=aliases):
                is_private = any(PRIVATE.match(part) for part in module.split("."))
                names = [alias.name for alias in aliases if is_private or PRIVATE.match(alias.name)]
                yield from names
        yield from filter(PRIVATE.match, names)


def defined_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def test_every_private_name_is_listed_with_its_files():
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]["files"]
    paths = [path for folder in folders for path in [*(ROOT / folder).rglob("*.py"), ROOT / folder] if path.is_file()]
    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    product = {file: tree for file, tree in trees.items() if not file.startswith("staff/tests/")}
    ours = {name for tree in product.values() for name in defined_names(tree)} | DOCUMENTED

    used = {(name, file) for file, tree in product.items() for name in set(private_names(tree)) - ours}

    overridden = {name for name in vars(BrokeredGroup) if re.match(r"_[a-z]", name) and hasattr(ProcessGroup, name)}
    assert {use for use in used if not any(use[0] in row and use[1] in row for row in TABLE.splitlines())} == set()
    assert {name for name in overridden if f"`{name}`" not in TABLE} == set()
    assert used and overridden


def test_every_listed_name_is_still_in_one_of_its_files():
    gone = set()
    for names, files in re.findall(r"^\| (.*?) \| ([\w/.]+\.py.*?) \|", TABLE, re.MULTILINE):
        text = "".join((ROOT / file).read_text(encoding="utf-8") for file in files.split(", "))
        gone |= {name for name in re.findall(r"(?<!\w)_[a-zA-Z]\w+", names) if name not in text}

    assert gone == set()
