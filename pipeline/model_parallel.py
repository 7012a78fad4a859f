"""GPT-2 spread over several devices: one after another (model parallel), or as a pipeline (region p.5).

    tokens ─> wte + wpe ─> blocks of device 0 ─> ... ─> blocks of the last device ─> ln_f ─> lm_head (wte again) ─> loss
              device 0                                                               last    device 0

The embedding and the head share one weight matrix, so both stay on the first device, and only the blocks are spread.

Letters: B batch, T tokens, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from common.errors import InputError
from pipeline.partition import WithDevice
from pipeline.pipe import Pipe


class GPT2BlockCustom(GPT2Block):
    """A GPT-2 block that takes and returns one tensor, so that a Sequential can hold it.

    Each example of a micro-batch needs its own attention mask in every block. So the mask is appended to the hidden
    states as T more columns: x is (B, T, D), or (B, T, D + T) if there is a mask.
    """

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        hidden, mask = _unpack(x, self.attn.embed_dim)
        if mask is None:
            return super().forward(hidden)
        is_additive = self.attn.config._attn_implementation == "eager"  # the others expect True where to attend
        attention_mask = mask.unsqueeze(1)  # (B, 1, T, T)
        hidden = super().forward(hidden, attention_mask=attention_mask if is_additive else attention_mask > 0)
        return _pack(hidden, mask)


def _pack(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """(B, T, D) and (B, T, T) or nothing -> (B, T, D + T) or (B, T, D)."""
    return hidden if mask is None else torch.cat([hidden, mask.to(hidden)], dim=-1)


def _unpack(x: Tensor, hidden_size: int) -> tuple[Any, Tensor | None]:
    """Return what was given to _pack."""
    if x.shape[-1] == hidden_size:
        return x, None
    hidden, mask = x.split([hidden_size, x.shape[-1] - hidden_size], dim=-1)
    return hidden, mask


class GPT2ModelCustom(GPT2Model):
    """GPT-2 without its head.

    Its blocks `.h` are on one or more devices, which work one after another. The model keeps no cache.
    """

    def __init__(self, config: GPT2Config) -> None:
        super(GPT2Model, self).__init__(config)  # not GPT2Model's, which would first create its own blocks
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(GPT2BlockCustom(config, layer_idx=i) for i in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.gradient_checkpointing = False
        self._labels: list[torch.device] | None = None
        self.post_init()

    @property
    def block_devices(self) -> list[torch.device]:
        """Return the device (or label) of every block of `.h`."""
        return self._labels or [next(block.parameters()).device for block in self.h]

    def parallelize(self, devices: Sequence[torch.device | str]) -> None:
        """Distribute the blocks evenly over `devices`, in order. cpu:0, cpu:1 are labels: torch has only one CPU.

        Raises InputError if there is no device, or if there are more devices than blocks.
        """
        count, n_layer = len(devices), len(self.h)
        if not 1 <= count <= n_layer:
            raise InputError(f"expected 1 to {n_layer} devices for {n_layer} blocks, got {count}")
        self._labels = [torch.device(devices[i * count // n_layer]) for i in range(n_layer)]
        for block, device in zip(self.h, self._labels, strict=True):
            block.to(device)
        for module in (self.wte, self.wpe):
            module.to(self._labels[0])
        self.ln_f.to(self._labels[-1])

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> BaseModelOutput:
        """input_ids (B, T), attention_mask (B, T) with 0 at padding -> last_hidden_state (B, T, D) on the last device.

        position_ids (B, T) or (1, T).
        """
        first = self.wte.weight.device
        hidden = self.wte(input_ids.to(first))  # (B, T, D)
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1]).unsqueeze(0)
        position_ids = position_ids.to(first)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=None if attention_mask is None else attention_mask.to(first),
            past_key_values=None,
            position_ids=None,
        )  # (B, 1, T, T), or None if plain causal attention is enough
        if mask is not None:
            assert isinstance(mask, Tensor), "flex attention describes its mask in another form"
            mask = mask.squeeze(1).expand(len(hidden), -1, -1)
        x = self._through_blocks(_pack(self.drop(hidden + self.wpe(position_ids)), mask))
        return BaseModelOutput(last_hidden_state=self.ln_f(_unpack(x, self.config.n_embd)[0]))

    def _through_blocks(self, x: Tensor) -> Tensor:
        """Pass x through all blocks: while one device works, the others wait."""
        device = x.device
        for block, block_device in zip(self.h, self.block_devices, strict=True):
            if block_device != device:
                x, device = x.to(block_device), block_device
            x = block(x)
        return x


class GPT2ModelParallel(GPT2ModelCustom):
    """GPT-2 without its head, whose blocks can work as a pipeline: `.h_pp` is the Pipe."""

    h_pp: Pipe | None

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.pipeline_parallel = False
        self.h_pp = None

    def __setattr__(self, name: str, value: Any) -> None:
        # The Pipe is not registered as a submodule: its layers are those of self.h, and would be saved twice.
        if name == "h_pp":
            self.__dict__["h_pp"] = value
        else:
            super().__setattr__(name, value)

    def _prepare_pipeline_parallel(self, split_size: int = 1) -> None:
        """Make a pipeline of the blocks, with split_size examples per micro-batch. Call parallelize first.

        Steps
        [1] Wrap every block of self.h in WithDevice, with its device from self.block_devices.
        [2] Put them into one nn.Sequential, in order.
        [3] Make a Pipe of it, with split_size, and keep it as self.h_pp.
        [4] Set self.pipeline_parallel: without it, the blocks still work one after another.
        """
        # TODO(cos598d) p.5: make self.h_pp, a Pipe of the labelled blocks, and switch to it (4 lines)
        # BEGIN SOLUTION p.5
        labelled = [WithDevice(block, device) for block, device in zip(self.h, self.block_devices, strict=True)]
        self.h_pp = Pipe(nn.Sequential(*labelled), split_size)
        self.pipeline_parallel = True
        # END SOLUTION p.5

    def _through_blocks(self, x: Tensor) -> Tensor:
        if self.pipeline_parallel and self.h_pp is not None:
            return self.h_pp(x)
        return super()._through_blocks(x)


class GPT2LMHeadModelParallel(GPT2LMHeadModel):
    """GPT-2 with its language-model head; the same weights and names as transformers' GPT2LMHeadModel."""

    transformer: GPT2ModelParallel

    def __init__(self, config: GPT2Config) -> None:
        super(GPT2LMHeadModel, self).__init__(config)
        self.transformer = GPT2ModelParallel(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.loss_type = "ForCausalLM"  # which transformers would guess, with a warning
        self.post_init()

    def parallelize(self, devices: Sequence[torch.device | str]) -> None:
        """Distribute the blocks over `devices`; see GPT2ModelCustom.parallelize."""
        self.transformer.parallelize(devices)
        self.lm_head.to(self.transformer.wte.weight.device)  # the same matrix

    def _prepare_pipeline_parallel(self, split_size: int = 1) -> None:
        """Make a pipeline of the blocks; see GPT2ModelParallel._prepare_pipeline_parallel."""
        self.transformer._prepare_pipeline_parallel(split_size)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **inputs: object) -> CausalLMOutput:
        """input_ids (B, T), labels (B, T) with -100 where no loss is wanted -> loss, logits (B, T, V).

        The loss is computed over the whole batch, so micro-batches of unequal size have the right weight.
        """
        hidden = self.transformer(input_ids, **inputs).last_hidden_state
        logits = self.lm_head(hidden.to(self.lm_head.weight.device))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)
