"""DeepSpeed's ZeRO (Rajbhandari et al. 2020) behind the benchmark's Engine: stages 0 to 3, with and without offload.

Stage 1 shards the optimizer's states over the workers, 2 the gradients too, 3 the parameters too.
"""

import contextlib
import io
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.utils import clip_grad_norm_
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.logging import logger
from torch import Tensor, nn

from benchmark.engines.deepspeed_config import deepspeed_config
from benchmark.engines.engine import HALF, Engine
from benchmark.settings import Settings
from common.optim import weight_decay_groups
from common.workers.process_group import Worker

logger.setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="deepspeed")
warnings.filterwarnings("ignore", message="Full backward hook")


class DeepSpeed(Engine):
    """A DeepSpeedEngine: it wraps the model, makes the optimizer, clips and steps by itself."""

    model: deepspeed.DeepSpeedEngine
    optimizer: Any  # one of DeepSpeed's own, or torch's

    def __init__(self, stage: int, offload: bool, settings: Settings, worker: Worker, model: nn.Module) -> None:
        self.settings, self.worker, self.stage, self.offload = settings, worker, stage, offload
        self.name = f"zero{stage}" + ("_offload" if offload else "")
        os.environ.setdefault("LOCAL_RANK", str(worker.device.index or 0))
        self.model = self.wrap(model)
        self.bare = self.model.module
        self.model.clip_fp32_gradients = self._clip_whole
        # In half precision, stage 0 makes the optimizer's states by a step with gradients of zero. It decays the
        # weights, and AdamW would count it: the first real update would be 0.74 times as large.
        for parameter, copy in self._masters().items():
            copy.data.copy_(parameter.data)
            self.optimizer.optimizer.state.clear()
        self.half = contextlib.nullcontext  # type: ignore[method-assign]  # its weights are in half precision already

    def wrap(self, model: nn.Module) -> deepspeed.DeepSpeedEngine:
        """A DeepSpeedEngine, which makes the optimizer as well."""
        with contextlib.redirect_stdout(io.StringIO()):  # its operators "built successfully", on every worker
            engine, self.optimizer, _, _ = deepspeed.initialize(
                model=model,
                model_parameters=weight_decay_groups(model, self.settings.weight_decay),
                config=deepspeed_config(self.settings, self.name, on_gpu=self.worker.device.type == "cuda"),
                dist_init_required=False,
            )
        return engine

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss

    def backward(self, loss: Tensor, last: bool) -> Tensor:
        self.model.set_gradient_accumulation_boundary(last)
        self.model.backward(loss)  # divides by the accumulation, and averages over the workers at the boundary
        return loss.detach()

    def step(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.norm = None
        self.model.step()
        if self.settings.max_grad_norm and self.norm is None:
            self.norm = self.model.get_global_grad_norm()

    def _clip_whole(self) -> None:
        """DeepSpeed's clip of stage 0 in fp32, which drops the norm."""
        self.norm = clip_grad_norm_(self.bare.parameters(), self.settings.max_grad_norm)

    def sent_dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        half = HALF.get(self.settings.precision, torch.float32)
        return half, half  # communication_data_type

    def full_parameters(self) -> dict[str, Tensor]:
        if self.stage < 3 and self.settings.precision == "fp32":
            return super().full_parameters()
        # A collective for stage 3: every worker has to call it for every parameter, in the same order.
        gathered, whole = {}, self._masters()
        for name, parameter in self.bare.named_parameters():
            full = whole[parameter] if parameter in whole else safe_get_full_fp32_param(parameter)
            full = parameter if full is None else full  # a frozen one has no fp32 copy
            if self.worker.is_first:
                gathered[name] = full.detach().cpu().clone()
        return gathered

    def _masters(self) -> dict[nn.Parameter, Tensor]:
        """The fp32 copies of stage 0 in half precision, by parameter: no function of DeepSpeed's gives them."""
        if self.stage or self.settings.precision == "fp32":
            return {}
        pairs = zip(self.optimizer.fp16_groups, self.optimizer.fp32_groups, strict=True)
        return {parameter: copy for halves, copies in pairs for parameter, copy in zip(halves, copies, strict=True)}

    def save(self, folder: Path) -> None:
        self.model.save_checkpoint(str(folder), tag="state", save_latest=False)

    def load(self, folder: Path) -> None:
        found, _ = self.model.load_checkpoint(str(folder), tag="state", load_module_strict=True)
        if found is None:
            raise FileNotFoundError(f"{folder}/state")
