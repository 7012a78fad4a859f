"""What a run says while it trains: losses and validations, for TensorBoard and, with --wandb, for Weights & Biases."""

import os
import warnings
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from benchmark.settings import Settings
from common.paths import atomic_write
from common.workers.process_group import Worker

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter
    from wandb import Run


class Log:
    """Losses and evaluations; only the first worker writes. means: of the losses of all workers, see agree()."""

    def __init__(self, settings: Settings, worker: Worker) -> None:
        self.settings, self.worker, self.is_first = settings, worker, worker.is_first
        self.losses: list[float] = []
        self.means: list[float] = []
        self.evaluations: list[dict] = []
        self._board = _tensorboard(settings) if self.is_first else None
        self._wandb = _wandb(settings) if self.is_first and settings.wandb else None

    def restart(self, losses: list[float]) -> None:
        """The losses of the run that is continued."""
        self.losses, self.means = list(losses), list(losses)

    def agree(self) -> list[float]:
        """The mean of all workers' losses, step by step, also written. A collective."""
        fresh = torch.tensor(self.losses[len(self.means) :], dtype=torch.float64, device=self.worker.device)
        dist.all_reduce(fresh)
        for mean in (fresh / self.worker.world_size).tolist():
            self.means.append(mean)
            self._write(len(self.means), {"train/loss": mean})
        return self.means

    def loss(self, step: int, loss: float, rate: float, times: list[dict[str, float]]) -> None:
        """A step's loss and learning rate, and the seconds of the step before, if there was one.

        This worker's loss can be watched at once; for the mean of all, see agree(), the others have to be asked.
        """
        self.losses.append(loss)
        values = {"train/loss_of_first_worker": loss, "train/learning_rate": rate}
        if times:
            values["train/seconds"] = times[-1]["wall"]
        self._write(step + 1, values)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        if metrics:
            self.evaluations.append({"step": step, **metrics})
            self._write(step, {f"validation/{name}": value for name, value in metrics.items()})

    def close(self) -> None:
        if self._board:
            self._board.close()
            with atomic_write(self.settings.output_dir / "losses.txt") as file:
                file.writelines(f"{loss!r}\n" for loss in self.means)
        if self._wandb:
            self._wandb.finish()

    def _write(self, step: int, values: dict[str, float]) -> None:
        if self._board:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
        if self._wandb:
            self._wandb.log({"step": step, **values})


def _tensorboard(settings: Settings) -> "SummaryWriter":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter(str(settings.output_dir / "tensorboard"))


def _wandb(settings: Settings) -> "Run":
    """A run that stays on this machine, unless WANDB_MODE says otherwise: `wandb sync` sends it later."""
    os.environ.setdefault("WANDB_MODE", "offline")
    import wandb  # here: arguments.py has looked for it where --wandb was given

    run = wandb.init(
        project="benchmark", dir=str(settings.output_dir), name=settings.strategy, config=settings.as_json()
    )
    run.define_metric("*", step_metric="step")  # means of losses follow later than the rest of their step
    return run
