"""The command `python -m staff.handout`; see staff/handout/assemble.py."""

from common.errors import exit_on_input_error
from staff.handout.assemble import main

if __name__ == "__main__":
    exit_on_input_error(main)
