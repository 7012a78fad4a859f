"""The view that code in a rank has of its run: the student's files, events, measurements."""

import functools
import gc
import importlib.util
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from grader.inside.storage import BrokeredStorage
from grader.wire.connection import Wire
from grader.wire.request import Job

PARAMETERS = 100  # several times as many as a tested model has


class Context:
    """A rank's view: `rank`, `world_size`, `tree`; `arguments`, which are the same on all ranks, and `inputs`,
    which only this rank has. Arrays are torch tensors here."""

    def __init__(self, wire: Wire, job: Job) -> None:
        self.rank, self.world_size = job.rank, job.world_size
        self.arguments, self.inputs = job.arguments, job.inputs
        self.tree = Path(job.tree)
        self.during = ""  # what is going on, for the message if it fails
        self._wire = wire
        self._loaded = 0
        self._kept: list[object] = []

    def load(self, path: str) -> ModuleType:
        """Run a file of the student's tree as a fresh module. What it raises, a SystemExit included, ends the rank;
        the report says that it happened while loading this file."""
        file = self.tree / path
        before, self.during = self.during, f"loading {path}"
        if not file.is_file():
            raise FileNotFoundError(f"there is no {path}")
        self._loaded += 1
        name = f"student_{file.stem}_{self._loaded}"
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec, "a file that exists has a spec"
        assert spec.loader, "and a loader"
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and pickle look a class's module up by name
        sys.argv = [str(file)]
        sys.path[1:1] = [str(file.parent)]  # where `python file.py` would look first; the tree's root stays in front
        spec.loader.exec_module(module)
        self.during = before
        return module

    def shuffle_addresses(self) -> None:
        """Let the next parameters lie anywhere in memory: `for parameter in set(parameters)`, which goes by addresses,
        then has another order on every rank. Call this just before making parameters.

        It makes parameters and frees half of them in a random order: new parameters take their places in this order.
        """
        dice = random.SystemRandom()
        objects: list[object] = [torch.nn.Parameter(torch.empty(1)) for _ in range(PARAMETERS)]
        dice.shuffle(objects)
        self._kept += [objects.pop() for _ in range(PARAMETERS // 2)]
        while objects:
            objects.pop()

    def join(self) -> None:
        """Join the process group without the student's code, for a region that is graded alone."""
        method = "tcp://127.0.0.1:1"  # never opened
        dist.init_process_group("gloo", init_method=method, rank=self.rank, world_size=self.world_size)

    def event(self, name: str, **data: object) -> None:
        """Note an event in the rank's list, between the collectives before and after it."""
        self._wire.event(name, data)

    def storage(self, number: int = 0) -> BrokeredStorage:
        """Return the storage of this number, which all ranks of the run share; see Request.storages."""
        return BrokeredStorage(self._wire, self.rank, number)

    def measure(self, point: str) -> None:
        """Wait until all ranks are here and the grader has measured their memory, see Result.memory.

        Before that all ranks meet once without a point: then each has read all answers that were still in transit.
        """
        fields = {"group": "measurement/0", "members": list(range(self.world_size))}
        gc.collect()
        for name in ("", point):
            self._wire.answer(self._wire.post("measurement", fields | {"point": name}, waits=True), announced=True)

    def spy(self, owner: object, attribute: str, name: str = "", note: Callable[..., dict] | None = None) -> None:
        """Put an event before every call of `owner.attribute`: a function of a module, a method of a class or object.

        Load the student's file afterwards, since `from module import function` copies what is there. `note` is called
        with the arguments of the call and returns the event's data; it must not use up an iterator among them.
        """
        original = getattr(owner, attribute)

        @functools.wraps(original)
        def spied(*arguments: object, **keywords: object) -> object:
            self.event(name or attribute, **(note(*arguments, **keywords) if note else {}))
            return original(*arguments, **keywords)

        setattr(owner, attribute, spied)
