"""Paths of the repository and the cache, and writing a file so that no other process sees an incomplete one."""

import contextlib
import fcntl
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import IO

ROOT = Path(__file__).resolve().parents[1]


def cache_dir(name: str) -> Path:
    """Return a folder for files that can be rebuilt: .cache/NAME in the repository, or $COS598D_CACHE/NAME.

    If neither can be written (a read-only checkout), return a folder of this user in the temporary folder.
    """
    wanted = Path(os.environ.get("COS598D_CACHE") or ROOT / ".cache") / name
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        if os.access(wanted, os.W_OK):
            return wanted
    except OSError:
        pass  # a read-only checkout: the folder below serves as well
    fallback = Path(tempfile.gettempdir()) / f"cos598d-cache-{os.getuid()}" / name
    fallback.mkdir(parents=True, exist_ok=True, mode=0o700)
    return fallback


def shown(path: Path) -> Path:
    """The path as messages show it: relative to the repository, if it is inside."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


@contextlib.contextmanager
def atomic_write(path: str | Path, mode: str = "w") -> Iterator[IO]:
    """Open a temporary file next to `path`. On success, rename it to `path`; on an error, remove it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    encoding = None if "b" in mode else "utf-8"
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, mode, encoding=encoding) as file:
            yield file
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    except BaseException:  # Ctrl-C, too, leaves no half-written file
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Hold a lock next to `path`: one of several ranks builds the cached files; the others wait and then read them.

    The kernel frees the lock when its holder dies, so a killed run never blocks the next one.
    """
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def import_file(path: Path, name: str) -> ModuleType:
    """Import the file `path` as the module `name`."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
