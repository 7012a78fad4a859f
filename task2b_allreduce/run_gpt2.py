"""Task 2b for GPT-2: train on OSCAR text, each worker on its own partition; this script starts the workers itself.

    arguments -> processes -> process group -> data partition -> model -> train (the lesson) -> record

Shapes: B examples in a worker's batch, T tokens in an example. README.md in this folder explains the regions.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds common/ from any folder
import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import torch.distributed as dist
import torch.multiprocessing
import transformers
from torch.multiprocessing import Process
from torch.nn.utils import clip_grad_norm_

from common.arguments import parse_gpt2_arguments
from common.data.oscar import load_blocks
from common.data_partition import partition_dataset
from common.errors import exit_on_input_error
from common.evaluation import evaluate_text
from common.models.fit import fit_model
from common.models.load import load_tokenizer
from common.optim import build_optimizer, set_seed
from common.record import Record
from common.workers.process_group import process_group
from task2b_allreduce.scaling import check_workers, report_scaling
from task2b_allreduce.worker_gradients import keep_gradients


def setup(rank, world_size, backend):
    """Join the process group through the environment; task 2a used a tcp:// address instead.

    2b.6  [1] Set MASTER_ADDR and MASTER_PORT in the environment, to 127.0.0.1 and 11868: rank 0 listens there. Keep a
              value that is already set.
          [2] Join with this backend, rank and size.
    """
    # TODO(cos598d) 2b.6: set the two variables and call init_process_group (3 lines)
    # BEGIN SOLUTION 2b.6
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "11868")
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    # END SOLUTION 2b.6


def average_gradients(model):
    """Replace every parameter's gradient by its mean over all workers.

    2b.7  Do the same as in run_glue.py, with the same collectives; ask the process group for the number of workers.
    """
    # TODO(cos598d) 2b.7: all_reduce every gradient and divide by the number of workers (about 5 lines)
    # BEGIN SOLUTION 2b.7
    world_size = dist.get_world_size()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad.div_(world_size)
    # END SOLUTION 2b.7


def train(config, worker, model, loader, validation, record):
    """Train `model` on this worker's partition; each step uses config.batch_size examples in total, over all workers.

    2b.8  Average the gradients over the workers, at the right place in the step.
    """
    optimizer, scheduler = build_optimizer(config, model, len(loader))
    for epoch in record.epochs(loader):
        model.train()
        for tokens in record.iterations(loader):  # (B, T)
            with record.phase("forward"):
                loss = model(input_ids=tokens, labels=tokens).loss  # the model shifts the labels by one token
            with record.phase("backward"):
                # TODO(cos598d) 1.2: compute the gradient of the loss with respect to every parameter (1 line)
                # BEGIN SOLUTION 1.2
                loss.backward()
                # END SOLUTION 1.2
            with record.phase("communication"):
                # TODO(cos598d) 2b.8: average the gradients over the workers (1 line)
                # BEGIN SOLUTION 2b.8
                average_gradients(model)
                # END SOLUTION 2b.8
            if config.pytest:
                keep_gradients(model, worker.rank)
                return
            with record.phase("optimizer"):
                clip_grad_norm_(model.parameters(), config.max_grad_norm or float("inf"))
                # TODO(cos598d) 1.3: take one optimizer step (1 line)
                # BEGIN SOLUTION 1.3
                optimizer.step()
                # END SOLUTION 1.3
                scheduler.step()
                model.zero_grad()
            record.loss(loss.item())
        record.evaluation(epoch, evaluate_text(worker, model, validation))


def work(rank, config):
    """Run one worker; this is the target of each process."""
    exit_on_input_error(run_worker, rank, config)


def run_worker(rank, config):
    """Run one worker, from joining to writing its record."""
    config = replace(config, rank=rank, rank_on_node=rank)
    with process_group(config, lambda config: setup(config.rank, config.world_size, config.backend)) as worker:
        set_seed(config.seed)  # the same seed on every worker: all must start from the same weights
        tokenizer = load_tokenizer(config.tokenizer_name, "gpt2")
        data = load_blocks(config, tokenizer)
        loader, _ = partition_dataset(data.train, config.batch_size)
        model = transformers.GPT2LMHeadModel.from_pretrained(config.model_name_or_path)
        model = fit_model(model, config, tokenizer, config.model_max_length).to(worker.device)
        set_seed(config.seed + worker.rank)  # from here on, each worker draws its own dropout masks
        record = Record(config, worker)
        record.describe(model, len(data.train), len(data.validation))
        train(config, worker, model, loader, data.validation, record)
        record.write()


def start_workers(config):
    """Start config.world_size processes that run work(rank, config), and wait for all of them.

    2b.9  [1] make a Process for every rank, [2] start it, [3] when all are running, wait until each has ended.
    Returns the list of processes.
    """
    processes = []
    # TODO(cos598d) 2b.9: make, start and join the processes (about 6 lines)
    # BEGIN SOLUTION 2b.9
    for rank in range(config.world_size):
        process = Process(target=work, args=(rank, config))
        process.start()
        processes.append(process)
    for process in processes:
        process.join()  # inside the first loop, this would wait for rank 0, which waits for the ranks not started yet
    # END SOLUTION 2b.9
    return processes


def main():
    config = parse_gpt2_arguments("task2b_allreduce", world_size=2)
    torch.multiprocessing.set_start_method("forkserver")  # a worker starts without this process's memory
    check_workers(start_workers(config))
    if not config.pytest:
        report_scaling(config)


if __name__ == "__main__":
    exit_on_input_error(main)
