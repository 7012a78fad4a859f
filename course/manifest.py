"""Reads the handout's manifest, which lists all files that were given out and the digest of each."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from common.errors import InputError


@cache
def read_manifest(tree: Path) -> dict[str, Any]:
    """Return a handout's manifest: "files" is file -> digest, "code" the same for the code alone of Python files that
    students may change. It is empty in the source that handouts are built from.

    Raises InputError if the manifest is damaged.
    """
    path = tree / ".handout.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        return {**manifest, **{digests: dict(manifest[digests]) for digests in ("files", "code")}}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: is damaged ({type(error).__name__}: {error}); copy it from the handout") from None
