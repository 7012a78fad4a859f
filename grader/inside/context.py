"""Runs a probe inside a rank. The probe calls a student's code and returns values; its context is its view of the run.

A probe is a function in a module of the grader's, named "package.module:function". It says nothing about right and
wrong, and holds no expected value: a rank can read all that is in it. Its module imports nothing of the student's tree
at its top; the probe loads what it needs:

    def train(context):
        lesson = context.load("lesson.py")
        context.join()
        context.spy(torch.optim.SGD, "step", "step")
        lesson.average_gradients(model)
        return {"grads": [parameter.grad for parameter in model.parameters()]}
"""

import functools
import gc
import importlib.util
import random
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from grader.inside import find, join_group, refusals
from grader.inside.find import find_function
from grader.wire import values
from grader.wire.call_sites import Sites
from grader.wire.connection import Wire
from grader.wire.values import Fields

PARAMETERS = 400  # several times as many as a tested model has
TORCH = str(Path(torch.__file__).parent)
Tell = Callable[..., None]  # (name, **data)
Note = Callable[..., dict]


class Context:
    """A probe's view of the run: `rank`, `world_size`, `arguments` (arrays are torch tensors here) and `tree`.

    `arguments["own_inputs"]` is what only this rank starts with.
    """

    def __init__(self, wire: Wire, job: dict) -> None:
        self.rank: int = job["rank"]
        self.world_size: int = job["world_size"]
        self.arguments: Fields = job["arguments"]
        self.tree = Path(job["tree"])
        self.during = ""  # what is going on, for the message if it fails
        self._wire = wire
        self._loaded = 0
        self._scattered: list[Any] = []

    def load(self, path: str) -> ModuleType:
        """Run a file of the student's tree as a fresh module. What it raises, a SystemExit included, ends the probe;
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
        self.scatter()
        return module

    def scatter(self) -> None:
        """Let the next parameters lie anywhere, see the function below. A probe calls this just before it makes
        parameters: they would first take memory that was freed since the file was loaded, alike on every rank."""
        self._scattered += scatter()

    def join(self, backend: str = "gloo") -> None:
        """Join the process group without the student's code, for a region that is graded alone."""
        method = "tcp://127.0.0.1:1"  # never opened
        dist.init_process_group(backend, init_method=method, rank=self.rank, world_size=self.world_size)

    def event(self, name: str, **data: object) -> None:
        """Note an event in the rank's list, between the collectives before and after it."""
        self._wire.event(name, data)

    def ask(self, what: str, **data: object) -> Any:
        """Return the reply of the run's referee, in the grader's process; see grader/ranks/referee.py."""
        return self._wire.ask(what, data)

    def later(self, key: str) -> Any:
        """Return one piece of the argument `later`. The grader sends it now, and notes when it did."""
        return self._wire.later(key)

    def measure(self, point: str) -> None:
        """Wait until all ranks are here and the zygote has measured their memory, see Result.memory.

        Before that all ranks meet once without a point: then each has read all answers that were still in transit.
        """
        fields = {"group": "measurement/0", "members": list(range(self.world_size))}
        gc.collect()
        for name in ("", point):
            self._wire.answer(self._wire.post("measurement", fields | {"point": name}, waits=True), announced=True)

    def spy(self, owner: object, attribute: str, name: str = "", note: Note | None = None) -> None:
        spy(self.event, owner, attribute, name, note)


def spy(tell: Tell, owner: object, attribute: str, name: str = "", note: Note | None = None) -> None:
    """Put an event before every call of `owner.attribute`: a function of a module, a method of a class or object.

    Load the student's file afterwards, since `from module import function` copies what is there. `note` is called
    with the arguments of the call and returns the event's data; it must not use up an iterator among them.
    """
    original = getattr(owner, attribute)
    name = name or attribute

    @functools.wraps(original)
    def spied(*arguments: object, **keywords: object) -> Any:
        tell(name, **(note(*arguments, **keywords) if note else {}))
        return original(*arguments, **keywords)

    setattr(owner, attribute, spied)


def call(context: Context) -> Any:
    """Call `function(context)` of `file` in the tree; both names are arguments. It is the plainest probe."""
    return getattr(context.load(context.arguments["file"]), context.arguments["function"])(context)


def load(context: Context) -> None:
    """Load the file of the tree, to see whether it loads at all. Argument: file. Here, this needs only torch."""
    context.load(context.arguments["file"])


def run_probe(connection: socket.socket) -> None:
    """Do all that a rank does: take the job from the grader, run the probe, send back its value or its failure."""
    job = values.receive(connection, values.to_tensor)
    probe = find_function(job["probe"])
    _unlike_other_ranks()
    sys.path.insert(0, job["tree"])
    sites = Sites(job["tree"], TORCH)
    wire = Wire(connection, sites)
    join_group.install(wire, job["rank"], job["world_size"])
    context = Context(wire, job)
    if "stops" in job:  # a run of grader.debug
        from grader.inside.debugger import prepare

        prepare(job["rank"], job["stops"], context.event)
    else:
        sys.breakpointhook = refusals.refuse_debugger
    refusals.forget_graders()
    refusals.load_in_one_process()
    try:
        message = {"kind": "returned", "value": probe(context)}
    except BaseException as error:  # SystemExit and KeyboardInterrupt too
        message = {"kind": "raised", "error": describe_error(error, sites, context.during)}
    never_waited = {"never_waited": list(wire.pending)}
    try:
        wire.send(message | never_waited)
    except Exception as error:  # a value that cannot be sent
        wire.send({"kind": "raised", "error": describe_error(error, sites, context.during)} | never_waited)


def _unlike_other_ranks() -> None:
    """Make a forked rank differ where separately started processes do, or the fork would hide mistakes.

    Python's and numpy's generators get a new seed (torch's starts alike in every process, so it stays), and new objects
    get other addresses, see `scatter`. What remains alike is the order of a set of strings.
    """
    random.seed()
    np.random.seed()


def scatter() -> list[Any]:
    """Let the next parameters lie anywhere, so that `for parameter in set(parameters)` has another order on every rank.

    Makes parameters and frees half of them in a random order: new parameters take their places in this order. Returns
    the others, which must be kept. Call it after a file was loaded, since loading takes free places. A parameter costs
    5 us, for a copied page.
    """
    dice = random.SystemRandom()
    objects: list[Any] = [torch.nn.Parameter(torch.empty(1)) for _ in range(PARAMETERS)]
    dice.shuffle(objects)
    kept = [objects.pop() for _ in range(PARAMETERS // 2)]
    while objects:
        objects.pop()
    return kept


def describe_error(error: BaseException, sites: Sites, during: str) -> dict:
    """Return an exception as values: type, message, the student's lines of its traceback, the code of a SystemExit."""
    frames = traceback.extract_tb(error.__traceback__)
    trace = [(sites.students(f.filename), f.lineno or 0, f.name, f.line or "") for f in frames]
    trace = [frame for frame in trace if frame[0]]
    if isinstance(error, SyntaxError) and sites.students(error.filename or ""):
        trace.append((sites.students(error.filename or ""), error.lineno or 0, "", (error.text or "").strip()))
    if not trace:  # a line of the grader failed on what the student's code left: its path shows whose line it is
        trace = [(find.own_path(f.filename), f.lineno or 0, f.name, "") for f in frames]
    code = None
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    name = type(error).__name__
    try:
        # BdbQuit: pdb.set_trace() has read the end of its input
        text = refusals.NO_DEBUGGER if name == "BdbQuit" else str(error)
    except Exception:
        text = "(its message cannot be printed)"
    return {"type": name, "message": text, "during": during, "trace": trace, "code": code}
