"""From solved regions to a hand-in: carry your lines into later scripts, build the report, pack the archive.

    python submit.py carry                                          # after each task
    python submit.py predict 2b                                     # before the first long run of a task
    python submit.py report --netid ab1234 --name "First Last"    # as often as you like: your own words are kept
    python submit.py questions                                      # once, if your course asks for it
    python submit.py pack --netid ab1234 --name "First Last"      # once, at the end
    python submit.py update new-handout.zip                         # when there is a corrected handout

handin/README.md explains these commands and their messages.
"""

import argparse
import importlib.util
from pathlib import Path

if importlib.util.find_spec("tomllib") is None:  # a Python of the system that is older than the course's
    import common.workers.environment  # noqa: F401 (stops with a message)

from common.errors import InputError, exit_on_input_error
from common.paths import ROOT
from course.next_step import next_step
from course.table import load_course


def carry(arguments: argparse.Namespace) -> None:
    from handin.carry import carry, summary

    course = load_course()
    print("\n".join(summary(carry(ROOT, course, arguments.into, arguments.force))))
    if step := next_step(course, ROOT):
        print(step)


def update(arguments: argparse.Namespace) -> None:
    from handin.update import update

    print("\n".join(update(ROOT, arguments.handout)))


def need_the_environment() -> None:
    """Stop with a message if torch is missing. Only `carry` and --help do without: they need the standard library."""
    import common.workers.environment  # noqa: F401


def check_runs(folder: Path | None) -> None:
    if folder and not folder.is_dir():
        raise InputError(f"--runs: there is no folder {folder}; name the folder that holds the records of your runs")


def report(arguments: argparse.Namespace) -> None:
    if (arguments.netid is None) != (arguments.name is None):
        raise InputError('give both --netid and --name "First Last", or neither')
    need_the_environment()
    from handin.report import build_report, summary
    from handin.student import make_student

    student = make_student(arguments.netid, arguments.name) if arguments.netid else None
    check_runs(arguments.runs)
    print("\n".join(summary(build_report(ROOT, load_course(), student, arguments.runs), ROOT)))


def predict(arguments: argparse.Namespace) -> None:
    need_the_environment()
    from handin.predictions import predict

    print("\n".join(predict(ROOT, load_course(), arguments.task)))


def questions(arguments: argparse.Namespace) -> None:
    need_the_environment()
    from handin.quiz import ask

    print("\n".join(ask(ROOT, load_course())))


def pack(arguments: argparse.Namespace) -> None:
    need_the_environment()
    from handin.pack import pack
    from handin.report import build_report
    from handin.student import make_student

    course, student = load_course(), make_student(arguments.netid, arguments.name)
    check_runs(arguments.runs)
    archive = (arguments.out or ROOT / "dist" / f"{student.stem}.zip").absolute()
    if not arguments.no_grading:
        print("running the graders once; this takes a few minutes at most", flush=True)
    lines = pack(
        ROOT,
        course,
        student,
        build=lambda: build_report(ROOT, course, student, arguments.runs),
        archive=archive,
        grade=not arguments.no_grading,
    )
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(title="commands", required=True)

    command = commands.add_parser("carry", help="copy your lines of a region into the later scripts that contain it")
    command.add_argument(
        "--into", nargs="+", default=[], metavar="TASK", help="copy only into these tasks, such as task2a"
    )
    command.add_argument("--force", action="store_true", help="replace the lines there (a copy of the file is kept)")
    command.set_defaults(run=carry)

    command = commands.add_parser("predict", help="write down what you expect, before the first long run of a task")
    command.add_argument("task", help="such as 2b")
    command.set_defaults(run=predict)

    command = commands.add_parser("report", help="build report/report.md and its PDF from the records of your runs")
    command.add_argument("--netid", help="your NetID; with --name, it forms the name of the PDF and is remembered")
    command.add_argument("--name", help='your name, such as "First Last"')
    command.add_argument("--runs", type=Path, help="folder with the records (default: runs)")
    command.set_defaults(run=report)

    command = commands.add_parser("questions", help="answer questions on your own runs, once, if your course asks them")
    command.set_defaults(run=questions)

    command = commands.add_parser("pack", help="run the graders, show the points, write the archive to hand in")
    command.add_argument("--netid", required=True)
    command.add_argument("--name", required=True, help='your name, such as "First Last"')
    command.add_argument("--runs", type=Path, help="folder with the records (default: runs)")
    command.add_argument("--out", type=Path, help="the archive (default: dist/NETID_First_Last.zip); never replaced")
    command.add_argument("--no-grading", action="store_true", help="do not run the graders")
    command.set_defaults(run=pack)

    command = commands.add_parser("update", help="move your work into a corrected handout; what you had is kept")
    command.add_argument("handout", type=Path, help="the zip of the new handout")
    command.set_defaults(run=update)

    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    exit_on_input_error(main)
