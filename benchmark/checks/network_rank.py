"""One rank of benchmark.checks.network: runs a part on its emulated node and writes result_{rank}.json.

python benchmark/checks/network_rank.py traffic|rate|ladder ... --master_ip ... --local_rank R
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import BertForSequenceClassification

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it starts as a script, on every node

from cluster.random_bert import bert_config, random_bert
from common.arguments import parse_glue_arguments, parse_traffic_arguments
from common.config import GlueConfig
from common.data.glue import load_glue
from common.errors import exit_on_input_error
from common.models.load import load_tokenizer
from common.optim import set_seed
from common.paths import ROOT, atomic_write, import_file
from common.record import Record
from common.workers.process_group import Worker, process_group
from task4_traffic.compare import payload
from task4_traffic.counters import KERNEL, read_kernel
from task4_traffic.traffic import TrafficRecord

FOLDERS = {"2a": "task2a_gather_scatter", "2b": "task2b_allreduce", "3": "task3_ddp", "4": "task4_traffic"}


def lesson(task: str):
    """The solved script of a task, as a module."""
    return import_file(ROOT / FOLDERS[task] / "run_glue.py", f"lesson_{task}")


def write(folder: Path, rank: int, result: dict[str, Any]) -> None:
    with atomic_write(folder / f"result_{rank}.json") as file:
        json.dump(result, file)


def gather_and_scatter(tensor: torch.Tensor) -> None:
    """As task 2a moves one gradient; the mean itself costs no byte."""
    rank, n = dist.get_rank(), dist.get_world_size()
    gathered = [torch.empty_like(tensor) for _ in range(n)] if rank == 0 else None
    dist.gather(tensor, gathered, dst=0)
    dist.scatter(tensor, gathered, src=0)


# ------------------------------------------------------------------------------------------ traffic


def traffic(part: str, steps: int, folder: Path, size: str, batches: list[int], flags: list[str]) -> None:
    """Train task 4's script, with both algorithms, and compare what the interface saw.

    `size` is one of cluster/random_bert.py, or "" for the tiny model; a batch is that of all workers together.
    """
    task, rows = lesson("4"), []
    own_sync, sync_2a = task.sync_gradients, lesson("2a").sync_gradients

    def gather_scatter_sync(model, world_size, dtype, sent) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                elements, size = parameter.grad.numel(), parameter.grad.element_size()
                entry = {"dtype": str(dtype), "elements": elements, "bytes": elements * size}
                sent.append({"shape": list(parameter.grad.shape), **entry})
        sync_2a(model, world_size)

    syncs = {"all_reduce": (own_sync, None), "gather + scatter": (gather_scatter_sync, gather_and_scatter)}
    if part == "bert":
        del syncs["gather + scatter"]
    base = parse_traffic_arguments("task4_traffic", flags)
    with process_group(base, task.join) as worker:
        data = load_glue(base, load_tokenizer("tiny", "bert"))
        for algorithm, (sync, send) in syncs.items():
            task.sync_gradients = sync
            for batch in batches:
                more = ["--do_train", "--num_train_epochs", "1", "--max_steps", str(steps), "--overwrite_output_dir"]
                more += ["--per_gpu_train_batch_size", str(batch // worker.world_size)]
                more += ["--output_dir", str(folder / f"{algorithm}_{batch}".replace(" ", ""))]
                config = parse_traffic_arguments("task4_traffic", [*flags, *more])
                set_seed(config.seed)
                model = BertForSequenceClassification(bert_config(size)) if size else task.load_model(config)
                record = TrafficRecord(config, worker, send)
                record.describe(model, len(data.train), len(data.dev))
                task.train(config, worker, model, data, record)
                del model
                record.write()
                row = compare(config.output_dir, worker, algorithm, part)
                rows.append({"batch": batch, "algorithm": algorithm, "rank": worker.rank, **row})
    write(folder, base.rank, {"rows": rows})


def compare(folder: Path, worker: Worker, algorithm: str, part: str) -> dict[str, Any]:
    """Expected and observed bytes sent: of a whole epoch for the tiny model, else of one iteration."""
    found = json.loads((folder / f"traffic_{worker.rank}.json").read_text())
    record = json.loads((folder / f"rank{worker.rank}.json").read_text())
    size = sum(entry["bytes"] for entry in found["sent"][0]["tensors"])
    iterations = sum(window["iterations"] for window in found["windows"])
    times = record["steps_per_epoch"] if part == "tiny" else 1
    expected = payload(algorithm, size, worker.world_size, worker.rank).sent * times
    framing = found["framing"]["sent"] * times
    observed = sum(window["sent"] for window in found["windows"]) / iterations * times
    return {
        "nodes": worker.world_size,
        "iterations": iterations,
        "gradient_bytes": size,
        "expected": expected,
        "framing": framing,
        "observed": observed,
        "payload_ratio": observed / expected,
        "framed_ratio": observed / (expected + framing),
    }


# --------------------------------------------------------------------------------------------- rate


def rate(mebibytes: int, tries: int, folder: Path, flags: list[str]) -> None:
    """Seconds and bytes of an all_reduce, and of gather and scatter; the best of `tries`."""
    config = parse_glue_arguments("network", flags)
    with process_group(config, lesson("2b").join) as worker:
        tensor = torch.ones(mebibytes * 2**18)
        result: dict[str, Any] = {}
        # Made before: the first touch of so much memory takes time that is not the network's.
        room = [torch.ones_like(tensor) for _ in range(worker.world_size)] if worker.is_first else None

        def both_ways(tensor: torch.Tensor) -> None:
            dist.gather(tensor, room, dst=0)
            dist.scatter(tensor, room, src=0)

        for name, send in (("all_reduce", dist.all_reduce), ("gather_scatter", both_ways)):
            times = [timed(worker, send, tensor) for _ in range(tries)]
            result[f"{name}_seconds"], result[f"{name}_bytes"] = min(times)
    write(folder, config.rank, result)


def timed(worker: Worker, send: Any, tensor: torch.Tensor) -> tuple[float, int]:
    worker.pulse.beat()
    dist.barrier()
    before, begin = read_kernel(KERNEL.read_text())["eth0"], time.perf_counter()
    send(tensor)
    dist.barrier()  # it ends when the slowest rank has ended it
    return time.perf_counter() - begin, read_kernel(KERNEL.read_text())["eth0"][1] - before[1]


# ------------------------------------------------------------------------------------------- ladder


def ladder(task: str, steps: int, folder: Path, size: str, flags: list[str]) -> None:
    """Train one task's script with a model of cluster/random_bert.py; what each interface moved meanwhile."""
    module = lesson(task)
    before = read_kernel(KERNEL.read_text())
    more = ["--model_name_or_path", str(random_bert(size)), "--do_train", "--max_steps", str(steps), "--dropout", "0"]
    more += ["--per_gpu_train_batch_size", "2", "--learning_rate", "1e-5", "--output_dir", str(folder / task)]
    config: GlueConfig = parse_glue_arguments(FOLDERS[task], [*flags, *more])
    with process_group(config, module.join) as worker:
        set_seed(config.seed)
        data = load_glue(config, load_tokenizer(config.tokenizer_name, "bert"))
        model = BertForSequenceClassification.from_pretrained(config.model_name_or_path, hidden_dropout_prob=0.0,
                                                              attention_probs_dropout_prob=0.0)  # fmt: skip
        model = module.wrap(model, worker) if hasattr(module, "wrap") else model
        record = Record(config, worker)
        record.describe(model, len(data.train), len(data.dev))
        module.train(config, worker, model, data, record)
        seconds = record.seconds_per_iteration
    after = read_kernel(KERNEL.read_text())
    moved = {name: sum(after[name][:2]) - sum(before[name][:2]) for name in after}
    others = sum(count for name, count in moved.items() if name not in ("lo", "eth0"))
    sent = after["eth0"][1] - before["eth0"][1]
    result = {"losses": record.losses, "seconds": seconds, "experiment": sent, "control": others, "moved": moved}
    write(folder, config.rank, result)


def main() -> None:
    kind, *words = sys.argv[1:]
    first = next(number for number, word in enumerate(words) if word.startswith("--"))
    own, flags = words[:first], words[first:]
    if kind == "traffic":
        traffic(own[0], int(own[1]), Path(own[2]), own[3], [int(batch) for batch in own[4].split(",")], flags)
    elif kind == "rate":
        rate(int(own[0]), int(own[1]), Path(own[2]), flags)
    else:
        ladder(own[0], int(own[1]), Path(own[2]), own[3], flags)


if __name__ == "__main__":
    exit_on_input_error(main)
