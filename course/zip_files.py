"""Writes zip files that depend on their contents alone: the same files give the same bytes, whoever packs them."""

import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path

from common.paths import atomic_write

TIME = (2020, 1, 1, 0, 0, 0)  # of every file; a zip cannot say "none"


def write_zip(files: Mapping[str, bytes], path: Path, folder: str = "") -> None:
    """Write `files` (name -> content) in their order, below `folder` if one is named; nobody ever sees half of it.

    What begins with #! can be run once it is unpacked.
    """
    with atomic_write(path, "wb") as file, zipfile.ZipFile(file, "w") as opened:
        for name, content in files.items():
            info = zipfile.ZipInfo(f"{folder}/{name}" if folder else name, TIME)
            info.create_system = 3  # Unix, on every machine: the modes below are Unix modes
            info.external_attr = (stat.S_IFREG | mode_of(content)) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            opened.writestr(info, content)


def mode_of(content: bytes) -> int:
    """The mode of a file with this content."""
    return 0o755 if content.startswith(b"#!") else 0o644
