"""Judges of b.6 and b.7: ZeRO-1 and 2."""
