"""Stops a script that was started without the environment, with one line in place of a traceback.

A temporary folder with a long path gives way to /tmp.

The scripts import this before torch: that alone does the work. Written for old Pythons too, since those are what a
system has.
"""

import importlib.util
import os
import sys
import tempfile

if importlib.util.find_spec("torch") is None:
    print(
        "error: expected a Python with torch, got " + sys.executable + "; run `source .venv/bin/activate` first "
        "(`make setup` creates .venv)",
        file=sys.stderr,
    )
    sys.exit(2)

if len(tempfile.gettempdir()) > 60:
    # multiprocessing and torch make sockets in this folder, and a socket's address has at most 104 characters on macOS.
    os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"
