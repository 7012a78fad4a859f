"""Importing this module checks where a script runs; scripts import it before torch. There is nothing to call.

- Without torch, the script exits with one line that says how to activate the environment, in place of a traceback.
- A temporary folder with a long path is replaced by /tmp.

The module also runs on the old Python of a system, which is what starts a script without the environment.
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
    try:
        os.rmdir(tempfile.mkdtemp(dir="/tmp"))
        os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"
    except OSError:
        pass  # a graded script may write in its own folder only
