"""The mutants of a module: mutmut's operators that change values and conditions, and statements left out."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation import file_mutation, mutators


class Mutant(NamedTuple):
    """One change of a module."""

    module: str
    line: int
    before: str
    after: str
    """The changed line, before and after."""
    operator: str
    source: str
    """The whole module, changed."""


def _leave_out(node: cst.SimpleStatementLine) -> Iterable[cst.CSTNode]:
    """Replace a call whose result is not used, or an augmented assignment, with `pass`."""
    [statement, *more] = node.body
    called = isinstance(statement, cst.Expr) and isinstance(statement.value, cst.Call)
    if not more and (called or isinstance(statement, cst.AugAssign)):
        yield node.with_changes(body=[cst.Pass()])


INVISIBLE_KEYWORDS = {"device", "strict"}
"""Left out, they change nothing on a CPU (`device`) or nothing but the message of an error (`strict` of zip)."""


def _drop_keyword(node: cst.Call) -> Iterable[cst.CSTNode]:
    """Leave out a keyword argument, so that its default applies."""
    for place, argument in enumerate(node.args):
        if argument.keyword is not None and argument.keyword.value not in INVISIBLE_KEYWORDS:
            rest = [*node.args[:place], *node.args[place + 1 :]]
            if rest:
                rest[-1] = rest[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            yield node.with_changes(args=rest)


# Left out of mutmut's: changed strings (messages), arguments and values replaced by None. Nearly all of those raise
# where they are met, so they would raise the score and find nothing.
OPERATORS: list[tuple[type, Any]] = [
    *[
        (kind, operator)
        for kind, operator in mutators.mutation_operators
        if operator
        in (
            mutators.operator_number,
            mutators.operator_name,
            mutators.operator_augmented_assignment,
            mutators.operator_remove_unary_ops,
            mutators.operator_symmetric_string_methods_swap,
            mutators.operator_keywords,
            mutators.operator_swap_op,
            mutators.operator_if_exp,
        )
    ],
    (cst.SimpleStatementLine, _leave_out),
    (cst.Call, _drop_keyword),
]


class _Visitor(file_mutation.MutationVisitor):
    """mutmut's, but it goes into decorated functions: here are no dispatchers that a decorator could not take."""

    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef) and node.decorators:
            return super()._skip_node_and_children(node.with_changes(decorators=()))
        return super()._skip_node_and_children(node)


def mutants_of(module: str, source: str) -> list[Mutant]:
    """All mutants of a module, in the order of their lines."""
    file_mutation.mutation_operators = OPERATORS
    file_mutation.MutationVisitor = _Visitor
    tree, mutations, *_ = file_mutation.create_mutations(module, source)
    places = MetadataWrapper(tree, unsafe_skip_copy=True).resolve(PositionProvider)
    lines = source.splitlines()
    mutants = []
    for mutation in mutations:
        changed = tree.deep_replace(mutation.original_node, mutation.mutated_node).code  # type: ignore[union-attr]
        first = places[mutation.original_node].start.line if mutation.original_node in places else 0
        number = _first_difference(lines, changed.splitlines(), first)
        after = changed.splitlines()[number - 1].strip() if number <= len(changed.splitlines()) else ""
        kind = f"{type(mutation.original_node).__name__} -> {type(mutation.mutated_node).__name__}"
        mutants.append(Mutant(module, number, lines[number - 1].strip(), after, kind, changed))
    return sorted(mutants, key=lambda mutant: mutant.line)


def _first_difference(before: list[str], after: list[str], otherwise: int) -> int:
    """The number of the first line that differs."""
    for number, (one, other) in enumerate(zip(before, after, strict=False), 1):
        if one != other:
            return number
    return otherwise or len(before)
