"""Judges of training loops."""
