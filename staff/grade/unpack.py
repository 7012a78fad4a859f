"""Takes a hand-in, a folder or a zip, apart: plain files come out, inside one folder, within limits, or nothing at all.

What a zip says about itself (sizes, names, kinds) is written by whoever made it, so bytes are counted as they come out.
"""

import os
import shutil
import stat
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from common.errors import InputError

MOST_FILES = 2_000
MOST_ENTRIES = 20_000  # of a zip's directory, folders and what is left out included
LARGEST_FILE = 16 << 20  # bytes
MOST_BYTES = 64 << 20  # of all files together
LARGEST_ZIP = 64 << 20  # bytes, packed
DEEPEST, LONGEST = 12, 200  # parts of a path, characters of it
LONGEST_PART = 255  # bytes: what a file system takes
PIECE = 1 << 16
LEFT_OUT = {"__MACOSX", "__pycache__", "venv", "node_modules"}  # and every name that begins with a dot
ENCRYPTED = 0x1
BOUNDED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # the others are decompressed without a limit per step
BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OSError)


def unpack(path: Path, into: Path) -> list[str]:
    """Write the plain files of a folder or zip below `into`, which is made or empty. Returns what was left out and why.

    Links, devices, hidden files and caches are left out. Nothing is written outside of `into`, and nothing inside it
    when this raises.

    Raises:
        InputError: no folder and no zip, a broken or locked zip, a name that leads elsewhere, too many files or too
            large ones.
    """
    path, into = Path(path), Path(into)
    into.mkdir(parents=True, exist_ok=True)
    if any(into.iterdir()):
        raise InputError(f"{into}: expected an empty folder to unpack into, got files; choose another")
    taker = _Taker(path.name, into)
    try:
        if path.is_dir() and not path.is_symlink():
            _take_folder(path, taker)
        else:
            _take_zip(path, taker)
    except BaseException:
        for entry in into.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        raise
    return taker.notes()


class _Taker:
    """Writes one file after the other and counts; refuses by InputError."""

    def __init__(self, source: str, into: Path) -> None:
        self.source, self.into = source, into
        self.files = self.bytes = 0
        self.left_out: dict[str, list[str]] = {}

    def refuse(self, expected: str, got: str) -> InputError:
        return InputError(f"{self.source}: expected {expected}, got {got}; pack the course's folders only")

    def leave_out(self, name: str, reason: str) -> None:
        self.left_out.setdefault(reason, []).append(name)

    def notes(self) -> list[str]:
        return [
            f"{len(names)} file{'s' if len(names) > 1 else ''} ignored ({reason}): "
            + ", ".join(names[:3])
            + (", ..." if len(names) > 3 else "")
            for reason, names in self.left_out.items()
        ]

    def place(self, name: str) -> Path | None:
        """Where a file of this name goes, None for what is not wanted.

        Raises:
            InputError: a name that leads out of the folder, or that no file system should have to take.
        """
        parts = PurePosixPath(name.replace("\\", "/")).parts
        if not parts or parts[0] == "/" or ".." in parts or "\0" in name or parts[0].endswith(":"):
            raise self.refuse("relative paths that stay inside the submission", repr(name[:LONGEST]))
        if any(part in LEFT_OUT or part.startswith(".") for part in parts):
            return None
        if len(parts) > DEEPEST or len(name) > LONGEST:
            raise self.refuse(f"paths of at most {DEEPEST} parts and {LONGEST} characters", repr(name[:80]))
        if any(len(os.fsencode(part)) > LONGEST_PART for part in parts):
            raise self.refuse(f"names of at most {LONGEST_PART} bytes", repr(name[:80]))
        return self.into.joinpath(*parts)

    def take(self, target: Path, content: IO[bytes]) -> None:
        """Copy one file, counting. An existing one is never written through: names that differ in case may be one."""
        self.files += 1
        if self.files > MOST_FILES:
            raise self.refuse(f"at most {MOST_FILES:,} files", "more")
        size = 0
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            file = open(target, "xb")  # noqa: SIM115 (closed below; FileExistsError is to be caught here alone)
        except (FileExistsError, NotADirectoryError):
            raise self.refuse("every file once", f"{target.name[:80]!r} twice") from None
        with file:
            while piece := content.read(PIECE):
                size += len(piece)
                self.bytes += len(piece)
                if size > LARGEST_FILE or self.bytes > MOST_BYTES:
                    limits = f"files of at most {LARGEST_FILE >> 20} MiB, {MOST_BYTES >> 20} MiB in all"
                    raise self.refuse(limits, "more")
                file.write(piece)


def _take_zip(path: Path, taker: _Taker) -> None:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise taker.refuse("a folder or a zip", "neither")
        if path.stat().st_size > LARGEST_ZIP:
            raise taker.refuse(f"a zip of at most {LARGEST_ZIP >> 20} MiB", f"{path.stat().st_size >> 20} MiB")
        if not zipfile.is_zipfile(path):
            raise taker.refuse("a folder or a zip", "neither")
        with zipfile.ZipFile(path) as archive:
            if len(archive.infolist()) > MOST_ENTRIES:
                raise taker.refuse(f"at most {MOST_ENTRIES:,} entries", f"{len(archive.infolist()):,}")
            for entry in archive.infolist():
                _take_entry(archive, entry, taker)
    except InputError:
        raise
    except BROKEN as error:
        words = error.strerror if isinstance(error, OSError) else str(error)  # an OSError's text names our own folder
        raise taker.refuse("a zip that can be read", f"{type(error).__name__}: {str(words)[:100]}") from None


def _take_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, taker: _Taker) -> None:
    target = taker.place(entry.filename)
    kind = stat.S_IFMT(entry.external_attr >> 16)  # 0 where the zip was made on Windows
    if entry.is_dir():
        return
    if target is None:
        if not is_a_macs(entry.filename):
            taker.leave_out(entry.filename, "hidden files and caches")
    elif kind not in (0, stat.S_IFREG):
        taker.leave_out(entry.filename, "links and devices")
    elif entry.flag_bits & ENCRYPTED:
        raise taker.refuse("a zip without a password", "an encrypted one")
    elif entry.compress_type not in BOUNDED:
        raise taker.refuse("a zip compressed with deflate", f"method {entry.compress_type}")
    else:
        with archive.open(entry) as content:
            taker.take(target, content)


def is_a_macs(name: str) -> bool:
    """What macOS puts into every zip: nothing to tell a student about."""
    parts = PurePosixPath(name).parts
    return "__MACOSX" in parts or parts[-1] == ".DS_Store"


def _take_folder(path: Path, taker: _Taker) -> None:
    files = list(_walk(path, taker))
    inside = Counter(_identity(file.lstat()) for file in files)
    for file in files:
        name = file.relative_to(path).as_posix()
        target = taker.place(name)
        if target is None:
            taker.leave_out(name, "hidden files and caches")
            continue
        try:  # O_NOFOLLOW and the look at what was opened: the kind may change between two looks at the name
            descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            taker.leave_out(name, "links and devices")
            continue
        with os.fdopen(descriptor, "rb") as content:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                taker.leave_out(name, "links and devices")
            elif status.st_nlink > inside[_identity(status)]:  # it may be another student's file
                taker.leave_out(name, "hard links to files outside of the submission; copy it with cp -r first")
            else:
                taker.take(target, content)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _walk(path: Path, taker: _Taker) -> Iterator[Path]:
    """Every file below a folder that is not hidden; no link is followed."""
    count = 0
    for where, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT and not name.startswith("."))
        linked = [name for name in folders if Path(where, name).is_symlink()]
        for name in [*linked, *sorted(names)]:
            count += 1
            if count > MOST_ENTRIES:
                raise taker.refuse(f"at most {MOST_ENTRIES:,} entries", "more")
            yield Path(where, name)
