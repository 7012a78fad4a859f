"""The command `python -m staff.grade`; see staff/grade/whole_class.py."""

from common.errors import exit_on_input_error
from staff.grade.whole_class import main

if __name__ == "__main__":
    exit_on_input_error(main)
