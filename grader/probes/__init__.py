"""Probes: what runs in a rank around a student's code. They hold no expected value."""
