"""What a benchmark run is asked to do, checked and frozen before any worker joins; arguments.py makes it."""

from dataclasses import asdict, dataclass
from pathlib import Path

from benchmark.measure.output import Json
from common.config import RunConfig


@dataclass(frozen=True)
class Settings(RunConfig):
    """A RunConfig and what only the benchmark knows. A step has batch_size * world_size * accumulation examples."""

    strategy: str  # empty where a command has several, each of which replaces it
    model: str  # one of names.MODELS, or a folder
    batch_size: int  # examples of one worker in one forward
    accumulation: int  # forwards and backwards before an optimizer step
    length: int  # tokens of an example
    precision: str  # fp32, bf16 or fp16
    deepspeed_config: Path | None  # instead of benchmark/configs/STRATEGY.json
    cosine: bool
    eval_every: int  # steps; 0: after the last one only
    eval_batches: int
    checkpoint_every: int  # steps; 0: none
    resume: bool
    save: bool
    bleu: bool
    dropped: int  # steps at the beginning that are not measured
    keep_trace: bool
    wandb: bool
    recompute: bool  # the activations of each block in backward, instead of keeping them
    compile: str | None  # torch.compile's backend for each block; None: not compiled
    find_unused_parameters: bool  # ddp: there are parameters that get no gradient
    grid: str | None  # of own_grid, such as data=2,tensor=2
    memory_limit_mb: int | None  # for model and training, on each worker; None: no limit
    bucket_mb: float  # of own_overlap, MiB
    optimizer: str  # adamw, or sgd, whose update is the gradient: the proof reads it there

    @property
    def examples_per_step(self) -> int:
        return self.batch_size * self.world_size * self.accumulation

    def as_json(self) -> Json:
        """Everything, as JSON has it."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
