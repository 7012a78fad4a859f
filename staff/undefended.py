"""Placeholder, filled below."""


def switch_off(names: list[str]) -> None:
    """Nothing yet."""
