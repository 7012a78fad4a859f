"""Cached folders.

A folder gets its final name when it is complete, is checked when it is opened, and is rebuilt if it is damaged.

folder = cached(cache_dir("models") / "tiny-bert-v2", build)      # build(partial) writes the files

.cache/models/tiny-bert-v2/            the files, and complete.json: their sizes and checksums, written last
.cache/models/.tiny-bert-v2.partial/   left by an interrupted run; the next run that builds removes it
"""

import json
import os
import shutil
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from common.errors import InputError
from common.paths import locked, shown

COMPLETE = "complete.json"
PIECE = 1 << 20  # bytes

T = TypeVar("T")


def cached(folder: Path, build: Callable[[Path], None], fresh: bool = False) -> Path:
    """Return `folder` once it is complete; `build` writes its files if it is missing or damaged.

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
            reason = None if fresh or not os.path.lexists(folder) else damage(folder)
            if reason:
                print(f"{shown(folder)} is damaged ({reason}); rebuilding it", file=sys.stderr, flush=True)
            if fresh or reason or not folder.exists():
                _build(folder, build)
            return read(folder)
    except OSError as error:
        raise InputError(
            f"cannot write the cache {folder.parent} ({error.strerror or error}); "
            "free disk space, or set COS598D_CACHE to another folder"
        ) from error


def damage(folder: Path) -> str | None:
    """Return what is wrong with a cached folder, in a few words; None if it is complete."""
    try:
        files = json.loads((folder / COMPLETE).read_bytes())
        if not isinstance(files, dict) or not files:
            return f"{COMPLETE} lists no files"
    except FileNotFoundError:
        return f"{COMPLETE} is missing"
    except (OSError, ValueError) as error:
        return f"{COMPLETE} cannot be read: {error}"
    for name, expected in files.items():
        try:
            if _describe(folder / name) != expected:
                return f"{name} has changed"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    old = folder.with_name(f".{folder.name}.old")
    for left in (partial, old):  # by a run that was killed
        _remove(left)
    partial.mkdir()
    try:
        build(partial)
        for path in partial.iterdir():
            path.chmod(0o644)  # safetensors writes files that only their owner can read
        files = {path.name: _describe(path) for path in sorted(partial.iterdir())}
        (partial / COMPLETE).write_text(json.dumps(files, indent=1))
        if os.path.lexists(folder):
            os.replace(folder, old)
        os.replace(partial, folder)
    finally:
        for left in (partial, old):
            _remove(left)


def _describe(path: Path) -> list[int]:
    """Return size in bytes and CRC-32, which takes about 50 ms for a hundred megabytes; SHA-256 takes 300 ms."""
    size = checksum = 0
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            size += len(piece)
            checksum = zlib.crc32(piece, checksum)
    return [size, checksum]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
