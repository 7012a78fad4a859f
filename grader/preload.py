"""What the zygote loads before it forks ranks, in the order of need: a probe of torch alone does not wait for models.

A rank whose probe needs more than its level has loaded imports it itself, in its own time: a level that is too low here
costs seconds, and changes no result.
"""

import gc
import importlib
import sys

LEVELS = (
    ("torch.utils.data", "grader.probes"),
    # What a task script imports at its top, directly or through common/: 0.8 s.
    ("transformers.modeling_outputs", "huggingface_hub.errors", "safetensors", "tokenizers", "tqdm.auto"),
    # What training a model imports on its way: 3.5 s.
    (
        "torch._dynamo",  # any optimizer imports it at its first step, 1.7 s in each rank
        "transformers.models.bert.modeling_bert",
        "transformers.models.bert.tokenization_bert",
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.gpt2.tokenization_gpt2",
        "transformers.models.auto.modeling_auto",
        "transformers.models.auto.tokenization_auto",
        "transformers.optimization",
        "sklearn.metrics",
    ),
)
TORCH, SCRIPTS, MODELS = range(len(LEVELS))
# Every other probe trains, or builds a model.
LEVEL_OF_PROBES = {
    "grader.probes_data": TORCH,
    "grader.probes_pipeline": TORCH,
    "grader.probes_sync": SCRIPTS,
    "grader.probes_traffic": SCRIPTS,
}
LEVEL_OF_FILES = {
    "common/data_partition.py": TORCH,
    "common/schedule.py": TORCH,
    "pipeline/partition.py": TORCH,
    "pipeline/pipe.py": TORCH,
    "pipeline/model_parallel.py": MODELS,
}


def level_of(probe: str, file: str) -> int:
    """The level that a run of this probe on this file of the tree needs."""
    if probe == "grader.probes:load":  # what every graded test begins with: only the file matters
        return LEVEL_OF_FILES.get(file, SCRIPTS)
    return LEVEL_OF_PROBES.get(probe.partition(":")[0], MODELS)


def load(level: int) -> None:
    """Import what a level names, and keep the collector from copying it in every rank."""
    sys.modules["pandas"] = None  # type: ignore[assignment]  # sklearn would import it: 60 MiB and a thread of arrow's
    for name in LEVELS[level]:
        importlib.import_module(name)
    del sys.modules["pandas"]
    gc.collect()
    gc.freeze()  # a collection in a rank would otherwise copy every page it shares with the zygote
