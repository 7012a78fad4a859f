# ruff: noqa: N801 (their names are words of the command line)
"""Engines that are wrong on purpose, each in one place, and what benchmark.prove has to say about them on two workers.

python -m benchmark.prove --engine staff/tests/benchmark/broken_engines.py:doubled,stale
"""

from collections.abc import Callable
from types import MethodType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2LMHeadModel

from benchmark.engines.ddp import DDP
from benchmark.engines.engine import Engine, optimizer_class
from benchmark.engines.fsdp import FSDP
from benchmark.engines.own import OwnOverlap, OwnRing, OwnZero1, OwnZero2, OwnZero3
from benchmark.engines.pipeline import Pipeline
from benchmark.settings import Settings
from benchmark.training.own_model import blocks
from common.optim import weight_decay_groups
from common.workers.process_group import Worker

MATRIX, BIAS, NORM, TIED = "h.1.mlp.c_fc.weight", "h.1.mlp.c_fc.bias", "h.0.ln_1.weight", "wte.weight"


class Averaging(Engine):
    """A right engine whose parts are easily replaced: it averages each gradient after the last backward of a step."""

    def backward(self, loss: Tensor, last: bool) -> Tensor:
        value = super().backward(loss, last)
        if last:
            for name, parameter in self.bare.named_parameters():
                if parameter.grad is not None:
                    self.average(name.removeprefix("model.").removeprefix("transformer."), parameter.grad)
        return value

    def average(self, name: str, gradient: Tensor) -> None:
        dist.all_reduce(gradient)
        gradient /= self.worker.world_size


class Gathering(Averaging):
    """A right engine that sums nothing on its way: every worker gathers all gradients, and takes their mean."""

    def average(self, name: str, gradient: Tensor) -> None:
        everybody = [torch.empty_like(gradient) for _ in range(self.worker.world_size)]
        dist.all_gather(everybody, gradient)
        gradient.copy_(torch.stack(everybody).mean(dim=0))


WRONG: dict[str, tuple[str, str]] = {}  # name -> what the proof says, as a pattern; the precision that shows it


def wrong(says: str, precision: str = "fp32") -> Callable[[type], type]:
    """Note what the proof has to say about a class."""

    def note(engine: type) -> type:
        WRONG[engine.__name__] = (says, precision)
        return engine

    return note


def changed(name: str, base: type, says: str, precision: str = "fp32", **methods: Callable) -> type:
    """An engine that is `base` but for these methods."""
    return wrong(says, precision)(type(name, (base,), methods))


def scaled(name: str, base: type[Engine], factor: float, says: str, only: str = "", precision: str = "fp32") -> type:
    """An engine that multiplies gradients by a factor before its step: all of them, or those of one parameter."""

    def step(self: Engine, rate: float) -> None:
        for full_name, parameter in self.bare.named_parameters():
            if full_name.endswith(only) and parameter.grad is not None:
                parameter.grad.mul_(factor)
        base.step(self, rate)

    return changed(name, base, says, precision, step=step)


ALL = r"\(every parameter\)"
doubled = scaled("doubled", DDP, 2.0, rf"x 2\.0000 {ALL}")
by_world_size = scaled("by_world_size", DDP, 0.5, rf"x 0\.5000 {ALL}")
by_world_size_bf16 = scaled("by_world_size_bf16", DDP, 0.5, rf"x 0\.49\d\d|x 0\.50\d\d {ALL}", precision="bf16")
one_percent = scaled("one_percent", DDP, 1.01, rf"x 1\.0100 {ALL}")
one_percent_bf16 = scaled("one_percent_bf16", DDP, 1.01, rf"x 1\.0[01]\d\d {ALL}", precision="bf16")
half_percent = scaled("half_percent", FSDP, 0.995, rf"x 0\.9950 {ALL}")
fsdp_halved = scaled("fsdp_halved", FSDP, 0.5, rf"x 0\.5000 {ALL}")
negative = scaled("negative", OwnRing, -1.0, rf"x -1\.0000 {ALL}")
matrix_doubled = scaled("matrix_doubled", DDP, 2.0, r"x 2\.0000 \(h\.1\.mlp\.c_fc\.weight\)", MATRIX)
tied_doubled = scaled("tied_doubled", OwnOverlap, 2.0, r"x 2\.0000 \(wte\.weight\)", TIED)
bias_never_updated = scaled("bias_never_updated", DDP, 0.0, r"x 0\.0000 \(h\.1\.mlp\.c_fc\.bias\)", BIAS)
norm_never_updated = scaled("norm_never_updated", FSDP, 0.0, r"x 0\.0000 \(h\.0\.ln_1\.weight\)", NORM)
bias_bf16 = scaled("bias_bf16", DDP, 0.0, r"x 0\.0000 \(h\.1\.mlp\.c_fc\.bias\)", BIAS, "bf16")
not_a_number = scaled("not_a_number", OwnOverlap, float("nan"), r"nan \(h\.0\.ln_1\.weight", NORM)


def unreduced(name: str, parameter: str, precision: str = "fp32") -> type:
    """An engine that leaves out one parameter's reduction: every worker keeps its own gradient."""

    def average(self: Averaging, which: str, gradient: Tensor) -> None:
        if which != parameter:
            Averaging.average(self, which, gradient)

    return changed(name, Averaging, rf"\({parameter}\)", precision, average=average)


matrix_unreduced = unreduced("matrix_unreduced", MATRIX)
bias_unreduced = unreduced("bias_unreduced", BIAS)
norm_unreduced = unreduced("norm_unreduced", NORM)
tied_unreduced = unreduced("tied_unreduced", TIED)
norm_unreduced_bf16 = unreduced("norm_unreduced_bf16", NORM, "bf16")


def averaging(name: str, says: str, average: Callable[[Averaging, str, Tensor], object]) -> type:
    return changed(name, Averaging, says, average=average)


def reduced_in(name: str, dtype: torch.dtype, says: str) -> type:
    """An engine that sends gradients in another dtype."""

    def average(self: Averaging, which: str, gradient: Tensor) -> None:
        sent = gradient.to(dtype)
        dist.all_reduce(sent)
        gradient.copy_(sent / self.worker.world_size)

    return averaging(name, says, average)


sum_for_mean = averaging("sum_for_mean", rf"x 2\.0000 {ALL}", lambda self, name, g: dist.all_reduce(g))
largest_for_mean = averaging(
    "largest_for_mean", "error 1.*more", lambda self, name, g: dist.all_reduce(g, dist.ReduceOp.MAX)
)
first_rank_only = averaging("first_rank_only", "error 1.*more", lambda self, name, g: dist.broadcast(g, src=0))
unreduced_all = averaging("unreduced_all", "error 1.*more", lambda self, name, g: None)
reduced_in_bf16 = reduced_in(
    "reduced_in_bf16", torch.bfloat16, "all_reduce sends bfloat16, expected float32|error 0.00"
)
reduced_in_fp64 = reduced_in("reduced_in_fp64", torch.float64, "all_reduce sends float64, expected float32")


def of_loss(name: str, base: type[Engine], says: str, change: Callable[[Tensor, int], Tensor]) -> type:
    """An engine whose backward gets another loss; the function knows the accumulation."""

    def backward(self: Engine, loss: Tensor, last: bool) -> Tensor:
        return base.backward(self, change(loss, self.settings.accumulation), last)

    return changed(name, base, says, backward=backward)


summed_micro_batches = of_loss("summed_micro_batches", DDP, rf"x 2\.0000 {ALL}", lambda loss, count: loss * count)
divided_twice = of_loss("divided_twice", FSDP, rf"x 0\.5000 {ALL}", lambda loss, count: loss / count)


@wrong("error|x 0")
class last_micro_batch_only(OwnZero2):
    def backward(self, loss: Tensor, last: bool) -> Tensor:
        if last:
            self.sharded.zero_grad()
        return super().backward(loss, last)


@wrong("step 2")
class stale(Averaging):
    """Every step takes the gradients of the one before."""

    before: dict[str, Tensor] = {}  # noqa: RUF012

    def average(self, name: str, gradient: Tensor) -> None:
        super().average(name, gradient)
        new = gradient.clone()
        gradient.copy_(self.before.get(name, new))
        self.before = self.before | {name: new}


@wrong("step 2")
class not_zeroed(DDP):
    def step(self, rate: float) -> None:
        self.optimizer.zero_grad = lambda *_: None  # type: ignore
        super().step(rate)


@wrong(rf"x 2\.0000 {ALL} in step 2")
class doubled_once(DDP):
    steps = 0

    def backward(self, loss: Tensor, last: bool) -> Tensor:
        value = super().backward(loss, last)
        if last and self.steps == 1:
            for parameter in self.bare.parameters():
                assert parameter.grad is not None
                parameter.grad *= 2
        self.steps += last
        return value


@wrong("error|loss")
class same_data(DDP):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        for tokens in batch.values():
            dist.broadcast(tokens, src=0)
        return super().forward(batch)


@wrong("error|loss")
class dropout_stays(DDP):
    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1
        return super().wrap(model)


@wrong(r"\(wte\.weight\)")
class head_untied(Averaging):
    """The tied matrix gets the embedding's gradient alone."""

    def wrap(self, model: nn.Module) -> nn.Module:
        bare = getattr(model, "model", model)
        weight = bare.lm_head.weight
        assert isinstance(weight, Tensor)
        bare.lm_head.forward = lambda hidden: nn.functional.linear(hidden, weight.detach())
        return model


@wrong("modules used twice")
class second_use_lost(Averaging):
    """A block's gradient is that of its first use in a forward."""

    uses = 0

    def wrap(self, model: nn.Module) -> nn.Module:
        (block, *_) = blocks(model)
        model.register_forward_pre_hook(lambda module, inputs: setattr(self, "uses", 0))
        block.register_forward_pre_hook(self.begin)
        block.register_forward_hook(lambda module, inputs, outputs: module.requires_grad_(True) and None)
        return model

    def begin(self, block: nn.Module, inputs: object) -> None:
        self.uses += 1
        block.requires_grad_(self.uses == 1)


@wrong("other weights at the start")
class other_start(DDP):
    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        nn.init.normal_(blocks(model)[1].mlp.c_fc.weight, std=0.02)
        return super().wrap(model)


@wrong("rank 1 has another value than rank 0")
class drifting_replica(DDP):
    def step(self, rate: float) -> None:
        super().step(rate)
        with torch.no_grad():
            blocks(self.bare)[3].mlp.c_proj.bias += 1e-5 * self.worker.rank  # type: ignore[operator]


@wrong("rank 1 has another value than rank 0")
class forgotten_gather(OwnZero1):
    """A rank never sees the others' new values of one bucket."""

    def step(self, rate: float) -> None:
        values = self.sharded.buckets[0].flat.values
        own = values.chunk(self.worker.world_size)[self.worker.rank]
        before = values.clone()
        super().step(rate)
        own = own.clone()
        values.copy_(before)
        values.chunk(self.worker.world_size)[self.worker.rank].copy_(own)


def clipping(name: str, clip: Callable[..., Tensor], says: str = "clipping|norm|x ", base: type = Averaging) -> type:
    return changed(name, base, says, clip=clip)


def total_norm(self: Engine) -> Tensor:
    return nn.utils.get_total_norm([p.grad for p in self.bare.parameters() if p.grad is not None])


def clip_sum(self: Engine, norm: float) -> Tensor:
    total = torch.stack([p.grad.norm() for p in self.bare.parameters() if p.grad is not None]).sum()
    nn.utils.clip_grads_with_norm_(self.bare.parameters(), norm, total)
    return total_norm(self) * total / norm


def clip_each(self: Engine, norm: float) -> Tensor:
    total = total_norm(self)
    for parameter in self.bare.parameters():
        nn.utils.clip_grad_norm_(parameter, norm)
    return total


def clip_local(self: OwnZero2, norm: float) -> Tensor:
    shards = [bucket.shard.gradient for bucket in self.sharded.buckets]
    total = nn.utils.get_total_norm(shards)
    for gradient in shards:
        assert gradient is not None
        gradient *= (norm / total).clamp(max=1.0)
    return total


def clip_values(self: Engine, norm: float) -> Tensor:
    total = total_norm(self)
    nn.utils.clip_grad_value_(self.bare.parameters(), norm)
    return total


no_clip = clipping("no_clip", lambda self, norm: total_norm(self), r"clipping: x 1\.99\d\d \(every parameter\)")
clip_half = clipping(
    "clip_half", lambda self, norm: nn.utils.clip_grad_norm_(self.bare.parameters(), norm / 2), r"x 0\.5"
)
clip_by_sum = clipping("clip_by_sum", clip_sum)
clip_per_parameter = clipping("clip_per_parameter", clip_each)
clip_by_value = clipping("clip_by_value", clip_values)
clip_by_local_norm = clipping("clip_by_local_norm", clip_local, base=OwnZero2)
wrong_norm = clipping("wrong_norm", lambda self, norm: Engine.clip(self, norm) * 2, r"norm x 2\.0000")
no_norm_number = clipping("no_norm_number", lambda self, norm: Engine.clip(self, norm) * float("nan"), "norm x nan")


def adam(name: str, change: Callable[[dict], None]) -> type:
    """An engine whose optimizer has other constants, where it is AdamW."""

    def make_optimizer(self: Engine) -> torch.optim.Optimizer:
        optimizer = Engine.make_optimizer(self)
        if isinstance(optimizer, torch.optim.AdamW):
            for group in optimizer.param_groups:
                change(group)
        return optimizer

    return changed(name, DDP, "AdamW", make_optimizer=make_optimizer)


adam_epsilon = adam("adam_epsilon", lambda group: group.update(eps=1e-6))
adam_betas = adam("adam_betas", lambda group: group.update(betas=(0.9, 0.99)))
adam_no_decay = adam("adam_no_decay", lambda group: group.update(weight_decay=0.0))
adam_decays_all = adam("adam_decays_all", lambda group: group.update(weight_decay=5.0))


@wrong("AdamW")
class adam_rate(DDP):
    def step(self, rate: float) -> None:
        super().step(rate * 1.01 if self.settings.optimizer == "adamw" else rate)


@wrong("AdamW")
class adam_rate_of_one_group(DDP):
    """What does not decay keeps the first rate."""

    def step(self, rate: float) -> None:
        rates = rate, self.settings.learning_rate
        for group, kept in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = kept
        if self.settings.max_grad_norm:
            self.norm = self.clip(self.settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


@wrong("AdamW")
class adam_with_l2(DDP):
    """Adam with a penalty in the gradient, which is no decoupled decay."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        groups = weight_decay_groups(self.model, self.settings.weight_decay)
        if self.settings.optimizer == "sgd":
            return optimizer_class(self.settings)(groups)
        return torch.optim.Adam(groups, lr=self.settings.learning_rate, eps=self.settings.adam_epsilon)


@wrong("sends bfloat16, expected float32", "bf16")
class fsdp_reduce_dtype(FSDP):
    """FSDP that ignores reduce_dtype."""

    def wrap(self, model: nn.Module) -> nn.Module:
        for module in [*blocks(model), model]:
            fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        return model


@wrong("sends bfloat16, expected float32", "bf16")
class ddp_compressed(DDP):
    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        wrapped = super().wrap(model)
        wrapped.register_comm_hook(None, compressed)
        return wrapped


def compressed(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's bf16_compress_hook, which refuses a CPU."""
    short = bucket.buffer().bfloat16()
    dist.all_reduce(short)
    done: torch.futures.Future = torch.futures.Future()
    done.set_result(short.to(bucket.buffer().dtype) / dist.get_world_size())
    return done


@wrong(rf"x 2\.0000 {ALL}")
class pipeline_unscaled(Pipeline):
    def backward(self, loss: Tensor, last: bool) -> Tensor:
        return super().backward(loss, last=False)


@wrong(rf"x 0\.\d+ {ALL}|error")
class pipeline_scaled_each_time(Pipeline):
    """Gradients are divided after every micro-batch, so the first ones are divided more than once."""

    def backward(self, loss: Tensor, last: bool) -> Tensor:
        return super().backward(loss, last=True)


@wrong(r"\(wte\.weight")
class pipeline_shared_not_added(Pipeline):
    def __init__(self, settings: Settings, worker: Worker, model: GPT2LMHeadModel) -> None:
        super().__init__(settings, worker, model)
        self.processes._add_shared_gradients = MethodType(lambda self, other: None, self.processes)  # type: ignore


@wrong("x 2|error")
class zero3_block_summed(OwnZero3):
    """One block divides by no number of workers."""

    def backward(self, loss: Tensor, last: bool) -> Tensor:
        value = super().backward(loss, last)
        if last:
            gradient = self.sharded.blocks[2].shard.gradient
            assert gradient is not None
            gradient *= 2
        return value


@wrong("RuntimeError: out of luck")
class crashing(DDP):
    def step(self, rate: float) -> None:
        raise RuntimeError("out of luck")


class hanging(Averaging):  # not in WRONG: it takes a launch of its own
    """A worker that leaves out a collective: the others wait for it."""

    def average(self, name: str, gradient: Tensor) -> None:
        if name != MATRIX or self.worker.is_first:
            super().average(name, gradient)


def zero2_doubled(settings: Settings, worker: Worker, model: nn.Module) -> Engine:
    from benchmark.engines.deepspeed import DeepSpeed

    engine = DeepSpeed(2, False, settings, worker, model)
    backward = engine.backward
    engine.backward = lambda loss, last: backward(loss * 2, last) / 2  # type: ignore[method-assign]
    return engine


WRONG["zero2_doubled"] = (rf"x 2\.0000 {ALL}", "fp32")
