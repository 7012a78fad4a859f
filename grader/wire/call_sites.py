"""Finds where a collective or an event comes from: the student's line, and the library that it goes through."""

import os
import sysconfig
from pathlib import Path, PurePath
from types import FrameType

ROOT = str(Path(__file__).resolve().parents[2])
STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep

# Between a student's dist.all_reduce(...) and the backend are only these files: such a call is the student's own.
PLUMBING = ("distributed_c10d", "c10d_logger")
# The decorator around names that torch has replaced, such as reduce_scatter_tensor.
DEPRECATED = ("typing_extensions", "warnings", "_py_warnings")
COURSE_FOLDERS = {"grader", "tests", "staff"}  # no student's code


class Sites:
    """Reads from the stack where a call comes from. It goes by file names, since code can set a module's __name__."""

    def __init__(self, tree: str, torch: str) -> None:
        """`torch` is the folder that torch is installed in."""
        self.tree = tree
        self._names: dict[str, str] = {}
        self._parallel = os.path.join(torch, "nn", "parallel", "")
        self._autograd = os.path.join(torch, "autograd", "")
        self._course = tuple(os.path.join(ROOT, name, "") for name in sorted(COURSE_FOLDERS))
        self._libraries = (os.path.join(os.path.dirname(torch), ""), STANDARD_LIBRARY)
        self._plumbing = tuple(os.path.join(torch, "distributed", f"{name}.py") for name in PLUMBING)
        self._plumbing += tuple(f"{folder}{name}.py" for folder in self._libraries for name in DEPRECATED)

    def __call__(self, frame: FrameType | None) -> tuple[str, str]:
        """Return file:line of the innermost frame in the student's tree, and the library between it and the grader.

        The library is "" for a call that the student's own line makes, "DistributedDataParallel" inside of it,
        "backward" for what autograd calls, else the name of the library's module.
        """
        inside = ""
        while frame is not None:
            file = frame.f_code.co_filename
            name = self.students(file)
            if name:
                return f"{name}:{frame.f_lineno}", inside
            if file.startswith(self._parallel):
                inside = "DistributedDataParallel"
            elif not inside and file not in self._plumbing and not file.startswith(self._course):
                inside = "backward" if file.startswith(self._autograd) else self._module(file)
            frame = frame.f_back
        return "", inside

    def _module(self, file: str) -> str:
        """Return the name under which a library's file is imported; for all other code, the file name itself."""
        folder = next((folder for folder in self._libraries if file.startswith(folder)), "")
        return file.removeprefix(folder).removesuffix(".py").replace(os.sep, ".") if folder else file

    def students(self, filename: str) -> str:
        """Return student_file(filename), and remember it: every frame of every call needs it."""
        if filename not in self._names:
            self._names[filename] = student_file(self.tree, filename)
        return self._names[filename]


def student_file(tree: str, filename: str) -> str:
    """Return the path of a file inside the student's tree, "" for everything that is not a student's."""
    parts = PurePath(filename).relative_to(tree).parts if filename.startswith(tree.rstrip("/") + "/") else ()
    hidden = any(part.startswith(".") or part == "site-packages" for part in parts)
    return "" if not parts or hidden or parts[0] in COURSE_FOLDERS else "/".join(parts)
