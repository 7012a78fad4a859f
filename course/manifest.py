"""Reads the handout's manifest: the digest of every file that was given out, and that of its code alone."""

import json
import tokenize
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from io import StringIO
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
        return parse_manifest(path.read_text(encoding="utf-8"), path)
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); copy it from the handout") from None


def parse_manifest(text: str, path: Path) -> dict[str, Any]:
    """Return a manifest from its text. Raises InputError if it is damaged."""
    try:
        manifest = json.loads(text)
        return {**manifest, **{digests: dict(manifest[digests]) for digests in ("files", "code")}}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: is damaged ({type(error).__name__}: {error}); copy it from the handout") from None


def code_digest(content: bytes) -> str:
    """Return a digest of a Python file without its comments, empty lines and kind of line end. It is the same in every
    version of Python, as ast.dump is not. Of what is no Python, it is a digest of the bytes."""
    try:
        lines = StringIO(content.decode("utf-8-sig"), newline=None).read().split("\n")
        for token in tokenize.generate_tokens(StringIO("\n".join(lines)).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = lines[row - 1][:column]
    except (SyntaxError, ValueError, tokenize.TokenError):
        return sha256(content).hexdigest()
    return sha256("\n".join(line.rstrip() for line in lines if line.strip()).encode()).hexdigest()


def version_of(code: Mapping[str, str]) -> str:
    """Return the version of a handout: a short digest of the code in the files that students may change."""
    return sha256(json.dumps(sorted(code.items())).encode()).hexdigest()[:8]
