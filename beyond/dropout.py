"""Dropout in a tensor group: which masks must be equal on its ranks, and which must differ. This code is given.

    embeddings, after the attention, after the MLP    all ranks have the same activations, so the same mask
    inside the attention                              each rank has heads of its own, so a mask of its own

All ranks of a tensor group start from the same seed and draw equally many numbers, so their masks agree. While it
computes the attention, each rank uses a second generator, whose seed no other rank has. Megatron-LM does the same.
"""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

DISTANCE = 2718  # between the seeds of the two generators; more than there are ranks


class OwnHeads:
    """The generator for what only this rank computes. Every rank of a job has another one."""

    def __init__(self, device: torch.device) -> None:
        seed = torch.initial_seed() + DISTANCE + dist.get_rank()
        self.library = torch.cuda if device.type == "cuda" else torch
        self.other = torch.Generator(device).manual_seed(seed).get_state()  # the state that is not in use

    def draw_for(self, attention: "GPT2Attention") -> None:
        """Use this generator between c_attn and c_proj of a GPT2Attention: there, weights of its heads are dropped."""
        attention.c_attn.register_forward_hook(self._swap)
        attention.c_proj.register_forward_pre_hook(self._swap)

    def _swap(self, *_: object) -> None:
        current = self.library.get_rng_state()
        self.library.set_rng_state(self.other)
        self.other = current
