"""Judges of b.3 to b.5: the gradient reducer."""
