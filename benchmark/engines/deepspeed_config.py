"""DeepSpeed's configuration files (configs/zero*.json), and what the command line sets in them for a fair comparison.

The files are complete: `deepspeed --deepspeed_config` takes them as they are. In a benchmark run the batch sizes,
precision, clipping and optimizer come from the command line, because they must be the same for every strategy; in a
file of the user's own a value that says something else is an error, so that nobody measures what he did not ask for.
"""

import json
from pathlib import Path

from benchmark.measure.output import Json
from benchmark.settings import Settings
from common.errors import InputError

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
BETAS = [0.9, 0.999]


def read_config(path: Path) -> dict:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"--deepspeed_config: cannot read {path} ({error}); expected a DeepSpeed JSON file") from error
    if not isinstance(config, dict):
        raise InputError(f"--deepspeed_config: {path}: expected a JSON object")
    return config


def shared(settings: Settings, offload: bool) -> dict:
    """What is equal for every strategy, in DeepSpeed's words."""
    adam = {
        "lr": settings.learning_rate,
        "betas": BETAS,
        "eps": settings.adam_epsilon,
        "weight_decay": settings.weight_decay,
    }
    config: Json = {
        "train_batch_size": settings.examples_per_step,
        "train_micro_batch_size_per_gpu": settings.batch_size,
        "gradient_accumulation_steps": settings.accumulation,
        "gradient_clipping": settings.max_grad_norm,  # DeepSpeed's own default is 1.0
        # torch's optimizers, as everywhere else. An offloaded AdamW is DeepSpeed's own, vectorised for CPUs.
        "optimizer": {"type": "AdamW", "params": adam if offload else adam | {"torch_adam": True}},
        "bf16": {"enabled": settings.precision == "bf16"},
        "fp16": {"enabled": settings.precision == "fp16"},
        "steps_per_print": 10**9,
    }
    if settings.optimizer == "sgd":
        config["optimizer"] = {"type": "SGD", "params": {"lr": settings.learning_rate}}
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return config


def deepspeed_config(settings: Settings, strategy: str, on_gpu: bool) -> dict:
    """The file's configuration with the shared values. Ours are for GPUs; a CPU has no streams and nothing to pin."""
    config = read_config(settings.deepspeed_config or CONFIGS / f"{strategy}.json")
    zero = config.get("zero_optimization", {})
    if not (on_gpu or settings.deepspeed_config):
        zero |= {"overlap_comm": False} if "overlap_comm" in zero else {}
        for name in ("offload_optimizer", "offload_param"):
            zero |= {name: zero[name] | {"pin_memory": False}} if name in zero else {}
    if settings.optimizer == "sgd" and zero.get("stage") == 3:  # the proof: a small model is gathered, too
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return config | shared(settings, offload=strategy.endswith("_offload"))


def contradiction(settings: Settings, stage: int, offload: bool) -> str:
    """What a --deepspeed_config says that the command line does not, in one line; empty if there is nothing."""
    if settings.deepspeed_config is None:
        return ""
    config = read_config(settings.deepspeed_config)
    if (stage_of_file := config.get("zero_optimization", {}).get("stage", 0)) != stage:
        return f"--deepspeed_config: expected stage {stage} for {settings.strategy}, the file has {stage_of_file}"
    file, expected = flat(config), flat(shared(settings, offload))
    for name in sorted(file.keys() & expected.keys()):
        if file[name] not in (expected[name], "auto"):
            words = f"{name} is {file[name]} in the file, but {expected[name]} by the command line"
            return f"--deepspeed_config: {words}; change one of them"
    return ""


def flat(values: dict, path: str = "") -> Json:
    """Return the values of nested objects by their paths, such as optimizer.params.lr."""
    found: Json = {}
    for name, value in values.items():
        found |= flat(value, f"{path}{name}.") if isinstance(value, dict) else {path + name: value}
    return found
