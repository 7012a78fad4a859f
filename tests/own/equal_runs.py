"""Trains the same model with every sync of the assignment, on 1, 2, 3 and 4 workers, and keeps what came out.

    python -m tests.own.equal_runs FOLDER SIZE...

For each case and number of workers: the gradients right after the first sync, and the parameters after five plain SGD
steps, as FOLDER/{case}_{sync}_{world_size}_{rank}.pt; "1" is the plain step, without any sync. Then every script as a
whole, with its own AdamW, as FOLDER/{sync}_{world_size}/rank{rank}.json. Those named "end_...", for 4 workers, see
the end of an epoch that does not divide. Real gloo; the ranks are forked from this process, which has imported all and
computed nothing.
"""

import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # any optimizer imports it at its first step: once here, and not in every rank
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import BertForSequenceClassification, GPT2LMHeadModel

from common.data.sample_data import glue_sample_dir
from common.data.samplers import ShuffledEachEpoch
from common.models.load import model_path
from common.paths import ROOT, import_file
from common.workers.process_group import Worker

BATCH = 12  # in all; it divides by 1, 2, 3 and 4
STEPS = 5
# case -> the syncs it is tried with; the scripts are loaded by path, as everywhere
CASES = {"frozen_bert": ("2a", "2b", "3"), "tied_gpt2": ("2a", "2b", "2b_gpt2", "3_gpt2")}
SCRIPTS = {
    "1": "task1_single/run_glue.py",
    "2a": "task2a_gather_scatter/run_glue.py",
    "2b": "task2b_allreduce/run_glue.py",
    "3": "task3_ddp/run_glue.py",
    "2b_gpt2": "task2b_allreduce/run_gpt2.py",
    "3_gpt2": "task3_ddp/run_gpt2.py",
}


def main() -> None:
    folder, sizes = Path(sys.argv[1]), [int(size) for size in sys.argv[2:]]
    for case in CASES:
        model(case)  # makes the tiny models before several ranks want them
    for world_size in sizes:
        on_ranks(world_size, lambda rank, size=world_size: keep_steps(rank, size, folder))
        for sync in ("2a", "2b", "3") if world_size > 1 else ("1", "2a", "2b", "3"):
            run_script(sync, world_size, folder / f"{sync}_{world_size}", "--max_steps", STEPS)
    if 4 in sizes:
        run_ends(folder)


def run_ends(folder: Path) -> None:
    """The scripts on data that four workers cannot divide, and one worker with the padded order."""
    end = ("--data_dir", short_task(folder), "--model_name_or_path", "tiny", "--num_train_epochs", 2)
    for sync, world_size in (("1", 1), ("2a", 4), ("2b", 4), ("3", 4)):
        run_script(sync, world_size, folder / f"end_{sync}_{world_size}", *end)


def on_ranks(world_size: int, work: Callable[[int], None]) -> None:
    """work(rank) in a forked process for each rank, to its end."""
    ranks = [fork_rank(rank, work) for rank in range(world_size)]
    statuses = [os.waitpid(rank, 0)[1] for rank in ranks]
    if any(statuses):
        sys.exit(f"a rank of {world_size} failed, see above")


def fork_rank(rank: int, work: Callable[[int], None]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work(rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def keep_steps(rank: int, world_size: int, folder: Path) -> None:
    """The steps of all cases, in one process group that is joined over a file."""
    dist.init_process_group("gloo", f"file://{folder}/join{world_size}", rank=rank, world_size=world_size)
    for case, syncs in CASES.items():
        for sync in syncs if world_size > 1 else ("1", *syncs):
            torch.save(five_steps(case, sync, rank, world_size), folder / f"{case}_{sync}_{world_size}_{rank}.pt")
    dist.destroy_process_group()


def run_script(sync: str, world_size: int, output: Path, *flags) -> None:
    """A whole script, with the course's own flags; on one worker the end of an epoch is padded as it is for four."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = ["--do_train", "--dropout", 0, "--seed", 3, "--per_gpu_train_batch_size", BATCH // world_size]
    common += ["--output_dir", output, "--overwrite_output_dir", *flags]
    joined = ["--master_ip", "127.0.0.1", "--master_port", port, "--world_size", world_size, "--local_rank"]

    def work(rank: int) -> None:
        script = lesson(SCRIPTS[sync])
        if sync == "1":
            script.ShuffledEachEpoch = PaddedForFour
        sys.argv = [SCRIPTS[sync], *map(str, common + ([*joined, rank] if sync != "1" else []))]
        script.main()

    on_ranks(world_size, work)


class PaddedForFour(ShuffledEachEpoch):
    """The order of one worker, with the first few examples again at the end, as torch's sampler pads it for four."""

    def __len__(self) -> int:
        return -(-len(self.dataset) // 4) * 4

    def __iter__(self):
        order = list(super().__iter__())
        return iter(order + order[: len(self) - len(order)])


def short_task(folder: Path) -> Path:
    """22 examples, so that four workers need 24: two are repeated."""
    task = folder / "short"
    task.mkdir()
    for name in ("train.tsv", "dev.tsv"):
        (task / name).write_text("".join((glue_sample_dir() / name).open().readlines()[:23]))
    return task


def model(case: str) -> torch.nn.Module:
    """Without dropout; the same weights everywhere. GPT-2's input embedding is its output layer too: a tied weight."""
    torch.manual_seed(0)
    if case == "tied_gpt2":
        made = GPT2LMHeadModel.from_pretrained(model_path("tiny", "gpt2"))
        assert made.lm_head.weight is made.transformer.wte.weight
    else:
        made = BertForSequenceClassification.from_pretrained(model_path("tiny", "bert"), num_labels=2)
        made.bert.embeddings.word_embeddings.weight.requires_grad_(False)
    return made.eval()  # eval: dropout off


def batches(case: str) -> list[dict[str, torch.Tensor]]:
    """Five global batches, (BATCH, T) token ids and what the model is to say of them."""
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(5, 500, (BATCH, 16), generator=generator) for _ in range(STEPS)]
    if case == "tied_gpt2":
        return [{"input_ids": ids, "labels": ids} for ids in tokens]
    return [{"input_ids": ids, "labels": torch.randint(0, 2, (BATCH,), generator=generator)} for ids in tokens]


def five_steps(case: str, sync: str, rank: int, world_size: int) -> dict[str, dict[str, torch.Tensor]]:
    """{"gradients": after the first sync, "parameters": after the last step}, by parameter name."""
    plain = trained = model(case)
    script = lesson(SCRIPTS[sync])
    if sync.startswith("3"):
        trained = script.wrap(plain, Worker(rank, world_size))
        assert isinstance(trained, DistributedDataParallel)
    optimizer = torch.optim.SGD([weight for weight in plain.parameters() if weight.requires_grad], lr=0.1)
    gradients = {}
    for batch in batches(case):
        trained(**{name: rows[rank::world_size] for name, rows in batch.items()}).loss.backward()
        if sync == "2b_gpt2":
            script.average_gradients(plain)
        elif sync.startswith("2"):
            script.sync_gradients(plain, world_size)
        gradients = gradients or {
            name: weight.grad.clone() for name, weight in plain.named_parameters() if weight.grad is not None
        }
        optimizer.step()
        optimizer.zero_grad()
    return {"gradients": gradients, "parameters": {name: w.detach() for name, w in plain.named_parameters()}}


def lesson(path: str):
    """A script of the assignment, as a module."""
    return import_file(ROOT / path, Path(path).stem)


if __name__ == "__main__":
    main()
