"""Judges of b.11 and b.12: tensor parallelism."""
