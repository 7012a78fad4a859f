"""What a command that trains nothing imports before it answers --help, a wrong flag or a wrong value: never torch.

Nothing is timed here. Which modules are loaded by then is the same on every machine.
"""

import json
import subprocess
import sys

from common.paths import ROOT

# How a command is started -> flags with a value that it refuses before it does anything.
COMMANDS = {
    "-m cluster.launch": "--workers 0 -- cluster/hello.py",
    "-m cluster.demo.ladder": "--workers 1",
    "-m cluster.demo.two_workers": "--steps 0",
    "-m cluster.demo.random_bert": "1X",
    "-m cluster.demo.pictures": "--rate fast",
    "-m cluster.doctor": "--master_port none",
    "-m cluster.emulate": "--nodes 0 -- true",
    "submit.py": "report --netid ab1234",
    "download_glue_data.py": "--tasks nothing",
    "task4_traffic/counters.py": "--read no_such_file",
    "prepare_oscar.py": "--input README.md --output no_such_folder --size lots",
    "-m benchmark.sweep": "--workers 0",
    "-m benchmark.tables": "no_such_folder",
    "-m benchmark.predict": "--rate 1gbps",
    "-m staff.handout": "--out README.md",
    "-m staff.grade": "no_such_submission --out no_such_folder",
    "-m staff.mistakes": "--times 0",
    "-m staff.attacks": "--jobs none",
    "-m staff.sandbox": "--no_such_wall",
    "-m staff.gradescope.build": "--out",
}
RUN = """
import json, runpy, sys
seen = {}
for line in json.loads(sys.argv[1]):
    sys.argv, code = line.removeprefix("-m ").split(), None
    try:
        if line.startswith("-m "):
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    seen[line] = [code, "torch" in sys.modules]
print(json.dumps(seen))
"""


def test_a_command_that_trains_nothing_answers_without_torch():
    expected = {}
    for command, wrong in COMMANDS.items():
        expected |= {f"{command} --help": [0, False], f"{command} --no_such_flag": [2, False]}
        expected[f"{command} {wrong}"] = [2, False]

    words = [sys.executable, "-c", RUN, json.dumps([*expected])]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected
