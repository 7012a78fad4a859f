"""Runs main() of a run_glue.py in a rank, on a tiny BERT and drawn examples; sent to ranks as source.

Real data, the roll call and the watch have tests of their own: here they would only cost time. Events are forward
passes and the record's, as in tests/training/loop_in_rank.py, and `weights` and `trained`: the parameters before and
after training.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from transformers import BertForSequenceClassification

if TYPE_CHECKING:  # what it finds in a rank
    from common.config import GlueConfig
    from grader.inside.tools import Context
    from grader.wire.values import Fields
    from tests.task1.test_bert import save_tiny_bert
    from tests.training.config_in_rank import watch_record


def prepare_script(context: Context) -> None:
    """Save BERT, and replace what the script imports from common/, before the script is loaded."""
    from common import record
    from common.data import glue
    from common.models import load
    from common.workers import process_group

    save_tiny_bert(context)
    arguments, event = context.arguments, context.event

    def features(part: slice) -> glue.Features:
        ids, labels = context.inputs["ids"][part], context.inputs["labels"][part]
        return glue.Features(ids, torch.ones_like(ids), torch.zeros_like(ids), labels)

    @contextlib.contextmanager
    def group(config: GlueConfig, join: Callable[[GlueConfig], object] | None = None) -> Iterator[process_group.Worker]:
        if join is not None:
            join(config)
        yield process_group.Worker(config.rank, config.world_size)

    def load_glue(config: GlueConfig, tokenizer: object) -> glue.GlueData:
        parts = features(slice(arguments["train"])), features(slice(arguments["train"], None))
        return glue.GlueData(glue.TASKS[config.task_name], *parts)

    def load_tokenizer(*_: object, **__: object) -> range:
        """Return what stands for a tokenizer: a script asks it only for its length, the size of the vocabulary."""
        return range(8)

    def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    class WatchedRecord(record.Record):
        def __init__(self, config: GlueConfig, worker: process_group.Worker) -> None:
            super().__init__(config, worker)
            watch_record(context, self)

        def describe(self, model: torch.nn.Module, train: int, dev: int) -> None:
            self.model = model
            event("weights", weights=weights(model))
            super().describe(model, train, dev)

        def write(self) -> None:
            event("trained", weights=weights(self.model))
            super().write()

    def note(self: torch.nn.Module, input_ids: torch.Tensor, *arguments: object, **keywords: object) -> Fields:
        return {"first": input_ids[:, 0].tolist(), "training": self.training, "grad": torch.is_grad_enabled()}

    context.spy(BertForSequenceClassification, "forward", "forward", note)
    glue.load_glue, load.load_tokenizer = load_glue, load_tokenizer  # type: ignore[assignment]
    process_group.process_group, record.Record = group, WatchedRecord  # type: ignore[assignment, misc]


def run_main(context: Context, lesson: ModuleType) -> None:
    """Run main(), with its own AdamW and without dropout. Arguments: config_seed, rate, batch (of a worker), epochs."""
    a = context.arguments
    torch.manual_seed(10 * context.world_size + context.rank)  # another state on every rank: only --seed may decide
    sys.argv[1:] = [
        "--model_name_or_path", "pretrained", "--dropout", "0", "--seed", str(a["config_seed"]), "--no_cuda",
        "--learning_rate", str(a["rate"]), "--num_train_epochs", str(a["epochs"]), "--max_seq_length", "8",
        "--per_gpu_train_batch_size", str(a["batch"]), "--output_dir", "out", "--overwrite_output_dir",
        "--world_size", str(context.world_size), "--local_rank", str(context.rank),
    ]  # fmt: skip
    lesson.main()
