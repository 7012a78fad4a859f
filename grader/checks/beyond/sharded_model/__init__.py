"""Judges of b.8 to b.10: ZeRO-3, and the memory of ranks."""
