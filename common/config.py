"""The flags of the task scripts as frozen dataclasses; arguments.py creates them."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """Where a worker is among the others, and how it reaches them. `rank` is what the flags call --local_rank."""

    rank: int
    rank_on_node: int  # index among the workers of this machine; chooses the GPU
    world_size: int
    master_ip: str
    master_port: int
    backend: str
    no_cuda: bool  # by --no_cuda, or because there are GPUs, but fewer than workers on the machine


@dataclass(frozen=True)
class RunConfig(Place):
    """The flags of every task script."""

    task: str  # the folder of the script, for instance "task1_single"
    output_dir: Path
    overwrite_output_dir: bool
    model_name_or_path: str
    tokenizer_name: str
    data_dir: Path | None  # None: the embedded sample
    learning_rate: float
    weight_decay: float
    adam_epsilon: float
    max_grad_norm: float  # 0: no clipping
    warmup_steps: int
    max_steps: int  # 0: no limit besides the epochs
    dropout: float | None  # None: the model's own
    seed: int
    profile: bool
    timeline: int  # number of steps that --timeline shows; 0 without it
    check_gradients: bool  # compare the first step's gradients with one worker's
    join_seconds: float
    hang_seconds: float


@dataclass(frozen=True)
class GlueConfig(RunConfig):
    """The flags of run_glue.py. Batch sizes are those of one worker."""

    model_type: str
    config_name: str
    task_name: str
    do_train: bool
    do_eval: bool
    do_lower_case: bool
    max_seq_length: int
    per_gpu_train_batch_size: int
    per_gpu_eval_batch_size: int
    num_train_epochs: int
    overwrite_cache: bool

    @property
    def total_batch_size(self) -> int:
        """Examples in one step of all workers together."""
        return self.per_gpu_train_batch_size * self.world_size


@dataclass(frozen=True)
class TrafficConfig(GlueConfig):
    """The flags of task 4's run_glue.py."""

    grad_dtype: str  # fp32, bf16 or fp16: dtype in which gradients are sent
    interface: str  # whose bytes are counted
    link_rate: float | None  # bits per second of a worker's link, to predict with; None: no prediction


@dataclass(frozen=True)
class Gpt2Config(RunConfig):
    """The flags of run_gpt2.py. `batch_size` is the total of all workers."""

    batch_size: int
    n_epochs: int
    model_max_length: int
    pytest: bool  # stop after the first step and keep its gradients in tests/
    model_parallel_mode: str
    n_chunk: int
    schedule: str

    @property
    def num_train_epochs(self) -> int:
        return self.n_epochs


@dataclass(frozen=True)
class Grid:
    """The numbers of ranks along the axes of a grid; their product is the number of ranks."""

    pipeline: int = 1
    data: int = 1
    tensor: int = 1

    @property
    def ranks(self) -> int:
        """The number of ranks of the grid."""
        return self.pipeline * self.data * self.tensor


@dataclass(frozen=True)
class BeyondConfig(Gpt2Config):
    """The flags of beyond/run_gpt2.py. `n_chunk` and `schedule` are for a grid with several stages."""

    strategy: str  # ring, overlap, zero1, zero2, zero3, tensor, 1f1b or grid
    grid: Grid  # for tensor, 1f1b and grid; with the other strategies, all ranks are on the data axis
    bucket_bytes: int  # overlap: the most that a bucket of gradients holds
    save_to: Path | None  # zero1 to zero3: folder for the shards at the end of the run
    resume_from: Path | None  # zero1 to zero3: folder with the shards of an earlier run
    memory_limit_mb: int | None  # for model and training, on each rank; None: no limit
