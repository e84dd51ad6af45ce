"""The mutants of a module: an operator, number, keyword or condition changed, or a statement or argument left out.

Strings are left as they are, and no value is replaced by `None`: nearly all such mutants are wrong messages, or raise
where they are met. Lines are those of `ast.unparse`, which has each statement on one line and no comments.
"""

import ast
from collections.abc import Iterator
from copy import copy
from typing import NamedTuple


class Mutant(NamedTuple):
    line: int
    before: str
    """The statement, or the first line of one with a block."""
    after: str
    tree: ast.Module
    """The module with the change, until the next mutant is taken."""


class _Change(NamedTuple):
    statement: ast.AST
    node: ast.AST
    field: str
    value: object
    """The new one of the node's field."""
    shown: ast.AST
    """The statement that shows the change."""


_PAIRS: list[tuple[type[ast.AST], type[ast.AST]]] = [
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.LShift, ast.RShift), (ast.BitAnd, ast.BitOr)),
    *((ast.UAdd, ast.USub), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)),
    *((ast.In, ast.NotIn), (ast.And, ast.Or)),
]
_OTHER = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}
_OTHER |= {ast.FloorDiv: ast.Div, ast.Mod: ast.Div, ast.BitXor: ast.BitAnd, ast.Pow: ast.Mult}
_METHODS = {"lower": "upper", "lstrip": "rstrip", "find": "rfind", "ljust": "rjust", "index": "rindex"}
_METHODS |= {"removeprefix": "removesuffix", "partition": "rpartition"}
_METHODS |= {after: before for before, after in _METHODS.items()} | {"deepcopy": "copy"}
_BLOCKS = ("body", "handlers", "cases", "orelse", "finalbody")
_INVISIBLE_KEYWORDS = {"device", "strict"}
"""Left out, they change nothing on a CPU (`device`) or only the message of an error (`strict` of zip)."""


def mutants_of(source: str) -> Iterator[Mutant]:
    """Yield all mutants of a module."""
    tree = ast.parse(source)
    for statement, node, field, value, shown in _changes(tree):
        before, kept = _first_line(statement), getattr(node, field)
        setattr(node, field, value)
        yield Mutant(getattr(statement, "lineno", 0), before, _first_line(shown), tree)
        setattr(node, field, kept)


def _changes(owner: ast.AST) -> Iterator[_Change]:
    """Yield the changes of all statements in the blocks of a module or statement."""
    for field in _BLOCKS:
        block = getattr(owner, field, None)
        for place, statement in enumerate(block if isinstance(block, list) else []):
            for other in _statements(statement):
                yield _Change(statement, owner, field, [*block[:place], other, *block[place + 1 :]], other)
            for node in _visible(statement):
                for name, value in _expressions(node):
                    yield _Change(statement, node, name, value, statement)
            yield from _changes(statement)


def _first_line(statement: ast.AST) -> str:
    """Return a statement, without its decorators and blocks, as `ast.unparse` writes it."""
    shown = copy(statement)
    for name, value in (("decorator_list", []), ("orelse", []), ("body", [ast.Pass()])):
        if hasattr(shown, name):
            setattr(shown, name, value)
    return ast.unparse(shown).splitlines()[0]


def _visible(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those in it, but for blocks, types and what could make the import fail."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("len", "isinstance"):
        return
    yield node
    for name, value in ast.iter_fields(node):
        children = [child for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)]
        if name in ("defaults", "kw_defaults"):
            children = [child for child in children if isinstance(child, ast.Constant)]
        is_block = name in _BLOCKS and isinstance(value, list)
        if name not in ("annotation", "returns", "decorator_list") and not is_block:
            for child in children:
                yield from _visible(child)


def _statements(statement: ast.stmt) -> Iterator[ast.stmt]:
    """Yield what takes a statement's place."""
    match statement:
        case ast.Break():
            yield ast.Return(None)
        case ast.Continue():
            yield ast.Break()
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.AugAssign(target=target, value=value):
            yield ast.Assign([target], value, lineno=statement.lineno)
            yield ast.Pass()


def _expressions(node: ast.AST) -> Iterator[tuple[str, object]]:
    """Yield name and new value of each field of an expression, or of an operator's statement, that a mutant changes."""
    match node:
        case ast.Constant(value=bool(value)):
            yield "value", not value
        case ast.Constant(value=int(value) | float(value)):
            yield "value", value + 1
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            yield "operand", ast.UnaryOp(node.op, operand)  # twice is not at all
        case ast.BinOp(op=operator) | ast.UnaryOp(op=operator) | ast.BoolOp(op=operator) | ast.AugAssign(op=operator):
            if type(operator) in _OTHER:
                yield "op", _OTHER[type(operator)]()
        case ast.Compare(ops=operators):
            for place, operator in enumerate(operators):
                yield "ops", [*operators[:place], _OTHER[type(operator)](), *operators[place + 1 :]]
        case ast.IfExp(test=test):
            yield "test", ast.BoolOp(ast.And(), [test, ast.Constant(False)])
            yield "test", ast.BoolOp(ast.Or(), [test, ast.Constant(True)])
        case ast.Attribute(attr=name) if name in _METHODS:
            yield "attr", _METHODS[name]
        case ast.Call(keywords=keywords):
            for place, keyword in enumerate(keywords):
                if keyword.arg is not None and keyword.arg not in _INVISIBLE_KEYWORDS:
                    yield "keywords", [*keywords[:place], *keywords[place + 1 :]]
