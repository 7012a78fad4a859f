"""The shape that a record must have to be used (task 1's README lists the keys): anything else is another version's."""

import math
from collections.abc import Callable
from typing import Any

Shape = dict | list | Callable[[Any], bool]


def is_text(value: object) -> bool:
    return isinstance(value, str)


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_time(value: Any) -> bool:
    return is_number(value) and math.isfinite(value) and value > 0


def is_metrics(value: object) -> bool:
    return isinstance(value, dict) and all(map(is_number, value.values()))


def or_null(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


RECORD: dict[str, Shape] = {
    "task": is_text,
    "rank": is_whole,
    "world_size": lambda value: is_whole(value) and value > 0,
    "config": {
        "model_name_or_path": is_text,
        "data_dir": or_null(is_text),
        "seed": is_whole,
        "dropout": or_null(is_number),
        "learning_rate": is_number,
        "max_steps": is_whole,
    },
    "versions": {"torch": is_text, "transformers": is_text},
    "host": {"name": is_text, "device": is_text},
    "parameters": is_whole,
    "examples": {"train": is_whole},
    "steps_per_epoch": is_whole,
    "iterations": [{"loss": or_null(is_number), "seconds": is_time}],
    "evaluations": [{"epoch": is_whole, "metrics": is_metrics}],
    "collectives": [{"name": is_text, "count": is_whole, "bytes": is_whole}],
}
GLUE = {
    "per_gpu_train_batch_size": is_whole,
    "max_seq_length": is_whole,
    "task_name": is_text,
    "num_train_epochs": is_whole,
}
GPT2 = {"batch_size": is_whole, "n_epochs": is_whole, "model_max_length": is_whole}


def is_gpt2(record: dict[str, Any]) -> bool:
    """Return whether the record is of a run_gpt2.py; the other script of a task is run_glue.py."""
    return "n_epochs" in record["config"]


def misfit(value: object, shape: Shape, where: str = "") -> str:
    """Return the first place where a value does not fit the shape, such as iterations[0].seconds; "" if it fits."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return where or "content"
        below = ((value.get(key, _ABSENT), inner, f"{where}.{key}".lstrip(".")) for key, inner in shape.items())
    elif isinstance(shape, list):
        if not isinstance(value, list):
            return where
        below = ((item, shape[0], f"{where}[{number}]") for number, item in enumerate(value))
    else:
        return "" if shape(value) else where
    return next((found for part in below if (found := misfit(*part))), "")


_ABSENT = object()  # fits no shape, as opposed to null
