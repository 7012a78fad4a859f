"""Finds the arithmetic of a region's solution in code that ships, whatever its names and the order of its factors.

Two expressions are the same formula if they have equally many variables and, with the variables in some order, the same
value wherever both are tried. A variable is anything but arithmetic: a name, an attribute, a call. A local name that is
assigned once is replaced by what it was assigned.

The leak that only this finds: a graded test or a given tool that computes what a region asks for, to compare it, such
as `right = 2 * (n - 1) * size / n` beside region 4.2's `moved = 2 * (world_size - 1) * size / world_size`. It has no
line and no name of the solution, so leaks.py does not see it. The judge of task 4 had this very line once.

Not found: a formula in words (prose may teach it), as a table, a loop or a recursion, or spread over several functions.
"""

import ast
import copy
import functools
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from types import CodeType
from typing import Any, NamedTuple

from staff.handout.regions import Region

FEWEST_OPERATIONS = 3  # shorter formulas, such as `a * b + c`, are in every program
MOST_OPERATIONS = 16
MOST_VARIABLES = 4
TRIALS = 40
DIFFERENT_VALUES = 3  # a formula that hardly ever changes says nothing
SAMPLES = (0, 1, 2, 3, 5, 7, 10, 16, 24, 33, 64, 100, 2490)
NO_NUMBER = "no number"

_NO_NUMBERS = (ast.List, ast.ListComp, ast.Dict, ast.DictComp, ast.Tuple, ast.JoinedStr, ast.Constant)
_BINARY = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.Gt, ast.LtE, ast.GtE)
_CALLS = {"ceil": math.ceil, "floor": math.floor, "int": int, "round": round}


class Formula(NamedTuple):
    """Arithmetic with the variables v0, v1, ..., compiled, and the line where it begins."""

    code: CodeType
    variables: int
    line: int

    def values(self, order: tuple[int, ...]) -> tuple[str, ...]:
        """Return its values at the trials, with the variables in this order; nine digits, "" where there is none."""
        draw = random.Random(len(order))
        values = []
        for _ in range(TRIALS):
            drawn = [float(draw.choice(SAMPLES)) for _ in order]
            names = {f"v{place}": drawn[position] for place, position in enumerate(order)}
            try:
                values.append(f"{eval(self.code, dict(_CALLS), names) + 0.0:.9g}")
            except (ArithmeticError, ValueError):  # a division by zero, a number that is too large
                values.append("")
        return tuple(values)


def leaked_formulas(texts: Mapping[str, str], regions: Iterable[Region]) -> list[str]:
    """One line for each place in a Python file where the formula of a solution is computed."""
    secrets: dict[tuple[str, ...], str] = {}
    for region in regions:
        for formula in formulas(region.body):
            for order in itertools.permutations(range(formula.variables)):
                values = formula.values(order)
                if len(set(values) - {""}) > DIFFERENT_VALUES:
                    secrets.setdefault(values, region.id)
    leaks = {}
    for name, text in texts.items():
        lines = text.split("\n")
        for values, line in values_in(text) if name.endswith(".py") else ():
            if id := secrets.get(values):
                where = f"{name}:{line}"
                leaks[where, id] = f"{where}: the formula of solution {id} is computed here: {lines[line - 1].strip()}"
    return list(leaks.values())


@functools.lru_cache(maxsize=1024)  # several handouts of nearly the same files may be made, one after the other
def values_in(code: str) -> list[tuple[tuple[str, ...], int]]:
    """The values and the line of every formula in some code."""
    every_formula = formulas(code, every=True)
    return [(formula.values(tuple(range(formula.variables))), formula.line) for formula in every_formula]


def formulas(code: str, every: bool = False) -> list[Formula]:
    """The formulas of some code that are long enough: whole expressions, or with `every` their parts as well."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return []  # reported as code that does not compile
    candidates, scopes = [], list[ast.AST]([tree])
    for scope in scopes:
        nodes = _within(scope)
        scopes += [node for node in nodes if isinstance(node, ast.FunctionDef)]
        once = _assigned_once(nodes)
        expressions = [node for node in nodes if isinstance(node, ast.expr) and _is_arithmetic(node)]
        parts = set() if every else {child for node in expressions for child in ast.iter_child_nodes(node)}
        candidates += [_formula(node, names) for node in expressions if node not in parts for names in ({}, once)]
    return [formula for formula in candidates if formula]


def _formula(node: ast.expr, once: Mapping[str, ast.expr]) -> Formula | None:
    """The formula of an expression; None if it is too short or too long, or has too few or too many variables."""
    arithmetic = _Arithmetic(once)
    tree = ast.fix_missing_locations(ast.Expression(arithmetic.visit(node)))
    long_enough = FEWEST_OPERATIONS <= arithmetic.operations <= MOST_OPERATIONS
    if not long_enough or not 2 <= len(arithmetic.names) <= MOST_VARIABLES or NO_NUMBER in arithmetic.names:
        return None
    return Formula(compile(tree, "formula", "eval"), len(arithmetic.names), node.lineno)


class _Arithmetic(ast.NodeTransformer):
    """Copies an expression with v0, v1, ... for all that is no arithmetic, and the values of the names in `once`."""

    def __init__(self, once: Mapping[str, ast.expr]) -> None:
        self.once = once
        self.names: dict[str, str] = {}
        self.operations = 0

    def visit(self, node: Any) -> Any:
        if not isinstance(node, ast.expr) or (isinstance(node, ast.Constant) and isinstance(node.value, int | float)):
            return node
        if isinstance(node, ast.Name) and node.id in self.once:
            outer = self.once
            self.once = {name: value for name, value in outer.items() if name != node.id}
            value = self.visit(outer[node.id])
            self.once = outer
            return value
        if not _is_arithmetic(node):
            name = NO_NUMBER if isinstance(node, _NO_NUMBERS) else ast.unparse(node)
            return ast.Name(self.names.setdefault(name, f"v{len(self.names)}"), ast.Load())
        self.operations += 1
        if isinstance(node, ast.Call):
            return ast.Call(ast.Name(_called(node), ast.Load()), [self.visit(node.args[0])], [])
        if isinstance(node, ast.Compare):  # generic_visit would write into the lists of the original
            return ast.Compare(self.visit(node.left), node.ops, [self.visit(node.comparators[0])])
        return self.generic_visit(copy.copy(node))


def _is_arithmetic(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, _BINARY)
    if isinstance(node, ast.Compare):
        return len(node.ops) == 1 and isinstance(node.ops[0], _COMPARISONS)
    if isinstance(node, ast.Call):
        return len(node.args) == 1 and not node.keywords and _called(node) in _CALLS
    return isinstance(node, ast.IfExp) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub))


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def _within(scope: ast.AST) -> list[ast.AST]:
    """All nodes of a scope but those of functions in it, which are scopes of their own."""
    nodes = list(ast.iter_child_nodes(scope))
    for node in nodes:  # those that are added are looked at, too
        if not isinstance(node, ast.FunctionDef):
            nodes += ast.iter_child_nodes(node)
    return nodes


def _assigned_once(nodes: list[ast.AST]) -> dict[str, ast.expr]:
    """Names that a scope of these nodes assigns in one place, by `name = arithmetic`."""
    stored = Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    values = {
        node.targets[0].id: node.value
        for node in nodes
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
    }
    return {name: value for name, value in values.items() if stored[name] == 1 and _is_arithmetic(value)}
