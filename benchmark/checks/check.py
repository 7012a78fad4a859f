"""What the checks share: flags, a table for each part, the figures as the last line, the exit code.

A part is a function of the flags that returns rows: figures by name, and "holds", whether they are within their bounds.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping

from benchmark.measure.machine import environment, machine_line
from benchmark.measure.output import Json, text_table
from benchmark.names import command_parser, names_of
from common.flags import Parser

Row = Json
Part = Callable[[argparse.Namespace], list[Row]]


class SkippedError(Exception):
    """Why a part cannot run here."""


def rows_table(rows: list[Row]) -> str:
    """Return the figures as text; a row that does not hold is marked."""
    heads = [name for name in rows[0] if name != "holds"]
    marks = ["" if row.get("holds", True) else "<-- outside" for row in rows]
    return text_table([[*heads, ""], *([*map(row.get, heads), mark] for row, mark in zip(rows, marks, strict=True))])


def check_parser(command: str, about: str | None) -> Parser:
    """Return the parser of a check, which is a module of benchmark/; it adds flags of its own."""
    parser = command_parser(command, about)
    parser.add_argument("--quick", action="store_true", help="smallest sizes, takes seconds; times are not judged")
    return parser


def run_parts(parser: Parser, parts: Mapping[str, Part], **quick: object) -> None:
    """Run the parts that --only names; exits with 0 only if all of their rows hold. quick: flags that --quick sets."""
    parser.add_argument("--only", "--parts", default="all", help=f"of {', '.join(parts)} (all)")
    arguments = parser.parse_args()
    if arguments.quick:
        vars(arguments).update(quick)
    begin, results = environment(), {}
    for name in names_of("--only", arguments.only, parts):
        try:
            results[name] = parts[name](arguments)
        except SkippedError as reason:
            results[name] = [{"skipped": str(reason)}]
        print(f"\n{name}\n{rows_table(results[name])}", flush=True)
    holds = all(row.get("holds", True) for rows in results.values() for row in rows)
    print(f"\n{machine_line(begin)}; all bounds hold: {holds}")
    print(json.dumps({"holds": holds, **results, "environment": begin}))
    sys.exit(not holds)
