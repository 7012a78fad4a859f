"""The command `python -m staff.sandbox`; see staff/sandbox/graded_run.py."""

from common.errors import exit_on_input_error
from staff.sandbox.graded_run import main

if __name__ == "__main__":
    exit_on_input_error(main)
