"""The rank's end of the broker: a torch.distributed backend, so that a student's code uses plain torch.distributed.

Every call posts its tensor to the grader and returns a handle at once; the result is written into the student's tensor
only when somebody waits for the handle: torch itself for a call without async_op, a barrier for all earlier calls. So a
forgotten wait() shows in every run, and not by luck. So does a result that is used too early, as nan, and a tensor that
is changed while it is being sent: gloo may read and write at any time before wait() returns.
"""

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from grader.wire.connection import Wire
from grader.wire.reductions import REDUCTIONS
from grader.wire.values import plain_tensor, tensor_bytes

# Bytes of the largest input whose content wait() checks again, and of the largest output that is nan until then: more
# would show in measured memory.
WATCHED_BYTES = 1 << 16
SUPPORTED = (
    "all_reduce, reduce, broadcast, gather, scatter, all_gather, reduce_scatter, all_to_all, barrier, send and recv"
)
NOT_SUPPORTED = {
    "all_reduce_coalesced": ("allreduce_coalesced",),
    "all_gather_coalesced": ("allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    "reduce_scatter_coalesced": ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    "gather_single": ("gather_single", "gather_into_tensor"),
    "monitored_barrier": ("monitored_barrier",),
    "recv without a source": ("recv_anysource",),
}


class NotServedError(RuntimeError):
    """A call that torch.distributed knows and the graders do not support."""


class SilentlyWrongError(ValueError):
    """A call that gloo carries out without an error, and with a wrong result."""


class FreedError(RuntimeError):
    """A result whose tensor has no memory any more; gloo would write into memory that is no longer the tensor's."""


class Handle(c10d.Work):
    """What a call returns. Its outputs are written when the call has completed and somebody waits for it.

    waits_at_once: the call has no async_op, so its inputs cannot change before wait(). sends: the tensor of a send(),
    kept so that its memory is not reused; until wait(), no later call may write into it, and no recv into the outputs.
    """

    def __init__(
        self,
        wire: Wire,
        number: int,
        outputs: Sequence[torch.Tensor],
        waits_at_once: bool,
        sends: Sequence[torch.Tensor] = (),
        inputs: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        self._wire, self._number, self.outputs, self._waits_at_once = wire, number, outputs, waits_at_once
        self.sends = list(sends)
        self._inputs = [] if waits_at_once else [tensor for tensor in inputs if 0 < tensor.nbytes <= WATCHED_BYTES]
        self._contents = [tensor_bytes(plain_tensor(tensor)) for tensor in self._inputs]
        self._done = False
        self.earlier: list[Handle] = []  # a barrier completes these too, as gloo's does
        wire.pending[number] = self  # until wait(); what stays there was never waited for

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait for the answer and write it into the outputs. Fail if an input has changed since the call."""
        if not self._done:
            self._wire.pending.pop(self._number, None)
            for tensor, content in zip(self._inputs, self._contents, strict=True):
                if _has_memory(tensor) and tensor_bytes(plain_tensor(tensor)) != content:
                    raise SilentlyWrongError(
                        "the tensor was changed while it was being sent, between the call and its wait() (gloo gives "
                        "no error, and may send either): change it before the call or after wait(), or change a copy"
                    )
            self.sends.clear()
            self._inputs.clear()
            announced, self._waits_at_once = self._waits_at_once, False
            _write(self._wire.answer(self._number, announced), self.outputs)
            self._done = True
            for handle in self.earlier:
                handle.wait()
        return True

    def is_completed(self) -> bool:
        return self._done or (self._wire.answered(self._number) and self.wait())

    def get_future(self) -> torch.futures.Future:
        """Return a completed future: DDP asks for it in its backward hook, and waits here for the other ranks."""
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(list(self.outputs))
        return future

    def synchronize(self) -> None:
        self.wait()


def _overlap(these: Sequence[torch.Tensor], those: Sequence[torch.Tensor]) -> bool:
    """Return whether one of these tensors shares memory with one of those, by their first and last elements."""
    return any(low < end and begin < high for low, high in map(_span, these) for begin, end in map(_span, those))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + ((last + 1) * tensor.element_size() if tensor.numel() else 0)


def _has_memory(tensor: torch.Tensor) -> bool:
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    return tensor.untyped_storage().nbytes() >= needed


def _spoil(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Fill what will be received with nan: gloo may write there at any time before wait() returns."""
    for output in outputs:
        is_small = output.is_floating_point() and output.nbytes <= WATCHED_BYTES and _has_memory(output)
        if is_small and not _overlap([output], inputs):
            with torch._C.DisableTorchFunctionSubclass():
                output.data.fill_(torch.nan)


def _write(payload: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    """Copy the bytes of an answer into the student's tensors."""
    offset = 0
    for output in outputs:
        length = output.numel() * output.element_size()
        if length:
            if not _has_memory(output):
                raise FreedError("the memory of a collective's result was freed while the message was in transit")
            source = payload[offset : offset + length].clone().view(output.dtype).view(output.shape)
            with torch._C.DisableTorchFunctionSubclass():
                output.data.copy_(source)  # .data: like gloo, and unlike copy_, autograd does not see the write
        offset += length


ProcessGroup: Any = dist.ProcessGroup  # its signatures are overloads that nobody here uses


class BrokeredGroup(ProcessGroup):
    """A process group whose other ranks are reached through the grader. Roots and peers are ranks of the group.

    torch asks a group for the backend of a device, and then asks the backend what it can do: this group is its own
    backend. It keeps its name itself, since ProcessGroup would ask a backend for it.
    """

    supports_splitting = supports_coalescing = False
    group_name = ""

    def __init__(self, wire: Wire, key: str, members: Sequence[int], rank: int) -> None:
        super().__init__(rank, len(members))
        self._wire, self._key, self._members, self._rank = wire, key, list(members), rank

    def _get_backend(self, device: torch.device) -> "BrokeredGroup":
        return self

    get_backend = _get_backend

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def _post(
        self,
        name: str,
        unit: torch.Tensor | None,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        options: object = None,
        checked: bool = False,
        whole: Sequence[torch.Tensor] | None = None,
        **fields: object,
    ) -> Handle:
        """Send a call to the broker, and return its handle.

        All ranks must agree on shape and dtype of `unit`. So must all tensors of this call, unless they are `checked`
        already. `whole`: the student's tensors, where inputs are copies.
        """
        shape, dtype, payload = [], "", []
        if unit is not None:
            plain = plain_tensor(unit)
            shape, dtype = list(plain.shape), str(plain.dtype).removeprefix("torch.")
            if not checked:
                _check(name, plain, [*inputs, *outputs])
            payload = [tensor_bytes(plain_tensor(tensor)) for tensor in inputs]
        asynchronous = bool(getattr(options, "asyncOp", True))
        fields |= {
            "group": self._key,
            "members": self._members,
            "shape": shape,
            "dtype": dtype,
            "async": asynchronous,
            "payload": np.frombuffer(b"".join(payload), np.uint8) if any(payload) else None,
        }
        sends = inputs if name == "send" else []
        for handle in list(self._wire.pending.values()):
            if _overlap(outputs, handle.sends):
                raise SilentlyWrongError(
                    f"{name}: the result would overwrite a tensor that is still being sent (gloo gives no error); wait "
                    "for the send first, or receive into a tensor of its own"
                )
            if name == "recv" and _overlap(outputs, handle.outputs):
                raise SilentlyWrongError(
                    "recv: an earlier call still receives into the same memory (gloo gives no error, and either may "
                    "write there last); wait() for that call first, or receive into a tensor of its own"
                )
            if _overlap(sends, handle.outputs):
                raise SilentlyWrongError(
                    "send: the values of this tensor have not arrived yet: wait() for the receive first (gloo gives no "
                    "error, and sends what is there)"
                )
        if asynchronous:
            _spoil(outputs, inputs)
        number = self._wire.post(name, fields, waits=not asynchronous)
        return Handle(self._wire, number, outputs, not asynchronous, sends, inputs if whole is None else whole)

    def _root(self, options: Any) -> dict:
        return {"root": self._members[options.rootRank]}

    def allreduce(self, tensors, opts):
        (tensor,) = tensors
        return self._post("all_reduce", tensor, [tensor], [tensor], opts, reduce=_reduce_op(opts, tensor))

    def reduce(self, tensors, opts):
        (tensor,) = tensors
        outputs = [tensor] if self._rank == opts.rootRank else []
        fields = self._root(opts) | {"reduce": _reduce_op(opts, tensor)}
        return self._post("reduce", tensor, [tensor], outputs, opts, **fields)

    def broadcast(self, tensors, opts):
        (tensor,) = tensors
        inputs = [tensor] if self._rank == opts.rootRank else []
        return self._post("broadcast", tensor, inputs, [tensor], opts, **self._root(opts))

    def gather(self, outputs, inputs, opts):
        outputs = outputs[0] if self._rank == opts.rootRank else []
        if self._rank == opts.rootRank:
            self._check_list("gather", "gather_list", outputs)
        return self._post("gather", inputs[0], inputs, outputs, opts, **self._root(opts))

    def scatter(self, outputs, inputs, opts):
        inputs = inputs[0] if self._rank == opts.rootRank else []
        if self._rank == opts.rootRank:
            self._check_list("scatter", "scatter_list", inputs, outputs=False)
        return self._post("scatter", outputs[0], inputs, outputs, opts, **self._root(opts))

    def allgather(self, outputs, inputs, opts):
        self._check_list("all_gather", "tensor_list", outputs[0])
        return self._post("all_gather", inputs[0], inputs, outputs[0], opts)

    def all_gather_single(self, output, tensor, opts):
        if output.numel() != tensor.numel() * self.size() or not output.is_contiguous():
            raise ValueError(f"all_gather needs an output with room for {self.size()} tensors, got {output.shape}")
        pieces = list(output.detach().view(self.size(), *tensor.shape))
        return self._post("all_gather", tensor, [tensor], pieces, opts)

    def reduce_scatter(self, outputs, inputs, opts):
        self._check_list("reduce_scatter", "input_list", inputs[0], outputs=False)
        operation = _reduce_op(opts, outputs[0])
        if len({tensor.shape for tensor in inputs[0]}) == 1:
            return self._post("reduce_scatter", outputs[0], inputs[0], outputs, opts, reduce=operation)
        own = inputs[0][self._rank]  # gloo allows parts of unequal sizes, too
        if own.numel() != outputs[0].numel():
            raise ValueError(
                f"reduce_scatter: rank {self._rank} receives a part of {own.numel()} elements, but its output has "
                f"{outputs[0].numel()}"
            )
        flat = torch.cat([plain_tensor(tensor).reshape(-1) for tensor in inputs[0]])
        sizes = [tensor.numel() for tensor in inputs[0]]
        return self._post(
            "reduce_scatter", flat, [flat], outputs, opts, checked=True, whole=inputs[0], reduce=operation, sends=sizes
        )

    def reduce_scatter_single(self, output, tensor, opts):
        if tensor.numel() != output.numel() * self.size() or not tensor.is_contiguous():
            raise ValueError(
                f"reduce_scatter needs a contiguous input of {self.size()} times the output {tuple(output.shape)}, "
                f"got {tuple(tensor.shape)}"
            )
        return self.reduce_scatter([output], [list(tensor.detach().view(self.size(), *output.shape))], opts)

    def alltoall(self, outputs, inputs, opts):
        self._check_list("all_to_all", "input_tensor_list", inputs, outputs=False)
        self._check_list("all_to_all", "output_tensor_list", outputs)
        for tensor in (*inputs, *outputs):
            _check("all_to_all", tensor, [tensor])
        sizes = {"sends": [x.numel() for x in inputs], "expects": [x.numel() for x in outputs]}
        flat = torch.cat([plain_tensor(tensor).reshape(-1) for tensor in inputs])
        return self._post("all_to_all", flat, [flat], outputs, opts, checked=True, whole=inputs, **sizes)

    def all_to_all_single(self, output, tensor, output_splits, input_splits, opts):
        sides: list[list[torch.Tensor]] = []
        for name, whole, splits in (("output", output, output_splits), ("input", tensor, input_splits)):
            sizes = list(splits) or [len(whole) // self.size()] * self.size()
            if sum(sizes) != len(whole) or len(sizes) != self.size() or not whole.is_contiguous():
                raise ValueError(
                    f"all_to_all_single: expected a contiguous {name} in {self.size()} parts, got {tuple(whole.shape)} "
                    f"in the parts {sizes}"
                )
            sides.append(list(whole.detach().split(sizes)))
        return self.alltoall(sides[0], sides[1], opts)

    def barrier(self, opts):
        earlier = list(self._wire.pending.values())
        handle = self._post("barrier", None, [], [], opts)
        handle.earlier = earlier
        return handle

    def send(self, tensors, peer, tag):
        return self._post("send", tensors[0], tensors, [], peer=self._members[peer], tag=tag)

    def recv(self, tensors, peer, tag):
        return self._post("recv", tensors[0], [], tensors, peer=self._members[peer], tag=tag)

    def getBackendName(self):  # noqa: N802 (torch's name)
        return "grader"

    def shutdown(self) -> None:
        """Close nothing: the connection to the grader outlives the group."""

    # the names of these methods before torch 2.13
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def _check_list(self, name: str, argument: str, tensors: Sequence[torch.Tensor], outputs: bool = True) -> None:
        """Fail unless a list has one tensor for each rank, and outputs are different tensors."""
        if len(tensors) != self.size():
            raise ValueError(f"{name}: {argument} needs one tensor per rank, {self.size()} in all, got {len(tensors)}")
        places = [tensor.data_ptr() for tensor in tensors if tensor.numel()]
        if outputs and len(set(places)) < len(places):
            raise SilentlyWrongError(
                f"{name}: {argument} contains the same tensor more than once, so each received value overwrites the "
                "previous one (gloo gives no error); create a separate tensor for each rank: "
                "[torch.empty_like(t) for _ in range(n)]"
            )


def _not_served(name: str) -> Callable:
    def refuse(self: BrokeredGroup, *arguments: object, **keywords: object) -> None:
        raise NotServedError(f"{name} is not supported by the graders; supported: {SUPPORTED}")

    return refuse


for _name, _methods in NOT_SUPPORTED.items():
    for _method in _methods:
        setattr(BrokeredGroup, _method, _not_served(_name))


def _check(name: str, unit: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Fail unless all tensors of a call have one shape and dtype, and no holes."""
    for tensor in tensors:
        if tensor.shape != unit.shape or tensor.dtype != unit.dtype:
            raise ValueError(
                f"{name}: the tensors of one call must be alike, got {tuple(tensor.shape)} {tensor.dtype} "
                f"and {tuple(unit.shape)} {unit.dtype}"
            )
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        if not tensor.permute(order).is_contiguous():
            raise SilentlyWrongError(
                f"{name}: a tensor with holes (shape {tuple(tensor.shape)}, strides {tensor.stride()}) is silently "
                "mixed up by gloo; use tensor.contiguous() and copy the result back"
            )


def _reduce_op(options: Any, tensor: torch.Tensor) -> str:
    name = next((name for name in REDUCTIONS if options.reduceOp == getattr(dist.ReduceOp, name)), "")
    if not name:
        raise NotServedError(f"this ReduceOp is not supported by the graders; supported: {', '.join(REDUCTIONS)}")
    if name == "AVG" and not tensor.is_floating_point():
        raise ValueError(f"ReduceOp.AVG needs a floating point tensor, got {tensor.dtype}")
    return name
