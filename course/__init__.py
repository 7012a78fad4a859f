"""Reads course.toml, and the TODO blocks of the handout."""
