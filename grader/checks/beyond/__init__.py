"""Judges of the bonus lessons."""
