"""What text an expression of a student's file makes, as far as it can be seen without running it.

Texts(module).of(node)      # (texts that it may be, whether there are no others)
"""

import ast
import itertools
from typing import Any

MOST, LONGEST, DEEPEST = 30, 300, 20  # values of one expression, characters, expressions inside one another
METHODS = {
    "join", "format", "replace", "lower", "upper", "swapcase", "strip", "lstrip", "rstrip", "removeprefix",
    "removesuffix", "decode",
}  # fmt: skip
BUDGET = 200_000  # expressions looked at in one file: names of names of names take no longer than this
Found = tuple[list[Any], bool]
UNKNOWN: Found = ([], False)


class Texts:
    """Knows what a file assigns to its names."""

    def __init__(self, module: ast.Module) -> None:
        self._values: dict[str, list[ast.expr]] = {}
        self._left = BUDGET
        for node in ast.walk(module):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._bind(target, node.value)
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value:
                self._bind(node.target, node.value)
            elif isinstance(node, ast.For | ast.comprehension) and isinstance(
                node.iter, ast.Tuple | ast.List | ast.Set
            ):
                for value in node.iter.elts:
                    self._bind(node.target, value)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self._values.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
            for part, its in zip(target.elts, value.elts, strict=False):
                self._bind(part, its)

    def of(self, node: ast.expr) -> tuple[list[str], bool]:
        found, all_known = self._of(node, 0)
        texts = [text for text in found if isinstance(text, str)]
        return texts, all_known and bool(texts)

    def _of(self, node: ast.expr, depth: int) -> Found:
        if isinstance(node, ast.Constant):
            return [node.value], True
        self._left -= 1
        if depth > DEEPEST or self._left < 0:
            return UNKNOWN
        if isinstance(node, ast.Name):
            return self._any_of(self._values.get(node.id, []), depth)
        if isinstance(node, ast.IfExp):
            return self._any_of([node.body, node.orelse], depth)
        if isinstance(node, ast.Tuple | ast.List):
            return self._made(node.elts, depth, lambda *parts: parts)
        if isinstance(node, ast.JoinedStr):  # with "" for what is not known
            parts = [part.value if isinstance(part, ast.FormattedValue) else part for part in node.values]
            known = [self._of(part, depth + 1) for part in parts]
            choices = itertools.product(*(values or [""] for values, _ in known))
            return ["".join(map(str, chosen)) for chosen in itertools.islice(choices, MOST)], all(k for _, k in known)
        if isinstance(node, ast.BinOp):
            return self._made([node.left, node.right], depth, lambda left, right: _joined(node.op, left, right))
        if isinstance(node, ast.Subscript):
            return self._part(node, depth)
        return self._called(node, depth) if isinstance(node, ast.Call) and not node.keywords else UNKNOWN

    def _any_of(self, nodes: list[ast.expr], depth: int) -> Found:
        found = [self._of(node, depth + 1) for node in nodes[:MOST]]
        return [value for values, _ in found for value in values][:MOST], bool(found) and all(k for _, k in found)

    def _made(self, nodes: list[ast.expr], depth: int, make: Any) -> Found:
        """make(...) of every choice of values; unknown if one has none, or if Python would not do it."""
        known = [self._of(node, depth + 1) for node in nodes[:MOST]]
        made = []
        for chosen in itertools.islice(itertools.product(*(values for values, _ in known)), MOST):
            try:
                value = make(*chosen)
            except Exception:
                return UNKNOWN
            if value is None or (isinstance(value, str | bytes | tuple) and len(value) > LONGEST):
                return UNKNOWN
            made.append(value)
        return made, bool(made) and all(k for _, k in known)

    def _part(self, node: ast.Subscript, depth: int) -> Found:
        if not isinstance(node.slice, ast.Slice):
            return self._made([node.value, node.slice], depth, lambda whole, at: whole[at])
        none = ast.Constant(None)
        limits = [part or none for part in (node.slice.lower, node.slice.upper, node.slice.step)]
        limits = [_negative(part) for part in limits]
        return self._made([node.value, *limits], depth, lambda whole, *at: whole[slice(*at)])

    def _called(self, node: ast.Call, depth: int) -> Found:
        function = node.func
        if isinstance(function, ast.Name) and function.id in ("chr", "str", "reversed", "tuple", "list"):
            makes: dict[str, Any] = {"chr": chr, "str": str, "reversed": lambda x: tuple(x)[::-1]}
            return self._made(node.args[:1], depth, makes.get(function.id, tuple))
        if isinstance(function, ast.Attribute) and function.attr in METHODS:
            return self._made([function.value, *node.args], depth, lambda text, *a: _method(text, function.attr, a))
        return UNKNOWN


def _negative(node: ast.expr) -> ast.expr:
    """-1 is an expression of 1."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        return ast.Constant(-node.operand.value if isinstance(node.operand.value, int) else None)
    return node


def _method(text: object, name: str, arguments: tuple) -> Any:
    if name == "format" and ":" in str(text):
        return None  # a width could make it as long as memory is large
    return getattr(text, name)(*arguments) if isinstance(text, str | bytes) else None


def _joined(operator: ast.operator, left: Any, right: Any) -> Any:
    if isinstance(operator, ast.Add):
        return left + right
    if isinstance(operator, ast.Mod) and isinstance(left, str) and left.count("%") == left.count("%s"):
        return left % right
    if isinstance(operator, ast.Mult) and isinstance(left, str) and isinstance(right, int) and right < LONGEST:
        return left * right
    return None
