"""Task 2b: fine-tune BERT on several workers; gradients are averaged with all_reduce.

    arguments -> process group -> data -> model -> train (the lesson) -> record

Shapes: B examples in a worker's batch, T tokens in an example. README.md in this folder explains the regions.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds common/ from any folder
import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from common.arguments import parse_glue_arguments
from common.data.glue import TASKS, load_glue
from common.errors import exit_on_input_error
from common.evaluation import evaluate, evaluate_only
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


def load_model(config):
    """Return BERT with a new head for this task's labels.

    1.1  Load the pretrained weights from config.model_name_or_path. `bert_config` holds the number of labels.
    """
    from transformers import BertConfig, BertForSequenceClassification  # takes seconds, and --help does not need it

    bert_config = BertConfig.from_pretrained(config.config_name, num_labels=TASKS[config.task_name].num_labels)
    # TODO(cos598d) 1.1: load the model with from_pretrained; remember to pass bert_config as config (1 line)
    # BEGIN SOLUTION 1.1
    model = BertForSequenceClassification.from_pretrained(config.model_name_or_path, config=bert_config)
    # END SOLUTION 1.1
    return model


def sync_gradients(model, world_size):
    """Replace every parameter's gradient by its mean over all workers.

        every rank   g0 + g1 + g2 + g3 --all_reduce-> the sum on all ranks, then / 4

    2b.1  For every parameter that has a gradient, in the same order on every worker:
          [1] all_reduce sums the gradients of all workers, in place,
          [2] every worker divides the sum by the number of workers. A gradient keeps its dtype (it may be of 16 bit).
          Leave out only None. A reduce with a broadcast does the same; no other collectives are accepted.
    """
    # TODO(cos598d) 2b.1: all_reduce every gradient and divide by world_size (about 4 lines)
    # BEGIN SOLUTION 2b.1
    for parameter in model.parameters():
        if parameter.grad is None:  # frozen or unused: in this model, it is so on every worker
            continue
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)  # every worker waits for every other
        parameter.grad /= world_size  # the mean, so that the step does not grow with the number of workers
    # END SOLUTION 2b.1


def train(config, worker, model, data, record):
    """Fine-tune `model` on data.train; in every step, all workers together process one batch.

    2a.2  Divide the examples: every worker gets its own part of each batch, and every epoch has a different order.
    1.2  Compute the gradient of the loss with respect to every parameter.
    2b.1  Average the gradients over the workers, before clipping: clipping is not linear.
    1.3  Update the parameters.
    1.4  After every epoch, evaluate the model on the dev set.
    """
    # TODO(cos598d) 2a.2: make a DistributedSampler with config.seed, and a DataLoader for one worker (2-3 lines)
    # BEGIN SOLUTION 2a.2
    sampler = DistributedSampler(data.train, worker.world_size, worker.rank, seed=config.seed)
    loader = DataLoader(data.train, sampler=sampler, batch_size=config.per_gpu_train_batch_size)
    # END SOLUTION 2a.2
    optimizer, scheduler = build_optimizer(config, model, len(loader))
    for epoch in record.epochs(loader):
        # TODO(cos598d) 2a.2: tell the sampler which epoch this is, or every epoch has the same order (1 line)
        # BEGIN SOLUTION 2a.2
        sampler.set_epoch(epoch)
        # END SOLUTION 2a.2
        model.train()  # dropout on; evaluate() turns it off
        for batch in record.iterations(loader):  # token ids, masks, segments: (B, T); labels: (B,)
            with record.phase("forward"):
                loss = model(**batch).loss
            with record.phase("backward"):
                # TODO(cos598d) 1.2: compute the gradient of the loss with respect to every parameter (1 line)
                # BEGIN SOLUTION 1.2
                loss.backward()
                # END SOLUTION 1.2
            with record.phase("communication"):
                sync_gradients(model, worker.world_size)  # every worker waits for every other here
            with record.phase("optimizer"):
                clip_grad_norm_(model.parameters(), config.max_grad_norm or float("inf"))
                # TODO(cos598d) 1.3: take one optimizer step (1 line)
                # BEGIN SOLUTION 1.3
                optimizer.step()
                # END SOLUTION 1.3
                scheduler.step()
                model.zero_grad()
            record.loss(loss.item())
        if config.do_eval:
            # TODO(cos598d) 1.4: call evaluate(), and pass its result to record.evaluation (1-2 lines)
            # BEGIN SOLUTION 1.4
            record.evaluation(epoch, evaluate(config, worker, model, data))
            # END SOLUTION 1.4


def main():
    config = parse_glue_arguments("task2b_allreduce")
    with process_group(config, join) as worker:
        set_seed(config.seed)  # before the model is made, because its new head is random; the same seed on every worker
        tokenizer = load_tokenizer(config.tokenizer_name, "bert", config.do_lower_case)
        data = load_glue(config, tokenizer)
        model = fit_model(load_model(config), config, tokenizer, config.max_seq_length).to(worker.device)
        set_seed(config.seed + worker.rank)  # from here on, each worker draws its own dropout masks
        record = Record(config, worker)
        record.describe(model, len(data.train), len(data.dev))
        work = train if config.do_train else evaluate_only
        work(config, worker, model, data, record)
        record.write()


if __name__ == "__main__":
    exit_on_input_error(main)
