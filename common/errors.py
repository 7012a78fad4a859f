"""The errors that are meant for the user: one helpful line and exit code 2."""

import contextlib
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator

STOPPED_BY_ANOTHER = 3  # exit code of a worker that ends because of another one, or because nobody continues


class InputError(ValueError):
    """The user's input is wrong. The message says what was expected, what we got and what to do next."""

    exit_code = 2


class OtherRankError(InputError):
    """This worker cannot join because of another one, which says why: the launcher looks for the cause there."""

    exit_code = STOPPED_BY_ANOTHER


@contextlib.contextmanager
def reading(path: str | os.PathLike[str], advice: str = "check the path") -> Iterator[None]:
    """Turn an OSError inside the block into an InputError: what is wrong with `path`, and what to do."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; {advice}") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); {advice}") from error


def exit_on_input_error(main: Callable[..., None], *arguments: object) -> None:
    """Run `main`; a mistake in the user's input, or an unsolved region, becomes one line on stderr and an exit code.

    The code is 2 for the user's input (an InputError, or an OSError on a path of the command line), 3 if another worker
    is the reason, and 1 for an unsolved region. Every other error is shown with its traceback.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that this terminal cannot show is no reason to end
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        main(*arguments)
    except NotImplementedError as error:
        region = re.match(r"TODO ([0-9a-z]+\.[0-9]+): ", str(error))
        if not region:
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.relpath(frame.filename)}:{frame.lineno}"
        hint = f"run `python -m pytest --hint {region[1]}` for a hint"
        print(
            f"error: region {region[1]} is not written yet, {where}: {type(error).__name__}: {error}; {hint}",
            file=sys.stderr,
        )
        sys.exit(1)
    except InputError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        named = [path for path in (error.filename2, error.filename) if _is_on_command_line(path)]
        if not named:
            raise
        print(f"error: {named[0]}: {error.strerror}; check the path on the command line", file=sys.stderr)
        sys.exit(2)


def _is_on_command_line(path: object) -> bool:
    """Return whether the command line names this path, a folder above it, or something inside it."""
    if not isinstance(path, (str, os.PathLike)):
        return False
    words = [word.partition("=")[2] if word.startswith("-") else word for word in sys.argv[1:]]
    wanted = os.path.abspath(path) + os.sep
    named = [os.path.abspath(word) + os.sep for word in words if word]
    return any(wanted.startswith(one) or one.startswith(wanted) for one in named)
