"""Task 1: fine-tune BERT on a GLUE task, on one worker.

    arguments -> worker -> data -> model -> train (the lesson) -> record

Shapes: B examples in a batch, T tokens in an example. README.md in this folder has the numbered steps.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds common/ from any folder
import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from common.arguments import parse_glue_arguments
from common.data.glue import TASKS, load_glue
from common.data.samplers import ShuffledEachEpoch
from common.errors import exit_on_input_error
from common.evaluation import evaluate, evaluate_only
from common.models.fit import fit_model
from common.models.load import load_tokenizer
from common.optim import build_optimizer, set_seed
from common.record import Record
from common.workers.process_group import process_group


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


def train(config, worker, model, data, record):
    """Fine-tune `model` on data.train; every step uses one batch.

    1.2  Compute the gradient of the loss with respect to every parameter.
    1.3  Update the parameters.
    1.4  After every epoch, evaluate the model on the dev set.
    """
    order = ShuffledEachEpoch(data.train, config.seed)
    loader = DataLoader(data.train, config.per_gpu_train_batch_size, sampler=order)
    optimizer, scheduler = build_optimizer(config, model, len(loader))
    for epoch in record.epochs(loader):
        model.train()  # dropout on; evaluate() turns it off
        for batch in record.iterations(loader):  # token ids, masks, segments: (B, T); labels: (B,)
            with record.phase("forward"):
                loss = model(**batch).loss
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
        if config.do_eval:
            # TODO(cos598d) 1.4: call evaluate(), and give what it returns to record.evaluation (1-2 lines)
            # BEGIN SOLUTION 1.4
            record.evaluation(epoch, evaluate(config, worker, model, data))
            # END SOLUTION 1.4


def main():
    config = parse_glue_arguments("task1_single")
    with process_group(config) as worker:
        set_seed(config.seed)  # before the model is made, because its new head is random
        tokenizer = load_tokenizer(config.tokenizer_name, "bert", config.do_lower_case)
        data = load_glue(config, tokenizer)
        model = fit_model(load_model(config), config, tokenizer, config.max_seq_length).to(worker.device)
        record = Record(config, worker)
        record.describe(model, len(data.train), len(data.dev))
        work = train if config.do_train else evaluate_only
        work(config, worker, model, data, record)
        record.write()


if __name__ == "__main__":
    exit_on_input_error(main)
