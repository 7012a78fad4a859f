"""Unpacks a hand-in, a folder, zip or tar: plain files come out, inside one folder, within limits, or nothing at all.

What an archive says about itself (sizes, names, kinds) is written by whoever made it, so bytes are counted as they come
out. A folder that holds one archive and no code, as downloads of a learning platform do, counts as this archive.
"""

import lzma
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from common.errors import InputError

MOST_FILES = 2_000
MOST_ENTRIES = 20_000  # of a zip's directory, folders and what is left out included
LARGEST_FILE = 16 << 20  # bytes
MOST_BYTES = 64 << 20  # of all files together
LARGEST_ARCHIVE = 64 << 20  # bytes, packed
LARGEST_TAR = 1 << 30  # bytes, unpacked, what is left out included
KINDS = {b"PK": "a damaged zip", b"Rar!": "a RAR archive", b"7z\xbc\xaf": "a 7z archive", b"%PDF": "a PDF"}
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")
DEEPEST, LONGEST = 12, 200  # parts of a path, characters of it
LONGEST_PART = 255  # bytes: what a file system takes
PIECE = 1 << 16
LEFT_OUT = {"__MACOSX", "__pycache__", "venv", "node_modules", "site-packages"}  # and names that begin with a dot
ENVIRONMENT = "pyvenv.cfg"  # a file that makes its folder a Python environment, whatever it is called
ENCRYPTED = 0x1
BOUNDED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # the others are decompressed without a limit per step
BROKEN = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError,
    ValueError, OSError,
)  # fmt: skip


def unpack(path: Path, into: Path) -> list[str]:
    """Write the plain files of a folder or archive below `into`, which is made or empty. Returns what was left out.

    Links, devices, hidden files, caches and Python environments are left out, and each note says why. Nothing is
    written outside of `into`, and nothing inside it when this raises.

    Raises:
        InputError: a link, no folder and no archive, a broken or locked one, a name that leads elsewhere, too many
            files or too large ones.
    """
    path, into = Path(path), Path(into)
    into.mkdir(parents=True, exist_ok=True)
    if any(into.iterdir()):
        raise InputError(f"{into}: expected an empty folder to unpack into, got files; choose another")
    taker = _Taker(path.name, into)
    try:
        if path.is_symlink():
            raise taker.refuse("a folder or an archive", "a link, which may lead to another submission")
        if path.is_dir():
            _take_folder(path, taker)
        else:
            _take_archive(path, taker)
    except BaseException:  # Ctrl-C, too, leaves no half of a hand-in
        for entry in into.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        raise
    return taker.notes()


class _Taker:
    """Writes one file after the other and counts; refuses by InputError."""

    def __init__(self, source: str, into: Path) -> None:
        self.source, self.into = source, into
        self.files = Counter[str]()  # by folder
        self.bytes = 0
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

    def wants(self, name: str, environments: Collection[str] = ()) -> bool:
        """Return whether a file is unpacked; if it is not and a student should know, the notes say so.

        Raises:
            InputError: a name that leads out of the folder, or that no file system should have to take.
        """
        parts = _parts(name)
        if not parts or parts[0].startswith("/") or ".." in parts or "\0" in name or parts[0].endswith(":"):
            raise self.refuse("relative paths that stay inside the submission", repr(name[:LONGEST]))
        if any(part in LEFT_OUT or part.startswith(".") for part in parts):
            if not is_a_macs(name):
                self.leave_out(name, "hidden files and caches")
            return False
        if any("/".join(parts[:depth]) in environments for depth in range(1, len(parts))):
            self.leave_out(name, "a Python environment")
            return False
        if len(parts) > DEEPEST or len(name) > LONGEST:
            raise self.refuse(f"paths of at most {DEEPEST} parts and {LONGEST} characters", repr(name[:80]))
        if any(len(os.fsencode(part)) > LONGEST_PART for part in parts):
            raise self.refuse(f"names of at most {LONGEST_PART} bytes", repr(name[:80]))
        return True

    def take(self, name: str, content: IO[bytes]) -> None:
        """Copy one file, counting. An existing one is never written through: names that differ in case may be one."""
        target = self.into.joinpath(*_parts(name))
        self.files[name.rpartition("/")[0]] += 1
        if self.files.total() > MOST_FILES:
            folder, count = self.files.most_common(1)[0]
            raise self.refuse(f"at most {MOST_FILES:,} files", f"more, {count:,} of them in {folder[:80]!r}")
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
                if size > LARGEST_FILE:
                    raise self.refuse(f"files of at most {LARGEST_FILE >> 20} MiB", f"more in {name[:80]!r}")
                if self.bytes > MOST_BYTES:
                    raise self.refuse(f"at most {MOST_BYTES >> 20} MiB in all", f"more, up to {name[:80]!r}")
                file.write(piece)


def _parts(name: str) -> tuple[str, ...]:
    """Return the parts of a path; Windows' tools separate them by backslashes."""
    return PurePosixPath(name.replace("\\", "/")).parts


def _take_archive(path: Path, taker: _Taker) -> None:
    """Take the files of a zip, or of a tar with any compression that Python reads."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise taker.refuse("a folder, zip or tar", "neither")
            if status.st_nlink > 1:
                raise taker.refuse("a folder, zip or tar", "a hard link, which may lead to another submission")
            if status.st_size > LARGEST_ARCHIVE:
                size = f"{status.st_size >> 20} MiB"
                raise taker.refuse(f"an archive of at most {LARGEST_ARCHIVE >> 20} MiB", size)
            if zipfile.is_zipfile(file):
                with zipfile.ZipFile(file) as archive:
                    _take_zip(archive, taker)
                return
            file.seek(0)
            begin = file.read(8)
            file.seek(0)
            try:
                tar = tarfile.open(fileobj=file)  # noqa: SIM115 (closed below; what fails here is no tar)
            except tarfile.ReadError:
                got = next((kind for start, kind in KINDS.items() if begin.startswith(start)), "neither")
                raise taker.refuse("a folder, zip or tar", got if begin else "an empty file") from None
            with tar:
                _take_tar(tar, taker)
    except InputError:
        raise
    except BROKEN as error:
        words = error.strerror if isinstance(error, OSError) else str(error)  # an OSError's text names our own folder
        reason = " ".join(str(words).split())[:100]
        raise taker.refuse("an archive that can be read", f"{type(error).__name__}: {reason}") from None


def _take_zip(archive: zipfile.ZipFile, taker: _Taker) -> None:
    entries = archive.infolist()
    if len(entries) > MOST_ENTRIES:
        raise taker.refuse(f"at most {MOST_ENTRIES:,} entries", f"{len(entries):,}")
    names = ["/".join(_parts(entry.filename)) for entry in entries]
    environments = _environments(names)
    folders = {name.rpartition("/")[0] for name in names}
    for name, entry in zip(names, entries, strict=True):
        # Windows' tools end a folder with a backslash, others leave the end out; `./` and `/` are folders, too.
        is_folder = entry.filename.endswith(("/", "\\")) or name in ("", "/")
        kind = stat.S_IFMT(entry.external_attr >> 16)  # 0 where the zip was made on Windows
        if is_folder or kind == stat.S_IFDIR or (name in folders and not entry.file_size):
            continue  # a file that needs the folder makes it
        elif not taker.wants(name, environments):
            continue
        elif kind not in (0, stat.S_IFREG):
            taker.leave_out(name, "links and devices")
        elif entry.flag_bits & ENCRYPTED:
            raise taker.refuse("a zip without a password", "an encrypted one")
        elif entry.compress_type not in BOUNDED:
            raise taker.refuse("a zip compressed with deflate", f"method {entry.compress_type}")
        else:
            with archive.open(entry) as content:
                taker.take(name, content)


def _take_tar(tar: tarfile.TarFile, taker: _Taker) -> None:
    members = []
    for member in tar:
        members.append(member)
        if len(members) > MOST_ENTRIES:
            raise taker.refuse(f"at most {MOST_ENTRIES:,} entries", "more")
        if tar.offset > LARGEST_TAR:  # of what has been decompressed so far
            raise taker.refuse(f"at most {LARGEST_TAR >> 20} MiB in a tar", "more")
    environments = _environments([member.name for member in members])
    for member in members:
        if member.isdir() or not taker.wants(member.name, environments):
            continue
        if not member.isreg():
            taker.leave_out(member.name, "links and devices")
        elif content := tar.extractfile(member):
            taker.take(member.name, content)


def _environments(names: Iterable[str]) -> set[str]:
    """Return the folders that are Python environments."""
    return {name.rpartition("/")[0] for name in names if name.rpartition("/")[2] == ENVIRONMENT} - {""}


def is_a_macs(name: str) -> bool:
    """Return whether macOS puts this file into every zip: nothing to tell a student about."""
    parts = PurePosixPath(name).parts
    return "__MACOSX" in parts or parts[-1] == ".DS_Store"


def _take_folder(path: Path, taker: _Taker) -> None:
    files = list(_walk(path, taker))
    archives = [file for file in files if file.name.lower().endswith(ARCHIVES) and not file.is_symlink()]
    if len(archives) == 1 and not any(file.suffix in (".py", ".ipynb") for file in files):
        for file in files:
            if file not in archives:
                taker.leave_out(file.name, f"beside {archives[0].name}")
        taker.source = archives[0].name
        _take_archive(archives[0], taker)
        return
    inside = Counter(_identity(file.lstat()) for file in files)
    names = [file.relative_to(path).as_posix() for file in files]
    environments = _environments(names)
    for name, file in zip(names, files, strict=True):
        if not taker.wants(name, environments):
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
                taker.take(name, content)


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
