"""Lets a worker join the others, and makes sure that no worker waits forever."""
