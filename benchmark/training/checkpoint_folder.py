"""Checkpoints that a run can go on from as if nothing had happened, and that are whole or not there.

    checkpoints/step-00000010/    what the engine writes, rng_{rank}.pt, and manifest.json: step, losses, flags

Workers write into a hidden folder, which the first one renames when all are done. An older checkpoint goes when a newer
one is complete.
"""

import json
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from benchmark.engines.engine import Engine
from benchmark.measure.output import Json
from benchmark.settings import Settings
from benchmark.workers import of_everybody
from common.errors import InputError

# What must be the same for the continued run to be the same run.
IDENTITY = ("strategy", "model", "world_size", "batch_size", "accumulation", "length", "precision", "seed")
BROKEN = (OSError, ValueError, KeyError, RuntimeError, EOFError, pickle.UnpicklingError, CheckpointException)


def save(folder: Path, step: int, engine: Engine, losses: list[float]) -> None:
    """Keep the state after `step` steps. Raises InputError if it cannot be written. All workers call it together."""
    worker, final, partial = engine.worker, folder / f"step-{step:08d}", folder / f".step-{step:08d}.partial"
    if worker.is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    error = ""
    try:
        quietly(engine.save, partial)
        gpu = torch.cuda.get_rng_state(worker.device) if worker.device.type == "cuda" else None
        torch.save({"cpu": torch.get_rng_state(), "gpu": gpu}, partial / f"rng_{worker.rank}.pt")
        if worker.is_first:
            manifest = {"step": step, "losses": losses, **_identity(engine.settings)}
            (partial / "manifest.json").write_text(json.dumps(manifest))
    except BROKEN as broken:
        error = _short(broken)
    errors = of_everybody(error, worker)  # all stop, or none: nobody may wait for one that failed
    if message := next(filter(None, errors), ""):
        shutil.rmtree(partial, ignore_errors=True)
        free = shutil.disk_usage(folder).free / 1e6
        raise InputError(
            f"cannot write checkpoint {final}: {message} ({free:.0f} MB free); make room or use --output_dir"
        )
    if worker.is_first:
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in {*folder.glob("step-*")} - {final}:
            shutil.rmtree(old, ignore_errors=True)


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
        was = {name: manifest[name] for name, value in _identity(engine.settings).items() if manifest[name] != value}
        if not was:
            quietly(engine.load, newest)
            states = torch.load(newest / f"rng_{engine.worker.rank}.pt")
    except BROKEN as error:
        raise InputError(
            f"checkpoint {newest} is corrupt or incomplete ({_short(error)}); delete this folder"
        ) from error
    if was:
        words = ", ".join(f"{name} {value}" for name, value in was.items())
        raise InputError(f"checkpoint {newest} was written with {words}; use the same flags, or another --output_dir")
    torch.set_rng_state(states["cpu"])
    if states["gpu"] is not None:
        torch.cuda.set_rng_state(states["gpu"], engine.worker.device)
    return manifest["step"], manifest["losses"]


def quietly(action: Callable[[Path], None], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        action(folder)


def _identity(settings: Settings) -> Json:
    return {name: getattr(settings, name) for name in IDENTITY}


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
