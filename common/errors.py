"""The one kind of error a user is meant to see: a line that helps, and exit code 2."""

import os
import re
import sys
import traceback
from collections.abc import Callable


class InputError(ValueError):
    """Something the user gave is wrong. The message says what was expected, what came and what to do next."""


def exit_on_input_error(main: Callable[..., None], *arguments: object) -> None:
    """Run `main`; an InputError, or a region that is still open, becomes one line on stderr and an exit code.

    2 for the user's input, 1 for an open region. Every other error is seen whole.
    """
    try:
        main(*arguments)
    except NotImplementedError as error:
        region = re.match(r"TODO ([0-9a-z]+\.[0-9]+): ", str(error))
        if not region:
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.relpath(frame.filename)}:{frame.lineno}"
        hint = f"`python -m pytest --hint {region[1]}` helps to begin"
        print(
            f"error: region {region[1]} is not written yet, {where}: {type(error).__name__}: {error}; {hint}",
            file=sys.stderr,
        )
        sys.exit(1)
    except InputError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
