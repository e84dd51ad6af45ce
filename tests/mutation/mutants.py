"""The mutants of a module: an operator, number, keyword or condition changed, or a statement or argument left out.

Strings are left as they are, and no value is replaced by `None`: nearly all such mutants are wrong messages, or raise
where they are met.
"""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple


class Mutant(NamedTuple):
    module: str
    line: int
    before: str
    """The first line that differs, without indentation."""
    after: str
    source: str
    """The whole changed module."""


class _Edit(NamedTuple):
    """Offsets in the source, in bytes, and what to write in place of the text between them."""

    start: int
    end: int
    text: str


_OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "/"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "&"),
    ast.Pow: ("**", "*"),
    ast.UAdd: ("+", "-"),
    ast.USub: ("-", "+"),
    ast.Not: ("not", ""),
    ast.Invert: ("~", ""),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
_METHODS = {"lower": "upper", "lstrip": "rstrip", "find": "rfind", "ljust": "rjust", "index": "rindex"}
_METHODS |= {"removeprefix": "removesuffix", "partition": "rpartition"}
_METHODS |= {after: before for before, after in _METHODS.items()}
_INVISIBLE_KEYWORDS = {"device", "strict"}
"""Left out, they change nothing on a CPU (`device`) or only the message of an error (`strict` of zip)."""


def mutants_of(module: str, source: str) -> list[Mutant]:
    """Return all mutants of a module, in the order of their lines."""
    lines = source.splitlines()
    mutants = []
    for start, end, text in _Edits(source).found:
        changed = (source.encode()[:start] + text.encode() + source.encode()[end:]).decode()
        after = changed.splitlines()
        number = next(place for place, pair in enumerate(zip(lines, after, strict=False)) if pair[0] != pair[1])
        mutants.append(Mutant(module, number + 1, lines[number].strip(), after[number].strip(), changed))
    return sorted(mutants, key=lambda mutant: mutant.line)


class _Edits:
    """Finds the changes of a module. Types are left as they are, and what could make the import fail."""

    def __init__(self, source: str) -> None:
        self.found: list[_Edit] = []
        self._source = source.encode()
        self._line_starts = [0]
        for line in self._source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))
        self._visit(ast.parse(source))

    def _visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("len", "isinstance"):
            return
        self.found += self._edits(node)
        for name, value in ast.iter_fields(node):
            children = [
                child for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)
            ]
            if name in ("defaults", "kw_defaults"):
                children = [child for child in children if isinstance(child, ast.Constant)]
            if name not in ("annotation", "returns", "decorator_list"):
                for child in children:
                    self._visit(child)

    def _edits(self, node: ast.AST) -> Iterator[_Edit]:
        match node:
            case ast.Constant(value=bool(value)):
                yield self._replace(node, str(not value))
            case ast.Constant(value=int(value) | float(value)):
                yield self._replace(node, repr(value + 1))
            case ast.Attribute(attr="deepcopy"):
                yield _Edit(self._end(node) - len("deepcopy"), self._end(node), "copy")
            case ast.BinOp(left=left, op=operator, right=right):
                yield from self._swap(operator, self._end(left), self._start(right))
            case ast.UnaryOp(op=operator, operand=operand):
                yield from self._swap(operator, self._start(node), self._start(operand))
            case ast.BoolOp(op=operator, values=values):
                for left, right in pairwise(values):
                    yield from self._swap(operator, self._end(left), self._start(right))
            case ast.Compare(left=first, ops=operators, comparators=others):
                for operator, (left, right) in zip(operators, pairwise([first, *others]), strict=True):
                    yield from self._swap(operator, self._end(left), self._start(right))
            case ast.IfExp(test=test):
                condition = self._source[self._start(test) : self._end(test)].decode()
                for forced in ("and False", "or True"):
                    yield self._replace(test, f"({condition}) {forced}")
            case ast.Break():
                yield self._replace(node, "return")
            case ast.Continue():
                yield self._replace(node, "break")
            case ast.AugAssign(target=target, op=operator, value=value):
                span = self._end(target), self._start(value)
                yield from self._swap(operator, *span)
                yield self._operator(f"{_OPERATORS[type(operator)][0]}=", "=", *span)
                yield self._replace(node, "pass")
            case ast.Expr(value=ast.Call()):
                yield self._replace(node, "pass")
            case ast.Call():
                yield from self._of_call(node)

    def _of_call(self, call: ast.Call) -> Iterator[_Edit]:
        """Call another method, or leave out a keyword argument, so that its default applies."""
        if isinstance(call.func, ast.Attribute) and call.func.attr in _METHODS:
            end = self._end(call.func)
            yield _Edit(end - len(call.func.attr), end, _METHODS[call.func.attr])
        for argument in call.keywords:
            if argument.arg is not None and argument.arg not in _INVISIBLE_KEYWORDS:
                start, end = self._start(argument), self._end(argument)
                if comma := re.compile(rb"\s*,\s*").match(self._source, end):
                    yield _Edit(start, comma.end(), "")
                else:
                    yield _Edit(len(self._source[:start].rstrip().removesuffix(b",")), end, "")

    def _swap(self, operator: ast.AST, start: int, end: int) -> Iterator[_Edit]:
        if type(operator) in _OPERATORS:
            yield self._operator(*_OPERATORS[type(operator)], start, end)

    def _operator(self, symbol: str, text: str, start: int, end: int) -> _Edit:
        """Replace an operator; there is only white space and parentheses beside it between `start` and `end`."""
        pattern = re.escape(symbol).replace(r"\ ", r"\s+") + ("" if text else r"\s*")
        found = re.compile(pattern.encode()).search(self._source, start, end)
        assert found is not None
        return _Edit(found.start(), found.end(), text)

    def _replace(self, node: ast.AST, text: str) -> _Edit:
        return _Edit(self._start(node), self._end(node), text)

    def _start(self, node: ast.AST) -> int:
        return self._line_starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def _end(self, node: ast.AST) -> int:
        return self._line_starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
