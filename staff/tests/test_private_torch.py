"""docs/private_torch.md lists every private name of torch that the code uses, and no other."""

import ast
import re

from torch.distributed import ProcessGroup

from common.paths import ROOT
from grader.inside.backend import BrokeredGroup

TABLE = (ROOT / "docs" / "private_torch.md").read_text(encoding="utf-8")
FOLDERS = (
    "common", "pipeline", "beyond", "benchmark", "grader", "cluster", "staff", "handin", "task4_traffic",
    "tests/pipeline",
)  # fmt: skip
OF_TORCH = {"torch", "dist", "c10d", "nn"}


def private_names(text: str) -> set[str]:
    """Private attributes of torch's modules, and what is imported from private modules or by private names."""
    private = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-zA-Z]", node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in OF_TORCH:
                private.add(node.attr)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "_C":
            private.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [alias.name for alias in node.names]
            private.update(names if "._" in str(node.module) else [name for name in names if name.startswith("_")])
    return private - {"_C", "_autograd"}


def test_every_private_name_is_listed_with_its_files():
    missing = set()
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        if not file.startswith(("staff/tests/", "staff/banks/")):
            for name in private_names(path.read_text(encoding="utf-8")):
                if not any(name in row and file in row for row in TABLE.splitlines()):
                    missing.add((name, file))

    assert missing == set()


def test_every_private_method_that_our_process_group_overrides_is_listed():
    overridden = {name for name in vars(BrokeredGroup) if re.match(r"_[a-z]", name) and hasattr(ProcessGroup, name)}

    assert {name for name in overridden if f"`{name}`" not in TABLE} == set()
    assert "_get_backend" in overridden
