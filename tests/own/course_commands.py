"""The commands of the course, each with a value that it must refuse."""

from typing import NamedTuple


class Command(NamedTuple):
    """How a command is started, and flags with a value that it refuses before it does anything."""

    start: tuple[str, ...]
    refused: tuple[str, ...]


def module(name: str, refused: str) -> Command:
    return Command(("-m", name), tuple(refused.split()))


def script(path: str, refused: str) -> Command:
    return Command((path,), tuple(refused.split()))


# They train nothing, so they check their flags before they load torch.
LIGHT = (
    module("cluster.launch", "--workers 0 -- cluster/hello.py"),
    module("cluster.ladder", "--workers 1"),
    module("cluster.two_workers", "--steps 0"),
    module("cluster.random_bert", "1X"),
    module("cluster.pictures", "--rate fast"),
    module("cluster.doctor", "--master_port none"),
    module("cluster.emulate", "--nodes 0 -- true"),
    script("submit.py", "report --netid ab1234"),
    script("download_glue_data.py", "--tasks nothing"),
    script("task4_traffic/counters.py", "--read no_such_file"),
    script("prepare_oscar.py", "--input README.md --output no_such_folder --size lots"),
    module("benchmark.sweep", "--workers 0"),
    module("benchmark.tables", "no_such_folder"),
    module("benchmark.predict", "--rate 1gbps"),
    module("staff.handout", "--out README.md"),
    module("staff.grade", "no_such_submission --out no_such_folder"),
    module("staff.mistakes", "--times 0"),
    module("staff.attacks", "--jobs none"),
    module("staff.both_sides", "--region 9.9"),
    module("staff.proofs.harmful_class", "--seed none --out no_such_folder"),
    module("staff.sandbox", "--no_such_wall"),
    module("staff.gradescope.build", "--out"),
)
# They import torch and transformers at the top, as a reader expects of them, and nothing that is not needed yet.
TRAINING = (
    script("task1_single/run_glue.py", "--task_name nothing"),
    script("task2a_gather_scatter/run_glue.py", "--world_size 0"),
    script("task2b_allreduce/run_glue.py", "--world_size 2 --local_rank 2"),
    script("task2b_allreduce/run_gpt2.py", "--batch_size 0"),
    script("task3_ddp/run_glue.py", "--learning_rate 0"),
    script("task3_ddp/run_gpt2.py", "--n_epochs 0"),
    script("task4_traffic/run_glue.py", "--dropout 1"),
    script("task4_traffic/expected.py", "--world_size 1"),
    script("task4_traffic/compare.py", "no_such_folder"),
    script("pipeline/run_gpt2.py", "--n_chunk 0"),
    script("cluster/hello.py", "--world_size 0"),
)


def lines(command: Command) -> list[list[str]]:
    """Its command lines that end at once: --help with exit code 0, a wrong flag and a wrong value with 2."""
    return [[*command.start, "--help"], [*command.start, "--no_such_flag"], [*command.start, *command.refused]]
