"""Judges of b.13: the order in which a stage works."""
