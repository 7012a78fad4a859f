"""Asks the student on the terminal."""

from common.errors import InputError


def read_line(prompt: str) -> str:
    """Return what is typed behind the prompt. Raises InputError where nobody can answer."""
    try:
        return input(prompt)
    except EOFError:
        print()
        raise InputError("this command asks questions, and its input has ended; run it in a terminal") from None
