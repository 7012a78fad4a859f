"""A backward pass that overlaps like the forward pass, started by the usual call to `backward()` on the loss.

torch runs the backward of a CPU graph in one thread, the caller's. With one graph over all partitions, only one
partition would work at a time. So each partition's work on each micro-batch gets its own graph, which is cut off from
the graphs before and after it:

    x ── split ── ✂ partition 0 ✂ ── to() ── ✂ partition 1 ✂ ── cat ── output       a Cut is one "✂ partition ✂"

When the gradient of the output arrives, every ModelCut becomes a task for its partition's worker. The tasks are in the
reverse order of the schedule, the last micro-batch first. There is no clock here: a worker continues as soon as the
gradient that it needs arrives.

    partition 0    .   B3  B2  B1  B0
    partition 1    B3  B2  B1  B0  .

The workers add gradients to `.grad` of the parameters, micro-batch by micro-batch. So `torch.autograd.grad` does not
work for parameters of a pipe, and a hook on a parameter is called once per micro-batch.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from threading import Semaphore
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeline.dropout_seeds import draw_seed, own_random_numbers
from pipeline.worker import Task, create_workers

if TYPE_CHECKING:
    from pipeline.pipe import Pipe

_current_run: ContextVar["SplitRun | None"] = ContextVar("current_run", default=None)


def call_with_overlapping_backward(pipe: "Pipe", forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return forward(x), as a tensor whose backward runs in the workers of `pipe`."""
    run = SplitRun(pipe, x)
    token = _current_run.set(run)  # every Task created from here on takes the run with it to its worker
    try:
        with _fresh_workers_after_an_error(pipe):
            run.output = forward(run.input)
    finally:
        _current_run.reset(token)
    if not run.output.requires_grad:
        return run.output
    # The parameters get their gradients from the workers, not from this graph. If x needs no gradient, `anchor` is the
    # only leaf of this graph that needs one.
    anchor = torch.zeros((), requires_grad=True)
    return _ReceiveGradient.apply(run, _RunBackward.apply(run, anchor, x), run.output.detach())


class SplitStage(nn.Sequential):
    """A partition in a pipe. You call it like any module; during a run, each call adds a ModelCut to the run."""

    def __init__(self, index: int, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        run = _current_run.get()
        return super().forward(x) if run is None else run.compute(self.index, super().forward, x)


@dataclass(eq=False)
class ModelCut:
    """One partition's work on one micro-batch: a graph from `start` to `end`, cut off from the rest."""

    partition: int
    micro_batch: int
    given: Tensor  # the input of the partition; its graph leads back to the `result` of an earlier cut, or to x
    start: Tensor  # the same values as a leaf: here the graph begins
    end: Tensor
    result: Tensor  # the values of `end` as a leaf, for the next partition
    earlier: list["ModelCut"] = field(
        default_factory=list
    )  # the cuts that `given` leads back to; none at the first stage
    uses: int = 0  # how many later cuts and outputs use `result`, so how many gradients to wait for
    arrived: Semaphore = field(default_factory=lambda: Semaphore(0))  # released once per use


class SplitRun:
    """One call of a pipe: what its workers did, and how to run it backwards."""

    def __init__(self, pipe: "Pipe", x: Tensor) -> None:
        self.pipe = pipe
        self.input = x.detach().requires_grad_(x.requires_grad)
        self.output = self.input
        self.output_gradient: Tensor | None = None
        self.cuts: list[ModelCut] | None = []
        self.keep_graph = False
        self.calls = [0] * len(pipe.partitions)  # of each partition so far
        self.seed = draw_seed(pipe.partitions)
        self.trace = pipe.trace

    def compute(self, j: int, forward: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
        """Run partition j's forward for one micro-batch, in the partition's worker."""
        assert self.cuts is not None
        micro_batch, self.calls[j] = self.calls[j], self.calls[j] + 1
        start = given.detach().requires_grad_(given.requires_grad and torch.is_grad_enabled())
        with self._traced("forward", j, micro_batch), own_random_numbers(self.seed, j, micro_batch, given.device):
            end = forward(_Alias.apply(start))
        if not isinstance(end, Tensor):
            raise TypeError(f"expected partition {j} to return one tensor, got {type(end).__name__}")
        if not end.requires_grad:
            return end
        result = end.detach().requires_grad_()
        self.cuts.append(ModelCut(j, micro_batch, given, start, end, result))
        return result

    def backward(self, keep_graph: bool) -> Tensor | None:
        """Let the workers run every cut backwards; returns the gradient of the input.

        The thread that called backward() on the loss runs this method. It hands out the tasks and waits for all.
        """
        if self.cuts is None:
            raise RuntimeError(
                "expected one backward() per call of the pipe, got a second one after the graph was freed; "
                "call the pipe again, or pass retain_graph=True the first time"
            )
        cuts, self.keep_graph = self.cuts, keep_graph
        self.cuts = cuts if keep_graph else None
        self.input.grad = None
        needed = _in_reverse(cuts, self.output)
        # This goes from the output back to the results of the last partition; from there the workers continue.
        torch.autograd.backward(self.output, self.output_gradient, retain_graph=keep_graph)
        self._in_workers(needed)
        first = [cut for cut in needed if not cut.earlier and cut.start.grad is not None]
        if first:  # all at once: split's backward writes a whole batch each time it runs
            starts = [cut.start.grad for cut in first]
            torch.autograd.backward([cut.given for cut in first], starts, retain_graph=keep_graph)
        return self.input.grad

    def _in_workers(self, cuts: list[ModelCut]) -> None:
        """Run these cuts backwards, each in the worker of its partition; raise the first error when all are done."""
        with _fresh_workers_after_an_error(self.pipe):
            for cut in cuts:
                self.pipe.in_queues[cut.partition].put(Task(partial(self._backward_of, cut)))
            # Every task ends: it waits only for tasks that were handed out before it, and those always signal it.
            results = [self.pipe.out_queues[cut.partition].get() for cut in cuts]
            if errors := [exc_info[1] for success, exc_info in results if not success]:
                raise errors[0]  # it carries its traceback

    def _backward_of(self, cut: ModelCut) -> None:
        """Run one partition's backward for one micro-batch, in the partition's worker."""
        try:
            for _ in range(cut.uses):
                cut.arrived.acquire()  # waits for the worker of the later partition
            if cut.result.grad is None:
                return  # the later worker failed, or did not use this result
            with self._traced("backward", cut.partition, cut.micro_batch):
                torch.autograd.backward(cut.end, cut.result.grad, retain_graph=self.keep_graph)
            if cut.earlier and cut.start.grad is not None:  # as far as the result of the earlier partition
                torch.autograd.backward(cut.given, cut.start.grad, retain_graph=self.keep_graph)
        finally:
            for before in cut.earlier:
                before.arrived.release()

    def _traced(self, phase: str, partition: int, micro_batch: int) -> contextlib.AbstractContextManager:
        if self.trace is None:
            return contextlib.nullcontext()
        return self.trace.box(phase, partition, micro_batch, self.pipe.devices[partition])


class _RunBackward(torch.autograd.Function):
    """The place where the graph outside of the pipe meets a run. Its output is a CPU scalar that represents the run.

    torch runs a node's backward in the thread that belongs to the device of the node's gradient. A scalar on the CPU
    brings this node into the thread that called backward(). That thread may wait. A GPU's thread must not wait, because
    the workers need it.
    """

    @staticmethod
    def forward(ctx: Any, run: SplitRun, anchor: Tensor, x: Tensor) -> Tensor:
        ctx.run = run
        return torch.zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        keep_graph = torch._C._autograd._get_current_graph_task_keep_graph()  # retain_graph of this backward()
        return None, None, ctx.run.backward(keep_graph)


class _ReceiveGradient(torch.autograd.Function):
    """The output of the pipe. Stores the gradient that arrives; _RunBackward comes next."""

    @staticmethod
    def forward(ctx: Any, run: SplitRun, the_run: Tensor, output: Tensor) -> Tensor:
        ctx.run = run
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        ctx.run.output_gradient = gradient
        return None, torch.zeros(()), None


class _Alias(torch.autograd.Function):
    """A tensor with the same values and memory that is not a leaf.

    autograd does not allow a first layer that works in place to change a leaf.
    """

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


def _in_reverse(cuts: list[ModelCut], output: Tensor) -> list[ModelCut]:
    """Return the cuts that `output` depends on, ordered so that each comes after the cuts whose gradients it needs.

    Also records who waits for whom.
    """
    cut_of = {id(cut.result): cut for cut in cuts}
    for cut in cuts:
        cut.uses, cut.result.grad, cut.start.grad = 0, None, None
    for cut in _cuts_behind(output, cut_of):
        cut.uses += 1
        cut.arrived.release()  # the caller computes this gradient itself, before any worker starts
    needed = []
    for cut in reversed(cuts):  # a cut was recorded after those that it builds on
        if cut.uses:
            needed.append(cut)
            cut.earlier = _cuts_behind(cut.given, cut_of)
            for before in cut.earlier:
                before.uses += 1
    return needed


def _cuts_behind(tensor: Tensor, cut_of: dict[int, ModelCut]) -> list[ModelCut]:
    """Return the cuts from whose results `tensor` was computed."""
    if id(tensor) in cut_of:
        return [cut_of[id(tensor)]]
    cuts, visited, nodes = [], set(), [tensor.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in visited:
            visited.add(node)
            nodes.extend(following for following, _ in node.next_functions)
            leaf = getattr(node, "variable", None)  # only the node of a leaf has it
            if id(leaf) in cut_of:
                cuts.append(cut_of[id(leaf)])
    return cuts


@contextlib.contextmanager
def _fresh_workers_after_an_error(pipe: "Pipe") -> Iterator[None]:
    """After an error (or Ctrl-C), results may be left in the queues; the next call must not take them."""
    try:
        yield
    except BaseException:  # Ctrl-C, too
        pipe.in_queues, pipe.out_queues = create_workers(pipe.devices)
        raise
