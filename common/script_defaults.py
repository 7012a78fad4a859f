"""What course.toml sets for the task scripts: the models and the task of real data, and tasks of the course's own."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from common.data.glue_tasks import GLUE, METRICS, GlueTask
from common.errors import InputError
from common.paths import ROOT

NAMES = ("task_name", "bert", "gpt2")
COLUMNS = ("text_a", "text_b", "label", "labels", "metrics", "train", "dev")
EXAMPLE = 'scripts.tasks.reviews = { text_a = "review", label = "stars", labels = ["bad", "good"] }'


@dataclass(frozen=True)
class ScriptDefaults:
    """`task_name` is the default of --task_name; `bert` and `gpt2` are the models where --data_dir is given; `tasks`
    maps the names of all known tasks, in lower case, to their columns."""

    task_name: str = "RTE"
    bert: str = "bert-base-cased"
    gpt2: str = "gpt2"
    tasks: Mapping[str, GlueTask] = field(default_factory=lambda: GLUE)


@cache
def script_defaults() -> ScriptDefaults:
    """Return what the keys `scripts.*` of course.toml say. Raises InputError if they say it wrongly."""
    path = ROOT / "course.toml"
    return read_script_defaults(tomllib.loads(path.read_text("utf-8")).get("scripts", {}) if path.is_file() else {})


def read_script_defaults(table: Mapping[str, object]) -> ScriptDefaults:
    """Return the table `scripts` of course.toml, checked. Raises InputError."""
    rows = table.get("tasks", {})
    if unknown := table.keys() - {*NAMES, "tasks"}:
        raise InputError(f"course.toml: unknown key scripts.{min(unknown)}; expected {', '.join(NAMES)} or tasks.NAME")
    if not isinstance(rows, dict):
        raise InputError(f"course.toml: scripts.tasks: expected a row for each task, such as {EXAMPLE}")
    texts = {name: value for name, value in table.items() if isinstance(value, str) and value}
    if wrong := table.keys() - texts.keys() - {"tasks"}:
        raise InputError(f"course.toml: scripts.{min(wrong)}: expected a text, got {table[min(wrong)]!r}")
    own = {name.lower(): _read_task(f"course.toml: scripts.tasks.{name}", row) for name, row in rows.items()}
    defaults = ScriptDefaults(**texts, tasks=GLUE | own)
    if defaults.task_name.lower() not in defaults.tasks:
        known = ", ".join(defaults.tasks)
        raise InputError(f"course.toml: scripts.task_name: expected one of {known}; got {defaults.task_name!r}")
    return defaults


def _read_task(where: str, row: object) -> GlueTask:
    """Return the columns of a task: names such as `text_a = "review"` or, in files without a header, numbers."""
    if not isinstance(row, dict) or not {"text_a", "label"} <= row.keys() <= set(COLUMNS):
        raise InputError(f"{where}: expected text_a and label, and only keys out of {', '.join(COLUMNS)}; got {row!r}")
    columns = [row[name] for name in ("text_a", "text_b", "label") if name in row]
    if len({type(column) for column in columns}) != 1 or type(columns[0]) not in (str, int):
        raise InputError(f"{where}: expected names of the header, or numbers for all columns; got {columns}")
    labels = row.get("labels", [])
    metrics = row.get("metrics", ["acc"] if labels else ["pearson", "spearmanr"])
    if not all(isinstance(label, str) for label in labels) or not set(metrics) <= set(METRICS):
        raise InputError(f"{where}: expected labels in quotes, and metrics out of {', '.join(METRICS)}; got {row!r}")
    train, dev = (str(row.get(name, f"{name}.tsv")) for name in ("train", "dev"))
    return GlueTask(row["text_a"], row.get("text_b"), row["label"], tuple(labels), tuple(metrics), train, dev)
