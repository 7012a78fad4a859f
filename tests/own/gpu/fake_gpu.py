"""Runs scripts on CUDA tensors that have no values, on a machine without a GPU, under NCCL's rule: no CPU tensors.

    errors = on_fake_gpu("tests.own.gpu.scenes", "task1", "zero3")   # {"task1": "", "zero3": "Traceback ..."}

One process calls SCENES[name](folder) of that module for each name, inside FakeTensorMode, and returns "" or a
traceback. CPU tensors are real. CUDA tensors have shapes, dtypes, devices and graphs, but no memory: `item()` gives
1.0. An operation on two devices fails as it does with CUDA, and so does a collective on a tensor that is not on a GPU
or not contiguous. In a scene, `script(module, rank, world_size, *flags)` runs the main() of a script as one rank of a
group that accepts every call, and `joined(rank, world_size)` joins such a group. fake_cuda.cpp (for g++) gives a CPU
build of torch what autograd asks of CUDA; it has to be loaded before torch, hence the process. Not seen: values,
kernels, streams, the order of messages (test_message_order.py), and code that reads memory from C++: DDP's reducer,
FSDP, torch.distributed.pipelining, DeepSpeed.
"""

import contextlib
import ctypes
import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from common.cache import cached
from common.paths import ROOT, cache_dir

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
WITHOUT_EFFECT = ("synchronize", "set_device", "memory_allocated", "max_memory_allocated", "reset_peak_memory_stats")


def on_fake_gpu(scenes: str, *names: str) -> dict[str, str]:
    """Run the scenes of a module in a process of their own; return "" or the traceback of each."""
    command = [sys.executable, "-m", "tests.own.gpu.fake_gpu", scenes, *names]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def load_fake_cuda() -> None:
    """Compile fake_cuda.cpp if that was not done yet for this torch, and load it."""
    spec = importlib.util.find_spec("torch")
    assert spec and spec.origin and "torch" not in sys.modules
    torch = os.path.dirname(spec.origin)
    version = Path(torch, "version.py").read_bytes()
    name = hashlib.sha256(SOURCE.read_bytes() + version + torch.encode()).hexdigest()[:16]

    def build(folder: Path) -> None:
        words = ["g++", "-shared", "-fPIC", "-std=c++20", f"-I{torch}/include", str(SOURCE)]
        words += [f"-L{torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib"]
        subprocess.run([*words, "-o", str(folder / "fake_cuda.so")], check=True)

    ctypes.CDLL(str(cached(cache_dir("fake_cuda") / name, build) / "fake_cuda.so"))


@contextlib.contextmanager
def fake_gpu(devices: int = 2) -> Iterator[None]:
    """Every CUDA tensor made inside is fake, in the threads of a pipeline too, and NCCL's rules hold."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from transformers import PreTrainedModel

    from common import cache
    from pipeline.worker import Task

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    cpu_generator, load, compute = torch.Generator, PreTrainedModel.from_pretrained.__func__, Task.compute

    def in_mode(task: Task) -> Any:
        with mode:
            return compute(task)

    replacements: list[tuple[Any, dict[str, Any]]] = [
        (FakeTensorMode, {"dispatch": _dispatch(FakeTensorMode.dispatch)}),
        (FakeTensor, {"tolist": _values, "item": lambda self: 1.0}),
        (FakeTensor, {"__float__": lambda self: 1.0, "__int__": lambda self: 1, "numpy": _array}),
        (torch.cuda, {name: lambda *_: 0 for name in WITHOUT_EFFECT}),
        (torch.cuda, {"device_count": lambda: devices, "get_device_capability": lambda _: (8, 0)}),
        (torch.cuda, {"get_rng_state": torch.get_rng_state, "set_rng_state": torch.set_rng_state}),
        (torch, {"Generator": lambda device="cpu": cpu_generator()}),
        (torch.distributed, {"broadcast_object_list": lambda *_, **__: None}),
        (Task, {"compute": in_mode}),
        (cache, {"_build": _without_mode(cache._build)}),
        (PreTrainedModel, {"from_pretrained": classmethod(_without_mode(load))}),
    ]
    with contextlib.ExitStack() as stack:
        for owner, attributes in replacements:
            for name, value in attributes.items():
                stack.enter_context(mock.patch.object(owner, name, value, create=True))
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # a real parameter cannot take a fake value
        stack.enter_context(mode)
        yield


def _dispatch(fake: Callable) -> Callable:
    """Return FakeTensorMode.dispatch with NCCL's rules, and with real tensors on the CPU."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._pytree import tree_leaves

    lock, thread = threading.RLock(), threading.local()

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d" and func is not torch.ops.c10d.barrier.default:  # NCCL's barrier makes its own
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor) and not (tensor.is_cuda and tensor.is_contiguous()):
                    raise RuntimeError(f"{func}: NCCL needs contiguous CUDA tensors, got one on {tensor.device}")
        elsewhere = torch.device(kwargs.get("device") or "cpu").type != "cpu"
        inside = getattr(thread, "inside", False)  # of an operation on fake tensors, which may be made of others
        if not (inside or elsewhere or FakeTensor in types):
            return func(*args, **kwargs)
        thread.inside = True
        try:
            with lock:
                return fake(self, func, types, args, kwargs)
        finally:
            thread.inside = inside

    return dispatch


def _values(fake: Any) -> list[float] | list[int]:
    """Return what tolist() gives: a permutation, for lists that are indices."""
    return [1.0] * fake.numel() if fake.dtype.is_floating_point else list(range(fake.numel()))


def _array(fake: Any) -> np.ndarray:
    if fake.is_cuda:
        raise TypeError(f"can't convert {fake.device} device type tensor to numpy")
    return np.ones(fake.shape)


def _without_mode(function: Callable) -> Callable:
    """What is loaded or built keeps its values; it becomes fake where it moves to the GPU."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    def outside(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return outside


@contextlib.contextmanager
def joined(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a process group that accepts every call and moves nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def script(module: str, folder: Path, rank: int, world_size: int, *flags: str, entry: str = "main") -> None:
    """Run the main() of a script for two steps and an evaluation, as one rank on cuda:{rank}."""
    import torch

    from common.config import RunConfig
    from common.workers.process_group import Worker

    @contextlib.contextmanager
    def group(config: RunConfig, join: object = None) -> Iterator[Worker]:
        device = torch.device("cpu") if config.no_cuda else torch.device("cuda", rank % torch.cuda.device_count())
        with joined(rank, world_size) if world_size > 1 else contextlib.nullcontext():
            yield Worker(rank, world_size, device)

    imported = importlib.import_module(module)
    common = ["--max_steps", "2", "--output_dir", str(folder), "--overwrite_output_dir", "--dropout", "0", *flags]
    place = ["--world_size", str(world_size), "--local_rank", str(rank)] if world_size > 1 else []
    words = mock.patch.object(sys, "argv", [module, *common, *(place if entry == "main" else place[:2])])
    batches = Worker.batches
    two = mock.patch.object(Worker, "batches", lambda worker, loader: itertools.islice(batches(worker, loader), 2))
    with mock.patch.object(imported, "process_group", group), words, two:
        if entry == "main":
            imported.main()
        else:  # task 2b's run_gpt2.py starts its processes itself
            imported.run_worker(rank, imported.parse_gpt2_arguments(module.split(".")[0], world_size=world_size))


def main(scenes: str, names: list[str]) -> None:
    load_fake_cuda()
    functions, errors = importlib.import_module(scenes).SCENES, {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            try:
                functions[name](Path(folder, name))
                errors[name] = ""
            except Exception:
                errors[name] = traceback.format_exc()
    print(json.dumps(errors))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
