"""The names of strategies and models. Apart from what they name, so that a sweep checks its flags without torch."""

STRATEGIES = (
    "single",
    "dp",
    "ddp",
    "fsdp",
    "zero0",
    "zero1",
    "zero2",
    "zero3",
    "zero1_offload",
    "zero2_offload",
    "zero3_offload",
    "pipeline",
    "tensor",
    "own_ring",
    "own_overlap",
    "own_zero1",
    "own_zero2",
    "own_zero3",
    "own_tensor",
    "own_1f1b",
    "own_grid",
)
MODELS = ("gpt2", "gpt2-tiny", "gpt2-24m", "t5-tiny", "t5-small", "t5-large", "t5-3b", "t5-11b")
