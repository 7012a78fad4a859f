"""Judges of the pipeline part."""
