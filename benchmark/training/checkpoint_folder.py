"""Checkpoints that a run can go on from as if nothing had happened, and that are whole or not there.

    checkpoints/step-00000010/    what the engine writes, rng_{rank}.pt, and manifest.json: step, losses, flags

Workers write into a hidden folder, which the first one renames when all are done. An older checkpoint goes when a newer
one is complete.
"""

import json
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from benchmark.engines.engine import Engine
from benchmark.settings import Settings
from common.errors import InputError

# What must be the same for the continued run to be the same run.
IDENTITY = ("strategy", "model", "world_size", "batch_size", "accumulation", "length", "precision", "seed")


def save(folder: Path, step: int, engine: Engine, losses: list[float]) -> None:
    """Keep the state after `step` steps. Raises InputError if it cannot be written. All workers call it together."""
    worker = engine.worker
    final = folder / f"step-{step:08d}"
    partial = folder / f".step-{step:08d}.partial"
    if worker.is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    error = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.save(partial)
        torch.save(_random_states(worker.device), partial / f"rng_{worker.rank}.pt")
    except (OSError, RuntimeError, CheckpointException) as problem:
        error = _reason(problem, partial)
    errors: list[Any] = [None] * worker.world_size
    dist.all_gather_object(errors, error)  # all stop, or none: nobody may wait for one that failed
    if worker.is_first and not any(errors):
        errors[0] = _finish(partial, final, {"step": step, "losses": losses, **_identity(engine.settings)})
    dist.broadcast_object_list(errors, src=0)
    if any(errors):
        shutil.rmtree(partial, ignore_errors=True)
        free, message = shutil.disk_usage(folder).free / 1e6, next(error for error in errors if error)
        raise InputError(
            f"cannot write checkpoint {final}: {message} ({free:.0f} MB free); make room or use --output_dir"
        )


def load(folder: Path, engine: Engine) -> tuple[int, list[float]]:
    """The newest checkpoint's step and losses so far, its state in `engine`; (0, []) where there is none.

    Raises InputError if it is damaged, or belongs to another run.
    """
    checkpoints = sorted(folder.glob("step-*"))
    if not checkpoints:
        return 0, []
    newest = checkpoints[-1]
    try:
        manifest = json.loads((newest / "manifest.json").read_text())
        different = [name for name, value in _identity(engine.settings).items() if manifest[name] != value]
        if not different:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                engine.load(newest)
            states = torch.load(newest / f"rng_{engine.worker.rank}.pt")
    except (
        OSError,
        ValueError,
        KeyError,
        RuntimeError,
        EOFError,
        pickle.UnpicklingError,
        CheckpointException,
    ) as error:
        reason = " ".join(str(error).split())[:160]
        raise InputError(f"checkpoint {newest} is corrupt or incomplete ({reason}); delete this folder") from error
    if different:
        was = ", ".join(f"{name} {manifest[name]}" for name in different)
        raise InputError(f"checkpoint {newest} was written with {was}; use the same flags, or another --output_dir")
    torch.set_rng_state(states["cpu"])
    if states["gpu"] is not None:
        torch.cuda.set_rng_state(states["gpu"], engine.worker.device)
    return manifest["step"], manifest["losses"]


def _finish(partial: Path, final: Path, manifest: dict) -> str:
    """Rename, and away with older ones; what went wrong, or nothing."""
    try:
        (partial / "manifest.json").write_text(json.dumps(manifest))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in final.parent.glob("step-*"):
            if old != final:
                shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _identity(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in IDENTITY}


def _random_states(device: torch.device) -> dict[str, Any]:
    return {"cpu": torch.get_rng_state(), "gpu": torch.cuda.get_rng_state(device) if device.type == "cuda" else None}


def _reason(error: BaseException, folder: Path) -> str:
    """What went wrong, in the system's words: torch's own only say that a file is shorter than it should be."""
    try:
        with open(folder / ".probe", "wb") as probe:
            probe.write(bytes(2**20))
    except OSError as full:
        return full.strerror or str(full)
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
