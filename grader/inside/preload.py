"""Loads modules in the zygote before it forks ranks: first what all ranks need, the rest before the first run with it.

A rank that needs more imports it itself, which costs seconds in each rank.
"""

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator

FIRST = "torch"
GROUPS = {
    FIRST: ("torch.utils.data", "numpy.random", "grader.inside.run_source"),
    # Any optimizer imports it at its first step, and so does a backward of one's own: 1.5 s in each rank.
    "steps": ("torch._dynamo",),
    # What a script imports at its top, directly or through common/: 0.8 s.
    "scripts": (
        "transformers.modeling_outputs",
        "transformers.optimization",
        "huggingface_hub.errors",
        "multiprocessing.synchronize",
        "psutil",
        "safetensors.torch",
        "statistics",
        "tokenizers",
        "tqdm.auto",
    ),
    # What correlation coefficients import: 1 s.
    "correlations": ("scipy.stats",),
    # What building a model and reading its files import: 2 s more.
    "models": (
        "transformers.models.bert.modeling_bert",
        "transformers.models.bert.tokenization_bert",
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.gpt2.tokenization_gpt2",
        "transformers.models.auto.modeling_auto",
        "transformers.models.auto.tokenization_auto",
    ),
}
# What scripts import of common/, with all that these modules import; none of them imports a file with a region.
COMMON = (
    "common.arguments", "common.data.glue", "common.data.oscar", "common.evaluation", "common.models.fit",
    "common.models.load", "common.record",
)  # fmt: skip


def _compile_patterns() -> None:
    """Compile the 900 patterns that every process needs for its first model: 0.1 s, once here for all ranks."""
    with contextlib.suppress(ImportError, AttributeError):  # a version that has them elsewhere: each rank compiles them
        importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("bert")


def _record_something() -> None:
    """Import what the first record_function of a process imports, which every optimizer step calls: once here for all
    ranks. Where Python's compiled files are missing, it would also take 4 MB in each."""
    with importlib.import_module("torch.profiler").record_function("preload"):
        pass


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Pause the garbage collector during imports: it takes a sixth of their time.

    Afterwards it skips what is there: a collection in a rank would copy every page it shares with the zygote.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def load(group: str) -> None:
    """Import the modules of a group."""
    with without_collections():
        for name in GROUPS[group]:
            importlib.import_module(name)
        if group == FIRST:
            importlib.import_module("grader.inside.refusals").install()
        if group == "steps":
            _record_something()
        if group == "models":
            _compile_patterns()


def load_common(tree: str) -> None:
    """Import what scripts import of a tree's common/, which must be as it was given out: no line that a student may
    change runs in the zygote. So a whole hand-in takes a fifth less CPU time than with an import in each rank."""
    sys.path.append(tree)
    try:
        with without_collections():
            for name in COMMON:
                importlib.import_module(name)
    except Exception:  # the ranks will say why
        forget_common()
    finally:
        sys.path.remove(tree)


def forget_common() -> None:
    """Remove these modules, for a rank of another tree: it imports its own."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "common"]:
        del sys.modules[name]
