"""Saves and loads checkpoints with a student's functions; sent to ranks as source, see grader/in_rank.py."""

from __future__ import annotations

import os
import signal
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, copy_of


def make_state(context: Context, saved: dict[str, Any]) -> Any:
    """Return the state of one save: its shards are views of the whole tensors, which is zero elsewhere."""
    from beyond.storage import State

    shards = {}
    for name, shard in saved["shards"].items():
        parts = torch.zeros(context.world_size, len(shard), dtype=shard.dtype)
        parts[context.rank] = shard
        shards[name] = parts[context.rank]
    return State(saved["step"], shards, dict(saved["lengths"]), dict(saved["data"]))


def save_one(context: Context, lesson: ModuleType, storage: int, saved: dict[str, Any]) -> str:
    """Save a state, and note it; return the OSError that save raises."""
    try:
        lesson.save(context.storage(storage), make_state(context, saved))
    except OSError as error:
        return f"OSError: {error}"
    context.event(f"saved {storage}")
    return ""


def load_one(context: Context, lesson: ModuleType, storage: int) -> dict[str, Any]:
    """Return what load returns: `kind` says whether it is a state, None, an error, or something else."""
    from beyond.storage import State

    try:
        state = lesson.load(context.storage(storage))
    except NotImplementedError:
        raise  # the region is not written
    except Exception as error:  # whatever a student's load raises: the grader judges it, and looks at the next state
        return {"kind": f"{type(error).__name__}: {error}"[:200], "step": -1}
    if not isinstance(state, State):
        return {"kind": "None" if state is None else f"a {type(state).__name__}", "step": 0}
    shards = {name: copy_of(shard) for name, shard in state.shards.items()}
    return {"kind": "a State", "step": state.step, "shards": shards, "lengths": state.lengths, "data": state.data}


def make_job(context: Context, fault: dict[str, Any] | None) -> Any:
    """Return the small job. It notes the examples of each step, and has a fault in one of them."""
    from beyond.small_job import SmallJob

    class Job(SmallJob):
        steps = 0

        def gradient(self, values: torch.Tensor, examples: list[int]) -> torch.Tensor:
            context.event("gradient", examples=list(examples))
            self.steps += 1
            if fault and fault["in_step"] == self.steps:
                if fault["kind"] == "signal":
                    signal.raise_signal(signal.SIGTERM)
                elif fault["kind"] == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                else:
                    raise ValueError("an example that cannot be used")
            return super().gradient(values, examples)

    return Job(context.arguments["seed"])
