"""Judges of b.14: ranks on a grid."""
