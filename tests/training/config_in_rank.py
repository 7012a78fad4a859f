"""Makes a script's configuration with the graders' values, and lets its record note what it gets.

Sent to ranks as source, see grader/in_rank.py.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what it finds in a rank
    from grader.inside.tools import Context
    from grader.wire.values import Fields

# The graders' optimizer ignores weight_decay and warmup_steps. If a loop applies them itself, its values are wrong.
DEFAULTS: dict[str, object] = {
    "output_dir": Path("out"), "overwrite_output_dir": True, "model_name_or_path": "", "tokenizer_name": "",
    "data_dir": None, "weight_decay": 0.1, "adam_epsilon": 1e-8, "warmup_steps": 2, "max_steps": 0, "dropout": None,
    "no_cuda": True, "profile": False, "timeline": 0, "check_gradients": False, "backend": "gloo",
    "join_seconds": 20.0, "hang_seconds": 20.0, "master_ip": "127.0.0.1", "master_port": 29500,
    "learning_rate": 0.1, "max_grad_norm": 0.0, "seed": 1,
    "model_type": "bert", "config_name": "", "task_name": "rte", "do_train": True, "do_eval": True,
    "do_lower_case": False, "max_seq_length": 4, "per_gpu_train_batch_size": 1, "per_gpu_eval_batch_size": 3,
    "num_train_epochs": 1, "overwrite_cache": False, "batch_size": 1, "n_epochs": 1,
    "model_max_length": 4, "pytest": False, "model_parallel_mode": "none", "n_chunk": 1, "schedule": "threads",
}  # fmt: skip


def make_config(context: Context, kind: str, **values: object) -> Any:
    """Return a GlueConfig or Gpt2Config for this rank."""
    from common import config as configs

    # Every worker on a machine of its own: there rank_on_node is 0 for all of them.
    place = {"task": "graded", "world_size": context.world_size, "rank": context.rank, "rank_on_node": 0}
    config, values = getattr(configs, kind), DEFAULTS | place | values
    return config(**{field.name: values[field.name] for field in fields(config)})


def watch_record(context: Context, record: object) -> None:
    """Let a record note every loss and all metrics that it gets, and the type of each that is no number."""

    def loss(value: object = None, *_: object) -> Fields:
        return {"value": number(value), "type": type_unless(value, int, float)}

    def evaluation(epoch: object = None, metrics: object = None, *_: object) -> Fields:
        metrics = metrics if isinstance(metrics, dict) else {}
        return {
            "epoch": epoch if isinstance(epoch, int) else -1,
            "metrics": {str(name): number(value) for name, value in metrics.items()},
            "types": [type_unless(epoch, int), *(type_unless(value, int, float) for value in metrics.values())],
        }

    context.spy(record, "loss", "loss", loss)
    context.spy(record, "evaluation", "evaluation", evaluation)


def number(value: Any) -> float:
    """Return a value as a number, nan where it is none."""
    try:
        return float(value)
    except Exception:  # of any object that a student has recorded
        return float("nan")


def type_unless(value: object, *allowed: type) -> str:
    """Return the name of a value's type, "" if it is an allowed one: the record can write it as JSON."""
    return "" if isinstance(value, allowed) else type(value).__name__
