"""What a student reads after a frequent mistake: lines of output, and the line that first names the cause.

    python -m staff.proofs.feedback_lines [--width 100]

Each mistake is put into a copy of the solved tree, and its region is graded as a student does it. The cause counts as
named where a line holds words that the bank pins for the tests that must fail. Long lines are wrapped, as a
terminal of this width would. The last line of stdout is one JSON object; exit code 0 if each cause is in the first
three lines below the command.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

from common.errors import InputError, exit_on_input_error
from common.paths import ROOT
from staff.proofs.bank import Entry, apply, copy_tree, load_bank

LIMIT = 3
# (bank, entry, region): what submissions to courses of this kind have most often.
FREQUENT = (
    ("task1", "from_pretrained without the config: the head has the model's own number of labels", "1.1"),
    ("task1", "backward without parentheses: no gradient is ever computed", "1.2"),
    ("task1", "zeroes the gradients right after backward", "1.2"),
    ("task1", "optimizer.step without parentheses: no parameter ever moves", "1.3"),
    ("task1", "evaluates once, after the last epoch", "1.4"),
    ("task2a", "no set_epoch: every epoch has the order of the first", "2a.2"),
    ("task2a", "no sampler: every worker trains on the same examples", "2a.2"),
    ("task2a", "a gather list on every rank", "2a.3"),
    ("task2a", "one tensor, listed world_size times: every slot holds the last arrival", "2a.3"),
    ("task2a", "scatters into a new tensor and never writes param.grad", "2a.3"),
    ("task2b_glue", "never divides: the sum instead of the mean", "2b.1"),
    ("task2b_glue", "waits for the last handle only", "2b.1"),
    ("task2b_glue", "averages the weights instead of the gradients", "2b.1"),
    ("data_partition", "no shuffle: contiguous blocks of the data as it lies", "2b.3"),
    ("data_partition", "ignores the rank: all workers train on partition 0", "2b.5"),
    ("data_partition", "every worker takes the total batch size", "2b.5"),
    ("task3", "wraps anew in every epoch", "3.1"),
    ("task4", "elements for bytes", "4.1"),
    ("pipeline_schedule", "one clock cycle too few", "p.2"),
    ("pipeline_pipe", "chunk instead of split: split_size read as a number of micro-batches", "p.3"),
)


def seen_by_a_student(entry: Entry, region: str) -> list[str]:
    """Grade a region of a tree with this mistake; return the lines of the terminal."""
    with tempfile.TemporaryDirectory(prefix="cos598d-feedback-") as folder:
        copy_tree(Path(folder))
        apply(entry, Path(folder))
        command = [sys.executable, "-m", "pytest", "--region", region, f"--tree={folder}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines()


def line_of_the_cause(lines: list[str], words: list[str], width: int) -> int:
    """Return the number of the first line on the screen that holds one of the words; 0 if none does."""
    number = 0
    for line in lines:
        if any(word.lower() in line.lower() for word in words):
            at = min(line.lower().find(word.lower()) for word in words if word.lower() in line.lower())
            return number + 1 + at // width
        number += max(1, math.ceil(len(line) / width))
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=100, help="columns of the terminal (%(default)s)")
    parser.add_argument("--show", action="store_true", help="print the output itself, too")
    arguments = parser.parse_args()
    if arguments.width < 20:
        raise InputError(f"--width: expected at least 20 columns, got {arguments.width}")
    bank = {(entry.bank, entry.name): entry for entry in load_bank()}
    rows = []
    for file, name, region in FREQUENT:
        if (entry := bank.get((file, name))) is None:
            raise InputError(f"{file}.toml: there is no {name!r}; fix FREQUENT")
        lines = seen_by_a_student(entry, region)
        words = [word for test in entry.fails.values() for word in test]
        height = sum(max(1, math.ceil(len(line) / arguments.width)) for line in lines)
        cause = line_of_the_cause(lines, words, arguments.width)
        rows.append((height, cause))
        print(f"{height:4} lines, cause in line {cause or '-'}: {region} {name}", flush=True)
        if arguments.show:
            print("\n".join(f"    {line}" for line in lines), flush=True)
    late = sum(not 0 < cause <= LIMIT for _, cause in rows)
    print(json.dumps({"mistakes": len(rows), "lines": sum(height for height, _ in rows) / len(rows), "late": late}))
    sys.exit(1 if late else 0)


if __name__ == "__main__":
    exit_on_input_error(main)
