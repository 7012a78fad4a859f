"""Every lesson, task script and engine takes steps and evaluates on fake GPUs, under NCCL's rule; see scenes.py."""

import ast
import shutil

import pytest
import torch

from common.paths import ROOT
from tests.own.gpu.fake_gpu import on_fake_gpu
from tests.own.gpu.scenes import SCENES

COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter", "send", "recv", "isend",
    "irecv", "all_gather_single", "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor",
)  # fmt: skip
FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange", "rand", "randn")
FOLDERS = ("common", "beyond", "pipeline", "cluster", "task2a_gather_scatter", "task2b_allreduce", "task4_traffic")


@pytest.fixture(scope="module")
def errors():
    """The traceback of each scene, "" if it passed; all run in one process."""
    if not shutil.which("g++"):
        pytest.skip("fake CUDA tensors need a C++ compiler (g++)")
    if torch.version.cuda:
        pytest.skip("fake CUDA tensors need a build of torch without CUDA")
    return on_fake_gpu("tests.own.gpu.scenes", *SCENES)


@pytest.mark.medium
@pytest.mark.parametrize("scene", SCENES)
def test_it_runs_on_fake_gpus(errors, scene):
    assert not errors[scene]


def made_without_device(source: str) -> list[str]:
    """Return "line N: name" of each tensor that is made without device= and then passed to a collective."""
    tensors = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        made: set[str] = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and any(_is_made_on_cpu(part) for part in ast.walk(node.value)):
                names = (part for target in node.targets for part in ast.walk(target))
                made |= {name.id for name in names if isinstance(name, ast.Name)}
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and _name(node.func) in [f"dist.{name}" for name in COLLECTIVES]:
                passed = [part for argument in node.args for part in ast.walk(argument)]
                tensors += [f"line {n.lineno}: {n.id}" for n in passed if isinstance(n, ast.Name) and n.id in made]
                tensors += [f"line {part.lineno}: a new tensor" for part in passed if _is_made_on_cpu(part)]
    return tensors


def _is_made_on_cpu(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or _name(node.func) not in [f"torch.{name}" for name in FACTORIES]:
        return False
    return not any(keyword.arg == "device" for keyword in node.keywords)


def _name(node: ast.expr) -> str:
    return (
        f"{node.value.id}.{node.attr}" if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) else ""
    )


def test_no_collective_gets_a_tensor_that_was_made_without_a_device():
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]

    assert {path: tensors for path in paths if (tensors := made_without_device(path.read_text()))} == {}
