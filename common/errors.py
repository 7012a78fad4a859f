"""The one kind of error a user is meant to see: a line that helps, and exit code 2."""

import sys
from collections.abc import Callable


class InputError(ValueError):
    """Something the user gave is wrong. The message says what was expected, what came and what to do next."""


def exit_on_input_error(main: Callable[..., None], *arguments: object) -> None:
    """Run `main`; turn an InputError into one line on stderr and exit code 2, and let every other error be seen."""
    try:
        main(*arguments)
    except InputError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
