"""The grader's own checkout: its root, the functions in it by name, and the paths in it that a traceback shows."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
# Added to the file name of a source that is sent to a rank. No file has such a name, so a traceback cannot read it.
SENT_SUFFIX = " in a rank"


def find_function(name: str) -> Callable:
    """Return "package.module:function" of the grader's own checkout, which is not always the student's tree."""
    module, _, function = name.partition(":")
    sys.path.insert(0, ROOT)
    try:
        return getattr(importlib.import_module(module), function)
    finally:
        sys.path.remove(ROOT)


def own_path(filename: str) -> str:
    """Return the path of a file of the grader's checkout, relative to it, or of a source that was sent to the rank."""
    return filename.removeprefix(ROOT + "/").removesuffix(SENT_SUFFIX)
