"""Task 3 for GPT-2: train on OSCAR text with DistributedDataParallel; one command starts one worker.

    arguments -> process group -> data partition -> model -> train (the lesson) -> record

Shapes: B examples in a worker's batch, T tokens in an example. README.md in this folder explains the regions.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds common/ from any folder
import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import torch.distributed as dist
import transformers
from torch.nn.parallel import DistributedDataParallel
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


def join(config):
    """Join the process group of config.world_size workers.

    2a.1  Join the process group at tcp://master_ip:master_port, with the backend, size and rank of `config`.
          Give the address as init_method (no store), and do not catch its exceptions.
    """
    # TODO(cos598d) 2a.1: call init_process_group once (1-6 lines)
    # BEGIN SOLUTION 2a.1
    dist.init_process_group(
        backend=config.backend,
        init_method=f"tcp://{config.master_ip}:{config.master_port}",
        world_size=config.world_size,
        rank=config.rank,
    )
    # END SOLUTION 2a.1


def wrap(model, worker):
    """Return the model that train() calls: its backward pass leaves the mean of all workers' gradients in param.grad.

    3.2  Wrap the model in DistributedDataParallel. On a GPU, pass the worker's device.
    """
    # TODO(cos598d) 3.2: wrap the model (1-2 lines)
    # BEGIN SOLUTION 3.2
    device_ids = [worker.device] if worker.device.type == "cuda" else None
    model = DistributedDataParallel(model, device_ids=device_ids)
    # END SOLUTION 3.2
    return model


def train(config, worker, model, loader, validation, record):
    """Train `model` on this worker's partition; each step uses config.batch_size examples in total, over all workers.

    1.2  Compute the gradient of the loss with respect to every parameter; the wrapped model averages it, too.
    1.3  Update the parameters.
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


def main():
    config = parse_gpt2_arguments("task3_ddp")
    with process_group(config, join) as worker:
        set_seed(config.seed)  # the same seed on every worker: all must start from the same weights
        tokenizer = load_tokenizer(config.tokenizer_name, "gpt2")
        data = load_blocks(config, tokenizer)
        loader, _ = partition_dataset(data.train, config.batch_size)
        model = transformers.GPT2LMHeadModel.from_pretrained(config.model_name_or_path)
        model = fit_model(model, config, tokenizer, config.model_max_length).to(worker.device)
        set_seed(config.seed + worker.rank)  # from here on, each worker draws its own dropout masks
        record = Record(config, worker)
        record.describe(model, len(data.train), len(data.validation))
        train(config, worker, wrap(model, worker), loader, data.validation, record)
        record.write()


if __name__ == "__main__":
    exit_on_input_error(main)
