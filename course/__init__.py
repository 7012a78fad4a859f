"""Reads course.toml, and the TODO blocks of the student version."""
