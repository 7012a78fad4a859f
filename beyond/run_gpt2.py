"""Beyond DDP: train on OSCAR text with what you wrote in this folder.

    arguments -> process group -> data partition -> model -> strategy -> train -> record

--strategy names the lesson: ring (ring.py), overlap (overlap.py), zero1 and zero2 (sharded_optimizer.py), zero3
(sharded_model.py), tensor (tensor_parallel.py), 1f1b (one_f_one_b.py) or grid (grid.py). Each lesson has a page in this
folder; README.md lists them.
Shapes: B examples in a worker's batch, T tokens in an example.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds common/ from any folder
import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import torch.distributed as dist
import transformers
from torch.optim import AdamW
from torch.utils.data import Subset

from beyond import ring
from beyond.byte_counts import CommunicationRecord
from beyond.checkpoint import load_shards, save_shards
from beyond.deferred import from_folder
from beyond.on_grid import OnGrid
from beyond.overlap import GradientReducer
from beyond.replicated import Replicated
from beyond.sharded_model import ShardedModel
from beyond.sharded_optimizer import ShardedOptimizer
from beyond.step_memory import what_would_fit
from common.arguments import parse_beyond_arguments
from common.data.oscar import load_blocks
from common.data_partition import partition_dataset
from common.errors import exit_on_input_error
from common.evaluation import evaluate_text
from common.models.fit import fit_model
from common.models.load import load_tokenizer
from common.optim import build_schedule, set_seed
from common.peak_memory import PeakMemory
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


def load_model(config, tokenizer, device):
    """Return the model. That of zero3 has no memory yet, if possible: each rank reads only its part of the weights."""
    kind, folder = transformers.GPT2LMHeadModel, config.model_name_or_path
    model = from_folder(kind, folder, device) if config.strategy == "zero3" else None
    if model is None or len(tokenizer) > model.config.vocab_size:  # to add rows, it needs the whole matrix
        model = kind.from_pretrained(folder).to(device)
    return fit_model(model, config, tokenizer, config.model_max_length)


def make_strategy(config, model):
    """Return the lesson's object, with finish(), clip(), step(), zero_grad(), and torch's optimizer as `optimizer`."""
    make_optimizer = partial(AdamW, lr=config.learning_rate, eps=config.adam_epsilon)
    blocks = model.transformer.h
    if config.strategy == "zero3":
        return ShardedModel(model, blocks, make_optimizer, config.weight_decay)
    if config.strategy in ("zero1", "zero2"):
        stage = int(config.strategy.removeprefix("zero"))
        return ShardedOptimizer(model, blocks, make_optimizer, config.weight_decay, stage)
    if config.strategy in ("tensor", "1f1b", "grid"):
        micro_batches = config.n_chunk if config.grid.pipeline > 1 else 1
        return OnGrid(model, config.grid, make_optimizer, config.weight_decay, config.schedule, micro_batches)
    average = partial(ring.average_gradients, model)
    finish = average if config.strategy == "ring" else GradientReducer(model, config.bucket_bytes).finish
    return Replicated(model, finish, make_optimizer, config.weight_decay)


def train(config, worker, model, optimizer, loader, validation, record):
    """Train `model` on this worker's partition; each step uses config.batch_size examples in total, over all workers.

    optimizer: the lesson's object, see make_strategy.

    1.2  Compute the gradient of the loss with respect to every parameter. With overlap, zero2 and zero3, this also
         sends gradients. tensor, 1f1b and grid do not use this line.
    1.3  Update the parameters.
    """
    scheduler = build_schedule(config, optimizer.optimizer, len(loader))
    for epoch in record.epochs(loader):
        model.train()
        for tokens in record.iterations(loader):  # (B, T)
            if isinstance(optimizer, OnGrid):
                with record.phase("backward"):  # and forward: the schedule mixes the two
                    loss = optimizer.forward_backward(tokens)
            else:
                with record.phase("forward"):
                    loss = model(input_ids=tokens, labels=tokens).loss  # the model shifts the labels by one token
                with record.phase("backward"):
                    # TODO(cos598d) 1.2: compute the gradient of the loss with respect to every parameter (1 line)
                    # BEGIN SOLUTION 1.2
                    loss.backward()
                    # END SOLUTION 1.2
            with record.phase("communication"):  # what backward did not hide
                optimizer.finish()
            with record.phase("optimizer"):
                optimizer.clip(config.max_grad_norm or float("inf"))
                # TODO(cos598d) 1.3: take one optimizer step (1 line)
                # BEGIN SOLUTION 1.3
                optimizer.step()
                # END SOLUTION 1.3
                scheduler.step()
                optimizer.zero_grad()
            record.loss(loss.item())
        if isinstance(optimizer, OnGrid):
            metrics = optimizer.evaluate(worker, validation)
        else:
            metrics = evaluate_text(worker, model, validation)
        record.evaluation(epoch, metrics)


def main():
    config = parse_beyond_arguments()
    with process_group(config, join) as worker:
        set_seed(config.seed)  # the same seed on every worker: all must start from the same weights
        tokenizer = load_tokenizer(config.tokenizer_name, "gpt2")
        data = load_blocks(config, tokenizer)
        place = worker.rank // config.grid.tensor % config.grid.data  # on the data axis; see grid.py
        # Stages need micro-batches of equal size: the examples that do not fill a batch are left out.
        whole = len(data.train) - (len(data.train) % config.batch_size if config.grid.pipeline > 1 else 0)
        examples = Subset(data.train, range(whole))
        loader, _ = partition_dataset(examples, config.batch_size, rank=place, world_size=config.grid.data)
        memory = PeakMemory(worker.device)  # counts from here: what is there before the model
        with memory.limited(config.memory_limit_mb, partial(what_would_fit, config)):
            model = load_model(config, tokenizer, worker.device)
            record = CommunicationRecord(config, worker, memory)
            record.describe(model, len(data.train), len(data.validation))
            optimizer = make_strategy(config, model)
            if config.resume_from:
                load_shards(config.resume_from, optimizer)
            if isinstance(optimizer, OnGrid):
                record.runner = optimizer.runner
            record.watch_memory(optimizer.model if isinstance(optimizer, OnGrid) else model, optimizer.optimizer)
            # Each worker draws its own dropout masks from here on; a tensor group shares them, see dropout.py.
            set_seed(config.seed + worker.rank // config.grid.tensor)
            train(config, worker, model, optimizer, loader, data.validation, record)
            if config.save_to:
                save_shards(config.save_to, optimizer)
            record.write()


if __name__ == "__main__":
    exit_on_input_error(main)
