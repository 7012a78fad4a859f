"""Runs a student's load_model(), and whole scripts, on a real BERT of a few hundred weights."""

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel

from grader.inside.context import Context
from grader.probes.configs import make_config, watch_record
from grader.wire.values import Fields

SIZES: Fields = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "max_position_embeddings": 16,
}  # fmt: skip


def tiny_bert(folder: str, seed: int, vocabulary: int) -> torch.nn.Module:
    """A pretrained BERT in a folder, without a head, as checkpoints are."""
    torch.manual_seed(seed)
    model = BertModel(BertConfig(vocab_size=vocabulary, initializer_range=0.5, **SIZES))
    for weight in model.parameters():  # none left at 0 or 1, where loaded and new weights would look alike
        torch.nn.init.normal_(weight.data, std=0.5)
    model.save_pretrained(folder)
    torch.manual_seed(0)
    return model


def load_model(context: Context) -> list[Fields]:
    """load_model(config) three times, as main() calls it: with seed 1, 2 and 1.

    Arguments: file, checkpoint_seed, vocabulary, task (GLUE's name), settings (of the configuration), mine (ids, and
    the head and bias to be put in for them). Returns what each call gave: class, body (weights by name), head, labels,
    frozen, settings, dtypes, `moved`: the generators of Python and numpy that are not as the seed left them; and
    `logits`, see below.
    """
    a = context.arguments
    tiny_bert("pretrained", a["checkpoint_seed"], a["vocabulary"])
    settings = BertConfig.from_pretrained("pretrained")
    settings.update(a["settings"])
    settings.save_pretrained("settings")
    task = context.load(a["file"])
    from common.optim import set_seed

    paths = {"model_name_or_path": "pretrained", "config_name": "settings"}
    found = []
    for seed in (1, 2, 1):
        config = make_config(context, "GlueConfig", task_name=a["task"], seed=seed, **paths)
        set_seed(seed)
        before = random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()
        model = task.load_model(config)
        found.append(_described(model, list(a["settings"])))
        after = random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()
        found[-1]["moved"] = [name for name, x, y in zip(("Python", "numpy"), before, after, strict=True) if x != y]
        found[-1]["logits"] = _logits(model, **a["mine"])
    return found


def _described(model: Any, settings: list[str]) -> Fields:
    body, head = getattr(model, "bert", None), getattr(model, "classifier", None)
    weights = body.state_dict() if body is not None else {}
    return {
        "class": type(model).__name__,
        "body": {name: tensor.clone() for name, tensor in weights.items() if tensor.is_floating_point()},
        "head": None if head is None else head.weight.detach().clone(),
        "labels": getattr(head, "out_features", None),
        "frozen": [name for name, parameter in model.named_parameters() if not parameter.requires_grad],
        "settings": {name: getattr(getattr(model, "config", None), name, None) for name in settings},
        "dtypes": sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}),
    }


def _logits(model: Any, ids: torch.Tensor, head: torch.Tensor, bias: torch.Tensor) -> torch.Tensor | None:
    """What the model gives for token ids with this head on it; None if it is no such model."""
    try:
        with torch.no_grad():
            layer = model.classifier
            layer.weight.copy_(head[: len(layer.weight)])
            layer.bias.copy_(bias[: len(layer.bias)])
            return model.eval()(input_ids=ids).logits.clone()
    except Exception:
        return None


def script(context: Context) -> None:
    """The whole main() of a run_glue.py, with its AdamW, on a BERT without dropout and drawn examples.

    Arguments: file, checkpoint_seed, vocabulary, config_seed, rate, mine (ids and labels of this rank's training and
    dev set), train (how many of them train), batch (of one worker), epochs. Events as in tests/training, of forward
    passes and the record only, and `weights` and `trained`: the parameters that training starts and ends with.
    """
    a = context.arguments
    tiny_bert("pretrained", a["checkpoint_seed"], a["vocabulary"])
    _replace_surroundings(context)
    task = context.load(a["file"])
    torch.manual_seed(10 * context.world_size + context.rank)  # whatever drew numbers before: --seed must decide
    sys.argv[1:] = [
        "--model_name_or_path", "pretrained", "--dropout", "0", "--seed", str(a["config_seed"]), "--no_cuda",
        "--learning_rate", str(a["rate"]), "--num_train_epochs", str(a["epochs"]), "--max_seq_length", "8",
        "--per_gpu_train_batch_size", str(a["batch"]), "--output_dir", "out", "--overwrite_output_dir",
        "--world_size", str(context.world_size), "--local_rank", str(context.rank),
    ]  # fmt: skip
    task.main()


def _replace_surroundings(context: Context) -> None:
    """Real data, the roll call and the watchdog have graders of their own: here they would only cost time."""
    from common import record
    from common.data import glue
    from common.models import load
    from common.workers import process_group

    a, event = context.arguments, context.event

    def features(part: slice) -> glue.Features:
        ids, labels = a["mine"]["ids"][part], a["mine"]["labels"][part]
        return glue.Features(ids, torch.ones_like(ids), torch.zeros_like(ids), labels)

    @contextlib.contextmanager
    def group(config: Any, join: Any = None) -> Iterator[process_group.Worker]:
        if join is not None:
            join(config)
        yield process_group.Worker(config.rank, config.world_size)

    def load_glue(config: Any, tokenizer: Any) -> Any:
        parts = features(slice(a["train"])), features(slice(a["train"], None))
        return glue.GlueData(glue.TASKS[config.task_name], *parts)

    def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    class Record(record.Record):
        def __init__(self, config: Any, worker: Any) -> None:
            super().__init__(config, worker)
            watch_record(context, self)

        def describe(self, model: Any, train: int, dev: int) -> None:
            self.model = model
            event("weights", weights=weights(model))
            super().describe(model, train, dev)

        def write(self) -> None:
            event("trained", weights=weights(self.model))
            super().write()

    def note(self: Any, input_ids: Any, *arguments: Any, **keywords: Any) -> dict:
        return {"first": input_ids[:, 0].tolist(), "training": self.training, "grad": torch.is_grad_enabled()}

    context.spy(BertForSequenceClassification, "forward", "forward", note)
    glue.load_glue, load.load_tokenizer = load_glue, lambda *_, **__: range(8)  # type: ignore[assignment]
    process_group.process_group, record.Record = group, Record  # type: ignore[assignment, misc]
