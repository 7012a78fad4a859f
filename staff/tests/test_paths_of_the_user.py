"""Whatever is wrong with a path on the command line, a command ends with one line that names it."""

import importlib
import os
import shlex
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from cluster.launch import free_port
from common.errors import exit_on_input_error
from common.paths import ROOT

pytestmark = pytest.mark.medium


def missing(path: Path) -> None:
    """Nothing is there."""


def folder(path: Path) -> None:
    path.mkdir()


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def below_a_file(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_text("a file where a folder should be")


def file(path: Path) -> None:
    path.write_bytes(b"\xff\xfe no text at all \x00")


NOT_A_FILE = [missing, folder, link_to_itself, below_a_file]
NOT_A_FOLDER = [missing, file, link_to_itself, below_a_file]
NOT_TO_BE_MADE = [file, link_to_itself, below_a_file]

# module, its command line with PATH where the user's path is, what can be wrong with it
COMMANDS = [
    ("prepare_oscar", "--tokenizer tiny --output OUT --input PATH", [*NOT_A_FILE, file]),
    ("prepare_oscar", "--tokenizer tiny --input README.md --output PATH", [file, below_a_file]),
    ("prepare_oscar", "--input README.md --output OUT --tokenizer PATH", [*NOT_A_FOLDER, folder]),
    ("task4_traffic.counters", "--interface lo --read PATH", [*NOT_A_FILE, file]),
    ("task4_traffic.counters", "--interface lo --seconds 0.1 --output PATH", [folder, link_to_itself, below_a_file]),
    ("task4_traffic.compare", "PATH", [*NOT_A_FOLDER, folder]),
    ("benchmark.tables", "PATH", [*NOT_A_FOLDER, folder]),
    ("benchmark.run", "--strategy zero2 --output_dir OUT --deepspeed_config PATH", [*NOT_A_FILE, file]),
    ("benchmark.run", "--output_dir OUT --model PATH", [*NOT_A_FOLDER, folder]),
    ("benchmark.run", "--model t5-tiny --output_dir OUT --data_dir PATH", [*NOT_A_FOLDER, folder]),
    ("benchmark.run", "--output_dir PATH", NOT_TO_BE_MADE),
    ("benchmark.sweep", "--output_dir PATH", NOT_TO_BE_MADE),
    ("submit", "report --runs PATH", NOT_A_FOLDER),
    ("submit", "pack --netid ab1234 --name 'First Last' --no-grading --runs PATH", NOT_A_FOLDER),
    ("submit", "pack --netid ab1234 --name 'First Last' --no-grading --out PATH", [folder, file, link_to_itself]),
    ("task2b_allreduce.run_gpt2", "--output_dir PATH", NOT_TO_BE_MADE),
    ("staff.handout.assemble", "--out PATH", NOT_TO_BE_MADE),
    ("staff.grade.whole_class", "PATH --out OUT", [missing, link_to_itself, below_a_file]),
    ("staff.grade.whole_class", "docs --out PATH", NOT_TO_BE_MADE),
    ("staff.gradescope.build", "--out PATH", [folder]),
    ("download_glue_data", "--data_dir PATH --mirror http://127.0.0.1:9", NOT_TO_BE_MADE),
]
for script in ("task1_single.run_glue", "task3_ddp.run_gpt2"):  # the others have the same flags
    COMMANDS += [
        (script, "--output_dir OUT --model_name_or_path tiny --data_dir PATH", [*NOT_A_FOLDER, folder]),
        (script, "--output_dir OUT --model_name_or_path PATH", [*NOT_A_FOLDER, folder]),
        (script, "--output_dir OUT --tokenizer_name PATH", [*NOT_A_FOLDER, folder]),
        (script, "--output_dir PATH", NOT_TO_BE_MADE),
    ]
CASES = [
    pytest.param(module, words, wrong, id=f"{module} {words} {wrong.__name__}")
    for module, words, all_wrong in COMMANDS
    for wrong in all_wrong
]


@pytest.fixture
def one_line(tmp_path, monkeypatch, capfd):
    """Run a module's main() with a path that is wrong; what it printed as its error."""

    def run(module: str, words: str, path: Path) -> str:
        flags = [{"PATH": str(path), "OUT": str(tmp_path / "out")}.get(word, word) for word in shlex.split(words)]
        # This process may have a GPU, which the test hides too late; and another test may use the usual port.
        place = ["--no_cuda", "--master_port", str(free_port())] if "run_" in module else []
        monkeypatch.setattr(sys, "argv", [module, *flags, *place])
        monkeypatch.chdir(ROOT)
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            exit_on_input_error(importlib.import_module(module).main)
        output = capfd.readouterr().err
        assert ended.value.code == 2, output
        assert "Traceback" not in output
        (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
        return line

    with mock.patch.dict(os.environ):  # a script that joins chooses its interface there
        yield run
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("module, words, wrong", CASES)
def test_a_wrong_path_is_one_line_that_names_it(one_line, tmp_path, module, words, wrong):
    if module == "benchmark.run":
        pytest.importorskip("tensorboard", reason="needs the benchmark's packages: python install.py benchmark")
    path = tmp_path / "here" / "wrong"
    path.parent.mkdir()
    wrong(path)

    assert str(path.parent) in one_line(module, words, path)
