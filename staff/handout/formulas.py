"""Finds the arithmetic of a region's solution in code that ships, whatever its names and the order of its factors.

Two expressions are the same formula if they have equally many variables and, with the variables matched in some order,
the same value wherever both are tried. A variable is anything but arithmetic: a name, an attribute, a call. A local
name that is assigned once is replaced by what it was assigned.

Not found: a formula in words (prose may teach it), as a table, a loop or a recursion, or spread over several functions.
"""

import ast
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from staff.handout.regions import Region

FEWEST_OPERATIONS = 3  # shorter formulas, such as `a * b + c`, are in every program
MOST_OPERATIONS = 16
MOST_VARIABLES = 4
TRIALS = 40
DIFFERENT_VALUES = 3  # a formula that hardly ever changes says nothing
SAMPLES = (0, 1, 2, 3, 5, 7, 10, 16, 24, 33, 64, 100, 2490)
NO_NUMBER = "no number"

_NO_NUMBERS = (ast.List, ast.ListComp, ast.Dict, ast.DictComp, ast.Tuple, ast.JoinedStr, ast.Constant)
_BINARY: dict[type, Callable[[float, float], float]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}
_CALLS: dict[str, Callable[[float], float]] = {"ceil": math.ceil, "floor": math.floor, "int": int, "round": round}
_COMPARISONS: dict[type, Callable[[float, float], bool]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Lt: lambda a, b: a < b,
    ast.Gt: lambda a, b: a > b,
    ast.LtE: lambda a, b: a <= b,
    ast.GtE: lambda a, b: a >= b,
}


@dataclass(frozen=True)
class Term:
    """Arithmetic: an operation on its parts; or a variable, which has a name, or a number, which has neither."""

    operation: Callable[..., float]
    parts: tuple["Term", ...] = ()
    name: str = ""
    line: int = 0

    def variables(self) -> set[str]:
        return {self.name} if self.name else set().union(*(part.variables() for part in self.parts))

    def operations(self) -> int:
        return bool(self.parts) + sum(part.operations() for part in self.parts)

    def value(self, values: Mapping[str, float]) -> float:
        """Raises ArithmeticError where there is none."""
        return values[self.name] if self.name else self.operation(*(part.value(values) for part in self.parts))


def leaked_formulas(texts: Mapping[str, str], regions: list[Region]) -> list[str]:
    """One line for each place in a Python file where the formula of a solution is computed."""
    secrets = [(formula, region.id) for region in regions for formula in formulas(region.body)]
    found = {}
    for name, text in texts.items():
        lines = text.split("\n")
        for formula in formulas(text, every=True) if name.endswith(".py") else ():
            for secret, id in secrets:
                if same(formula, secret):
                    where = f"{name}:{formula.line}"
                    line = lines[formula.line - 1].strip()
                    found[where, id] = f"{where}: the formula of solution {id} is computed here: {line}"
    return list(found.values())


def formulas(code: str, every: bool = False) -> list[Term]:
    """The formulas of some code that are long enough: whole expressions, or with `every` their parts as well."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return []  # reported as code that does not compile
    found: list[Term] = []
    for scope in ast.walk(tree):
        if isinstance(scope, ast.FunctionDef | ast.Module):
            once = _assigned_once(scope)
            for node in _expressions(scope, every):
                found += {_term(node, {}), _term(node, once)}
    return [term for term in found if _is_formula(term)]


def _is_formula(term: Term) -> bool:
    long_enough = FEWEST_OPERATIONS <= term.operations() <= MOST_OPERATIONS
    variables = term.variables()
    return long_enough and 2 <= len(variables) <= MOST_VARIABLES and NO_NUMBER not in variables


def same(one: Term, other: Term) -> bool:
    """Whether two formulas have the same value wherever they are tried, for some matching of their variables."""
    mine, theirs = sorted(one.variables()), sorted(other.variables())
    return len(mine) == len(theirs) and any(
        _agree(one, other, dict(zip(theirs, order, strict=True))) for order in itertools.permutations(mine)
    )


def _agree(one: Term, other: Term, names: Mapping[str, str]) -> bool:
    """`names`: variable of `other` -> variable of `one`."""
    draw = random.Random(0)
    seen = set()
    for _ in range(TRIALS):
        values = {name: float(draw.choice(SAMPLES)) for name in names.values()}
        try:
            mine, theirs = one.value(values), other.value({name: values[names[name]] for name in names})
        except (ArithmeticError, ValueError):
            continue  # a division by zero, a number that is too large
        if not math.isclose(mine, theirs, rel_tol=1e-9, abs_tol=1e-9):
            return False
        seen.add(mine)
    return len(seen) > DIFFERENT_VALUES


def _term(node: ast.expr, once: Mapping[str, ast.expr]) -> Term:
    """The arithmetic of an expression; names in `once` are replaced by what they were assigned."""
    if isinstance(node, ast.Name) and node.id in once:
        others = {name: value for name, value in once.items() if name != node.id}
        return replace(_term(once[node.id], others), line=node.lineno)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        number = node.value
        return Term(lambda: number, line=node.lineno)
    if isinstance(node, _NO_NUMBERS):
        return Term(float, name=NO_NUMBER, line=node.lineno)
    made = _operation(node)
    if made is None:
        return Term(float, name=ast.unparse(node), line=node.lineno)
    operation, children = made
    return Term(operation, tuple(_term(child, once) for child in children), line=node.lineno)


def _operation(node: ast.expr) -> tuple[Callable[..., float], list[ast.expr]] | None:
    """The operation of an arithmetic expression and what it works on; None for anything else."""
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)], [node.left, node.right]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return (lambda a: -a), [node.operand]
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords and _called(node) in _CALLS:
        return _CALLS[_called(node)], [node.args[0]]
    if isinstance(node, ast.IfExp):
        return (lambda test, body, orelse: body if test else orelse), [node.test, node.body, node.orelse]
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        return _COMPARISONS[type(node.ops[0])], [node.left, node.comparators[0]]
    return None


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def _expressions(scope: ast.AST, every: bool) -> Iterator[ast.expr]:
    """The arithmetic expressions of a scope: the whole ones, or with `every` each part of them."""
    made = [(node, found) for node in _within(scope) if isinstance(node, ast.expr) and (found := _operation(node))]
    parts = set() if every else {id(child) for _, (_, children) in made for child in children}
    yield from (node for node, _ in made if id(node) not in parts)


def _within(scope: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a scope but those of functions in it, which are scopes of their own."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, ast.FunctionDef):
            yield from _within(child)


def _assigned_once(scope: ast.AST) -> dict[str, ast.expr]:
    """Names that a scope assigns in one place, by `name = arithmetic`."""
    stored: dict[str, int] = {}
    values: dict[str, ast.expr] = {}
    for node in _within(scope):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            stored[node.id] = stored.get(node.id, 0) + 1
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            values[node.targets[0].id] = node.value
    return {name: value for name, value in values.items() if stored[name] == 1 and _operation(value)}
