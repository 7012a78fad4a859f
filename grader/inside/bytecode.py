"""Bytecode of the course's own files, made once in the zygote: each rank would compile the same 30 files again.

A quarter of what a rank cost went there, since ranks leave no __pycache__ in a student's tree. A file of the tree that
differs by one byte, such as one that the student has changed, is compiled in the rank as ever.
"""

import contextlib
import importlib.machinery
import importlib.util
import py_compile
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

IMPORTED = ("common", "pipeline")  # what task scripts import
LESSONS = ("beyond", "pipeline")  # folders of lessons that import each other


class CompiledFiles:
    """Bytecode by path below `root`, the grader's own checkout. Each piece names the source that it was made from."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.pieces: dict[str, bytes] = {}

    def compile(self, folders: Iterable[str]) -> None:
        """Compile what is not compiled yet. A file that cannot be is left out: the rank that imports it says why."""
        with tempfile.TemporaryDirectory() as scratch:
            target = str(Path(scratch) / "compiled.pyc")
            for path in self._sources(folders):
                with contextlib.suppress(py_compile.PyCompileError, OSError, ValueError, RecursionError, MemoryError):
                    py_compile.compile(
                        str(path), target, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH
                    )
                    self.pieces[path.relative_to(self.root).as_posix()] = Path(target).read_bytes()

    def _sources(self, folders: Iterable[str]) -> Iterable[Path]:
        for folder in folders:
            for path in sorted(Path(self.root, folder).rglob("*.py")):
                if path.relative_to(self.root).as_posix() not in self.pieces:
                    yield path

    def read(self, file: str) -> bytes:
        """Return a file of `root`, or for a name that ends in .pyc its bytecode; OSError if that was not made."""
        if not file.endswith(".pyc"):
            return Path(self.root, file).read_bytes()
        if (source := file.removesuffix("c")) not in self.pieces:
            raise FileNotFoundError(file)
        return self.pieces[source]

    def serve(self, tree: str) -> None:
        """From now on, imports from `tree` in this process use the bytecode of files that are equal."""
        pieces = {importlib.util.cache_from_source(f"{tree}/{name}"): piece for name, piece in self.pieces.items()}

        class Loader(importlib.machinery.SourceFileLoader):
            def get_data(self, path: str) -> bytes:
                """A file's content; bytecode comes from memory. The caller compares its hash with the source's."""
                return pieces[path] if path in pieces else super().get_data(path)

        def hook(path: str) -> importlib.machinery.FileFinder:
            if path != tree and not path.startswith(f"{tree}/"):
                raise ImportError("not in the student's tree")  # Python asks the next hook
            return importlib.machinery.FileFinder(path, (Loader, [".py"]))

        sys.path_hooks.insert(0, hook)
