"""The command `python -m staff.grade`; see staff/grade/whole_class.py."""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

from common.errors import exit_on_input_error
from staff.grade.whole_class import main

if __name__ == "__main__":
    exit_on_input_error(main)
