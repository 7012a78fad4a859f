"""Imports once, in the zygote, what scripts import of common/: grading a solved hand-in takes a seventh less time than
with an import in each rank (57 s instead of 66 s).

This is done only for the first tree, and only if its files are as they were given out, see grader/given_files.py. The
code that runs here is the grader's own copy, under the name that the file has in the tree. No line of a student runs in
the zygote.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from grader.inside.find import ROOT
from grader.inside.preload import without_collections
from grader.wire.values import Fields

# With all that they import; none of them imports a file with a region.
MODULES = (
    "common.arguments",
    "common.data.glue",
    "common.data.oscar",
    "common.evaluation",
    "common.models.fit",
    "common.models.load",
    "common.record",
)


class GivenModules:
    """The modules of one tree that are loaded already."""

    def __init__(self) -> None:
        self.tried: Fields | None = None
        self.names: list[str] = []

    def load(self, given: Fields | None) -> None:
        """Import the modules for this tree, unless another one came first. If one cannot be imported, keep none of
        them: the ranks will say why."""
        if self.tried is not None or given is None:
            return
        self.tried = given
        before, write = set(sys.modules), sys.dont_write_bytecode
        finder = _Finder(given["tree"], given["files"])
        sys.meta_path.insert(0, finder)
        sys.dont_write_bytecode = True
        try:
            with without_collections():
                for name in MODULES:
                    importlib.import_module(name)
        except Exception:
            self.names = [name for name in sys.modules if name not in before and _is_common(name)]
            self.forget()
        finally:
            sys.meta_path.remove(finder)
            sys.dont_write_bytecode = write
        self.names = [name for name in sys.modules if _is_common(name)]

    def fit(self, given: Fields | None) -> bool:
        """Return whether the modules are those of this tree, as it is now."""
        return bool(self.names) and given == self.tried

    def forget(self) -> None:
        """Remove the modules, in a rank of another tree: it imports its own."""
        for name in self.names:
            sys.modules.pop(name, None)
        self.names = []


def _is_common(name: str) -> bool:
    return name.split(".")[0] == "common"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds `files` of `tree` as modules."""

    def __init__(self, tree: str, files: Sequence[str]) -> None:
        self.tree, self.files = Path(tree), set(files)

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        place = fullname.replace(".", "/")
        for file, folder in ((f"{place}.py", None), (f"{place}/__init__.py", place)):
            if file in self.files:
                loader = _Loader(fullname, str(self.tree / file), file)
                inside = [str(self.tree / folder)] if folder else None
                return importlib.util.spec_from_file_location(
                    fullname, loader.path, loader=loader, submodule_search_locations=inside
                )
        return None


class _Loader(importlib.machinery.SourceFileLoader):
    """Executes the grader's copy of a file under a path in the tree."""

    def __init__(self, name: str, path: str, file: str) -> None:
        super().__init__(name, path)
        self.file = file

    def get_data(self, path: str) -> bytes:
        """Return the source of the grader's copy; there is no bytecode."""
        if path != self.path:
            raise FileNotFoundError(path)
        return Path(ROOT, self.file).read_bytes()
