"""Stops a script that was started without the environment, with one line in place of a traceback.

The scripts import this before torch: that alone does the work. Written for old Pythons too, since those are what a
system has.
"""

import importlib.util
import sys

if importlib.util.find_spec("torch") is None:
    print(
        "error: expected a Python with torch, got " + sys.executable + "; run `source .venv/bin/activate` first "
        "(`make setup` creates .venv)",
        file=sys.stderr,
    )
    sys.exit(2)
