"""Runs a student's load_model(), and whole scripts, on a real BERT of a few hundred weights."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers import BertConfig, BertModel

from grader import draws
from grader.probes import Context
from grader.probes_train import make_config, watched_record

SIZES: dict[str, Any] = {
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


def load_model(context: Context) -> dict[str, Any]:
    """load_model(config). Arguments: file, seed, task (GLUE's name), dropout (of the configuration)."""
    a = context.arguments
    pretrained = tiny_bert("pretrained", a["seed"], 16)
    settings = BertConfig.from_pretrained("pretrained")
    settings.hidden_dropout_prob = a["dropout"]
    settings.save_pretrained("settings")
    saved = {name: tensor.clone() for name, tensor in pretrained.state_dict().items() if tensor.is_floating_point()}
    task = context.load(a["file"])
    config = make_config(
        context, "GlueConfig", model_name_or_path="pretrained", config_name="settings", task_name=a["task"]
    )
    model = task.load_model(config)
    body = getattr(model, "bert", None)
    head = getattr(model, "classifier", None)
    return {
        "class": type(model).__name__,
        "saved": saved,
        "loaded": {name: tensor for name, tensor in body.state_dict().items() if name in saved} if body else {},
        "labels": getattr(head, "out_features", None),
        "frozen": [name for name, parameter in model.named_parameters() if not parameter.requires_grad],
        "dropout": getattr(getattr(model, "config", None), "hidden_dropout_prob", None),
    }


def script(context: Context) -> None:
    """The whole main() of a run_glue.py, with its AdamW, on a BERT without dropout and drawn examples.

    Arguments: file, seed, train, dev, batch (of one worker), epochs. Events as in probes_train, of the record only,
    and `weights` and `trained`: fingerprints of the parameters that training starts and ends with.
    """
    a = context.arguments
    tiny_bert("pretrained", a["seed"], draws.SHARED_TOKENS + a["train"] + a["dev"])
    _replace_surroundings(context)
    task = context.load(a["file"])
    torch.manual_seed(10 * context.world_size + context.rank)  # whatever drew numbers before: --seed must decide
    sys.argv[1:] = [
        "--model_name_or_path", "pretrained", "--dropout", "0", "--seed", str(a["seed"] % 1000), "--no_cuda",
        "--learning_rate", "2e-3", "--num_train_epochs", str(a["epochs"]), "--max_seq_length", "8",
        "--per_gpu_train_batch_size", str(a["batch"]), "--output_dir", "out", "--overwrite_output_dir",
    ]  # fmt: skip
    if context.world_size > 1 or a["joined"]:
        sys.argv += ["--world_size", str(context.world_size), "--local_rank", str(context.rank)]
    task.main()


def _fingerprint(parameter: torch.Tensor) -> float:
    """A weighted sum: the plain one of a head's biases stays 0, whatever is learnt."""
    flat = parameter.detach().double().flatten()
    return float(flat @ torch.arange(1.0, len(flat) + 1, dtype=torch.float64))


def _replace_surroundings(context: Context) -> None:
    """Real data, the roll call and the watchdog have graders of their own: here they would only cost time."""
    from common import glue, models, process_group, record

    a = context.arguments

    def features(count: int, first: int) -> glue.Features:
        ids, labels = (torch.from_numpy(array) for array in draws.examples(a["seed"], count, first))
        return glue.Features(ids, torch.ones_like(ids), torch.zeros_like(ids), labels)

    @contextlib.contextmanager
    def group(config: Any, join: Any = None) -> Iterator[process_group.Worker]:
        if join is not None:
            join(config)
        yield process_group.Worker(config.rank, config.world_size)

    def load_glue(config: Any, tokenizer: Any) -> Any:
        train, dev = features(a["train"], 0), features(a["dev"], a["train"])
        return glue.GlueData(glue.TASKS[config.task_name], train, dev)

    def sums(model: torch.nn.Module) -> dict[str, float]:
        return {name: _fingerprint(parameter) for name, parameter in model.named_parameters()}

    class Record(record.Record):
        def __init__(self, config: Any, worker: Any) -> None:
            super().__init__(config, worker)
            watched_record(context, self)

        def describe(self, model: Any, train: int, dev: int) -> None:
            self.model = model
            context.event("weights", sums=sums(model))
            super().describe(model, train, dev)

        def write(self) -> None:
            context.event("trained", sums=sums(self.model))
            super().write()

    glue.load_glue, models.load_tokenizer = load_glue, lambda *_, **__: range(8)  # type: ignore[assignment]
    process_group.process_group, record.Record = group, Record  # type: ignore[assignment, misc]
