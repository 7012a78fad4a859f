"""The old name of `python -m benchmark.tables FOLDER --predict`: it takes the same flags and does the same."""

import sys

from benchmark.tables import main
from common.errors import exit_on_input_error

if __name__ == "__main__":
    sys.argv.insert(1, "--predict")
    exit_on_input_error(main)
