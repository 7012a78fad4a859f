"""Model FLOPs utilisation (Chowdhery et al. 2022, PaLM, appendix B): the model's own arithmetic over the GPUs' peak."""

from benchmark.names import is_own
from benchmark.settings import Settings

# Dense peak in TFLOP/s by the vendor's data sheets: float32 without TF32, which torch leaves off; bf16 and fp16.
PEAKS = {
    "B200": (75, 2250),
    "H200": (67, 989),
    "H100 PCIe": (51, 756),
    "H100": (67, 989),
    "A100": (19.5, 312),
    "L40S": (91.6, 362),
    "A10": (31.2, 125),
    "V100": (15.7, 125),
    "T4": (8.1, 65),
}


def peak_flops(gpu: str | None, precision: str) -> float | None:
    """Multiplications and additions that a GPU can do in a second; None for a GPU that is not in the table."""
    words = set((gpu or "").replace("-", " ").split())  # whole words: an A10G is no A10
    names = [name for name in PEAKS if words.issuperset(name.split())]
    return PEAKS[names[0]][precision != "fp32"] * 1e12 if names else None


def utilisation(settings: Settings, examples_per_second: float, gpu: str | None) -> float | None:
    """A backward does twice the arithmetic of a forward. gpu: its name. None on a CPU, and for a user's own model."""
    from benchmark.measure.architecture import describe  # here: it loads transformers

    peak = None if settings.no_cuda else peak_flops(gpu, settings.precision)
    if peak is None or is_own(settings.model):
        return None
    flops = 3 * describe(settings.model, settings.length).flops
    return examples_per_second * flops / (settings.world_size * peak)
