"""Judges: they compare what a run came to with what is right. No rank ever imports one."""
