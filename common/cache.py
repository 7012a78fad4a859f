"""Cached folders.

A folder gets its final name when it is complete, so a run that is killed leaves no half of one. If a file is missing or
cut off all the same (a full disk, an interrupted copy), the folder is built again.

folder = cached(cache_dir("models") / "tiny-bert-v2", build)      # build(partial) writes the files

.cache/models/tiny-bert-v2/            the files, and complete.json: their sizes, written last
.cache/models/.tiny-bert-v2.partial/   left by an interrupted run; the next run that builds removes it
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from common.errors import InputError
from common.paths import locked, shown

COMPLETE = "complete.json"

T = TypeVar("T")


def cached(folder: Path, build: Callable[[Path], None], fresh: bool = False) -> Path:
    """Return `folder` once it is complete; `build` writes its files if one is missing.

    See `read_cached` for the rest.
    """
    return read_cached(folder, build, lambda whole: whole, fresh)


def read_cached(folder: Path, build: Callable[[Path], None], read: Callable[[Path], T], fresh: bool = False) -> T:
    """Return what `read` makes of the complete `folder`; no other process replaces the folder meanwhile.

    Args:
        build: writes all files into the empty folder that it gets. The first of several ranks builds, the others wait.
            So it must not depend on the rank.
        fresh: build even if the folder is complete.

    Raises InputError if the cache cannot be written.
    """
    try:
        with locked(folder):
            if fresh or not is_complete(folder):
                if os.path.lexists(folder) and not fresh:
                    print(f"{shown(folder)} is damaged; rebuilding it", file=sys.stderr, flush=True)
                _build(folder, build)
            return read(folder)
    except OSError as error:
        raise InputError(
            f"cannot write the cache {folder.parent} ({error.strerror or error}); "
            "free disk space, or set COS598D_CACHE to another folder"
        ) from error


def is_complete(folder: Path) -> bool:
    """Return whether every file of a cached folder is there, with the size that it had when it was written."""
    try:
        sizes = json.loads((folder / COMPLETE).read_bytes())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    _remove(partial)  # left by a run that was killed
    partial.mkdir()
    try:
        build(partial)
        for path in partial.iterdir():
            path.chmod(0o644)  # safetensors writes files that only their owner can read
        sizes = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
        (partial / COMPLETE).write_text(json.dumps(sizes, indent=1))
        _remove(folder)
        os.replace(partial, folder)
    finally:
        _remove(partial)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
