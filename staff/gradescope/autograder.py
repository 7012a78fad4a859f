"""Classroom 50's entry: runs in a student's checkout, grades it with what lies beside this file, writes ./result.json.

Unpack dist/autograder.zip into CLASSROOM/autograders/ASSIGNMENT/ of the configuration repository. The exit code is 0
if grading completed, whatever the score.
"""

import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    subprocess.run(["bash", HERE / "setup.sh"], check=True)  # quick where the container has what the graders need
    python = (HERE / ".python").read_text().strip()
    subprocess.run([python, "-m", "staff.gradescope.classroom50", Path.cwd()], cwd=HERE, check=True)


if __name__ == "__main__":
    main()
