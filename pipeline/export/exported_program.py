"""`model.pt2`: beam search as one program of torch.export, which PyTorch recommends in place of TorchScript.

The program takes ids [B, S] and a mask [B, S] and returns what `BeamSearch.beam` returns. Beam size, length penalty,
stop rule, number of answers and largest number of extra tokens are constants. Each sentence has N hypotheses from the
first step on; at that step, all but one have probability 0.

A `while_loop` cannot change the shapes of its tensors, and each of its steps returns new tensors, so it copies the
cache. The search is therefore a chain of such loops: between two of them, finished sentences leave and the cache grows.
The last loop has room for the longest answer that the batch allows.

Shapes: B sentences, S source length, N hypotheses per sentence, M answers per sentence, L length of the longest allowed
answer.
"""

import logging
import operator
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import free_symbols

from data_module.errors import InputError
from model import decoding
from model.attention_maps import sharing_copy
from model.transformer import PaddedTransformer, SinusoidalPositions, Transformer, sinusoidal_table
from pipeline.checkpointing.checkpoint import TrainedModel
from pipeline.runtime.torch_private import has_while_loop, while_loop

Specials = tuple[int, int, int, int]
"""Ids of the begin, end, padding and unknown symbols."""
Memory = list[tuple[Tensor, Tensor]]
"""Keys and values of cross-attention of each decoder layer."""
STAGES = 8, 8, 16, 32
"""Positions that the loops before the last one add."""


class ComputedPositions(nn.Module):
    """Sinusoids without a table, whose size would be a limit of the program."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_model = d_model

    def forward(self, start: int, length: int) -> Tensor:
        """Return the encodings [length, D] of positions start to start + length - 1."""
        return sinusoidal_table(length, self.d_model, start)


def with_computed_positions(
    network: Transformer, positions: type[ComputedPositions] = ComputedPositions
) -> Transformer:
    """Return a copy that shares all weights and has no table of sinusoids."""
    network = sharing_copy(network)
    if isinstance(network.positions, SinusoidalPositions):
        network.positions = positions(network.positions.d_model)  # type: ignore[assignment]
    return network


class SearchStep(nn.Module):
    """One position of the search."""

    def __init__(self, network: Transformer, specials: Specials, options: decoding.BeamArguments) -> None:
        super().__init__()
        self.network = PaddedTransformer(with_computed_positions(network))
        bos_id, self.eos_id, pad_id, unk_id = specials
        self.never = [pad_id, bos_id, unk_id]
        self.options, self.vocabulary_size = options, network.vocabulary_size
        self.max_positions = network.positions.max_positions

    def forward(self, state: "_State", memory: Memory, source_mask: Tensor, limits: Tensor) -> "_State":
        """Return the state after one more position, with new tensors: a loop's body may not write to its inputs."""
        options, size = self.options, self.options.beam_size
        position: Any = state.place.item()
        start = position * size
        torch._check(start >= 0)
        paths = state.paths.clone()
        cache = [(k.clone(), v.clone(), *cross) for (k, v), cross in zip(state.keys_values, memory, strict=True)]
        for keys, values, _, _ in cache:
            for slots in (keys.size(2), values.size(2)):
                torch._check(start + size <= slots)
                torch._check(start != slots)
        if self.max_positions > 0:
            torch._check(position < self.max_positions)
        own_slots = torch.eye(size, dtype=torch.bool)
        paths.narrow(2, start, size).copy_(own_slots.expand(paths.size(0), -1, -1))
        used = paths.narrow(2, 0, start + size)
        states = self.network.step(state.last, position, start, cache, source_mask, used)[0]
        log_probs = decoding.next_log_probabilities(self.network.logits(states), self.never)
        forced = torch.where(position + 1 >= limits, self.eos_id, -1)
        values, parents, added = decoding.best_continuations(log_probs, state.totals, forced, size)
        is_end = added == self.eos_id
        answers = decoding.add_answers(
            state.answers, values, parents, is_end, torch.full_like(limits, position), options
        )
        totals, parents, added = decoding.best_open(values.masked_fill(is_end, float("-inf")), parents, added, size)
        row = (parents * self.vocabulary_size + added).unsqueeze(0)
        history = state.history.index_copy(0, state.place.unsqueeze(0), row)
        paths = paths.gather(1, parents.unsqueeze(2).expand(-1, -1, paths.size(2)))
        return _State(state.place + 1, totals, added, paths, history, answers, [layer[:2] for layer in cache])


class SearchProgram(nn.Module):
    """`BeamSearch.beam` in operations that torch.export records."""

    def __init__(self, network: Transformer, specials: Specials, options: decoding.BeamArguments) -> None:
        super().__init__()
        self.next = SearchStep(network, specials, options)
        self.bos_id, self.eos_id, self.pad_id, _ = specials
        self.options, self.vocabulary_size = options, network.vocabulary_size
        self.max_positions = network.positions.max_positions

    def forward(self, source: Tensor, source_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return tokens [B, M, L], lengths, scores and log-probabilities [B, M]; see `BeamResult`.

        Args:
            source: int64 ids [B, S].
            source_mask: bool [B, S], True at tokens.

        Raises RuntimeError if an id is not in the vocabulary, a sentence has no token, or a source is longer than
        learned positions.
        """
        self._check(source, source_mask)
        options, size = self.options, self.options.beam_size
        count, length = source.size(0), source.size(1) + options.max_extra_tokens
        limits = decoding.answer_limits(source_mask.sum(1), options.max_extra_tokens, self.max_positions)
        cache = self.next.network.init_cache(self.next.network.encode(source, source_mask), 0)
        is_first = torch.arange(size) == 0
        state = _State(
            torch.zeros([], dtype=torch.int64),
            torch.where(is_first, 0.0, float("-inf")).expand(count, -1).contiguous(),
            torch.full([count, size], self.bos_id),
            torch.zeros([count, size, 0], dtype=torch.bool),
            torch.zeros([0, count, size], dtype=torch.int64),
            decoding.no_answers(count, options.n_best, source.device),
            [layer[:2] for layer in cache],
        )
        batch = _Batch(torch.arange(count), limits, source_mask, [layer[2:] for layer in cache])
        answers, history = state.answers, state.history
        for index, room in enumerate((*STAGES, length)):
            if index > 0:
                batch, state = self._select_open(batch, state)
            state = self._run(batch, _with_room(state, room))
            answers = decoding.Answers(
                *(a.index_copy(0, batch.sentences, new) for a, new in zip(answers, state.answers, strict=True))
            )
            history = _with_rows(history, room).index_copy(1, batch.sentences, state.history)
        lengths = decoding.answer_lengths(answers, size)
        tokens = self._trace_back(history.narrow(0, 0, length), answers.end_codes.remainder(size), lengths)
        return tokens, lengths, answers.scores, answers.log_probabilities

    def _select_open(self, batch: "_Batch", state: "_State") -> tuple["_Batch", "_State"]:
        """Return the sentences whose search goes on; if there is none, a finished one, which takes no more steps."""
        is_open = self._is_open(state, batch.limits)
        num_open: Any = is_open.sum().clamp(min=1).item()
        torch._check(num_open >= 1)
        torch._check(num_open <= is_open.size(0))
        places = is_open.long().argsort(descending=True, stable=True).narrow(0, 0, num_open)
        memory = [(keys[places], values[places]) for keys, values in batch.memory]
        place, totals, last, paths, history, answers, cache = state
        return (
            _Batch(batch.sentences[places], batch.limits[places], batch.source_mask[places], memory),
            _State(
                place,
                totals[places],
                last[places],
                paths[places],
                history[:, places],
                decoding.Answers(*(part[places] for part in answers)),
                [(keys[places], values[places]) for keys, values in cache],
            ),
        )

    def _is_open(self, state: "_State", limits: Tensor) -> Tensor:
        divisor = decoding.penalty(limits, self.options.length_penalty)
        return decoding.may_improve(state.answers, state.totals, divisor, self.options)

    def _run(self, batch: "_Batch", state: "_State") -> "_State":
        """Search until no sentence is open or the cache is full."""
        # All that a step reads is an input of the loop: torch.export records no variables of the enclosing function.
        parts, weights = state.flat(), dict(self.next.named_parameters())
        _, limits, source_mask, memory = batch
        constants = (limits, source_mask, *(part for layer in memory for part in layer), *weights.values())

        def goes_on(*inputs: Tensor) -> Tensor:
            here, limits = _State.of(inputs[: len(parts)]), inputs[len(parts)]
            return self._is_open(here, limits).any() & (here.place < here.history.size(0))

        def step(*inputs: Tensor) -> tuple[Tensor, ...]:
            here, (limits, source_mask, *others) = _State.of(inputs[: len(parts)]), inputs[len(parts) :]
            memory, values = _pairs(others[: 2 * len(batch.memory)]), others[2 * len(batch.memory) :]
            named = dict(zip(weights, values, strict=True))
            new: _State = torch.func.functional_call(self.next, named, (here, memory, source_mask, limits))
            return new.flat()

        return _State.of(while_loop(goes_on, step, parts, constants))

    def _check(self, source: Tensor, source_mask: Tensor) -> None:
        is_outside = (source < 0) | (source >= self.vocabulary_size)
        torch._assert_async(~is_outside.any(), f"source ids must be 0 .. {self.vocabulary_size - 1}")
        torch._assert_async(source_mask.any(1).all(), "source_mask leaves a sentence without any token")
        if self.max_positions > 0:
            # Counted, because a compiled program does not compare the sizes of its inputs with their bounds.
            is_short = (source >= 0).sum(1) <= self.max_positions
            torch._assert_async(is_short.all(), f"a source has more than the network's {self.max_positions} positions")

    def _trace_back(self, history: Tensor, here: Tensor, lengths: Tensor) -> Tensor:
        """Return the answers' tokens [B, M, L], read from the history [L, B, N] as `BeamSearch` does."""

        def goes_on(step: Tensor, *others: Tensor) -> Tensor:
            return (step >= 0).any()

        def back(step: Tensor, here: Tensor, tokens: Tensor, history: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
            entries, left = history.index_select(0, step)[0], lengths - 1 - step
            row, here = decoding.trace_back(entries, here, left, self.eos_id, self.pad_id, self.vocabulary_size)
            return step - 1, here, tokens.index_copy(0, step, row.unsqueeze(0))

        tokens = torch.full([history.size(0), here.size(0), here.size(1)], self.pad_id)
        tokens = while_loop(goes_on, back, (lengths.max().unsqueeze(0) - 1, here, tokens), (history, lengths))[2]
        return tokens.permute(1, 2, 0)


class _State(NamedTuple):
    """The state of the search, which a step takes and returns: B sentences of one loop, and room for L positions."""

    place: Tensor
    """int64 [], the position of the tokens that the step reads."""
    totals: Tensor
    """float32 [B, N], log-probabilities of the open hypotheses, best first; -inf for a hypothesis that is missing."""
    last: Tensor
    """int64 [B, N], their last tokens."""
    paths: Tensor
    """bool [B, N, L * N], True at the cache slots on their paths."""
    history: Tensor
    """int64 [L, B, N], parent * V + token of each position and hypothesis."""
    answers: decoding.Answers
    keys_values: list[tuple[Tensor, Tensor]]
    """The cache of self-attention of each decoder layer."""

    def flat(self) -> tuple[Tensor, ...]:
        """Return all tensors, in order."""
        return (*self[:5], *self.answers, *(part for layer in self.keys_values for part in layer))

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> "_State":
        """Return the state of these tensors."""
        place, totals, last, paths, history, *others = tensors
        return _State(place, totals, last, paths, history, decoding.Answers(*others[:4]), _pairs(others[4:]))


class _Batch(NamedTuple):
    """The b sentences that one loop of the search decodes."""

    sentences: Tensor
    """int64 [b], their indices in the program's input."""
    limits: Tensor
    """int64 [b], maximum length of an answer."""
    source_mask: Tensor
    """bool [b, S]."""
    memory: Memory
    """Keys and values of cross-attention of each decoder layer."""


def _pairs(tensors: Sequence[Tensor]) -> Memory:
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def _with_room(state: _State, room: int) -> _State:
    """Return the state with room for more positions."""
    slots = room * state.last.size(1)
    pairs = [(F.pad(keys, (0, 0, 0, slots)), F.pad(values, (0, 0, 0, slots))) for keys, values in state.keys_values]
    paths, history = F.pad(state.paths, (0, slots)), _with_rows(state.history, room)
    return state._replace(paths=paths, history=history, keys_values=pairs)


def _with_rows(history: Tensor, room: int) -> Tensor:
    """Return the history [L, B, N] with room for more positions."""
    return F.pad(history, (0, 0, 0, 0, 0, room))


@contextmanager
def quiet() -> Iterator[None]:
    """Hide PyTorch's messages about packages that are not needed and about its own deprecated calls."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def require_exported_program() -> None:
    """Raise InputError if this version of PyTorch cannot export a loop."""
    if not has_while_loop():
        raise InputError(f"PyTorch {torch.__version__} cannot export a search; install 2.12 or 2.13 to write model.pt2")


def write_exported_program(model: TrainedModel, n_best: int, card: str, path: Path) -> None:
    """Write the search that the model's settings describe, and the card, into one file.

    Raises InputError if torch.export cannot record the network.
    """
    tokenizer, settings = model.tokenizer, model.decoding
    options = decoding.BeamArguments(
        settings.beam_size, settings.length_penalty, settings.max_extra_tokens, n_best, settings.stop_rule == "first"
    )
    search = SearchProgram(model.network, tokenizer.search_ids, options).eval()
    try:
        with quiet():
            program = exported_search(search)
    except Exception as error:  # of many types, which torch.export does not document
        reason = " ".join(str(error).split())
        raise InputError(
            f"PyTorch cannot export the search of this network ({reason[:200]}); leave out --format pt2"
        ) from error
    with quiet(), path.open("wb") as file:
        torch.export.save(program, file, extra_files={"card.json": card})


def exported_search(search: SearchProgram) -> torch.export.ExportedProgram:
    """Export a search with a dynamic number of sentences and source length."""
    dynamic = torch.export.Dim.DYNAMIC
    source = torch.full([3, 5], search.eos_id)
    with torch.no_grad():
        program = torch.export.export(search, (source, source >= 0), dynamic_shapes=({0: dynamic, 1: dynamic},) * 2)
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    for graph in graphs:
        for node in graph.find_nodes(op="call_function", target=torch.sym_sum):
            _replace_by_additions(graph, node)
    # Remove bounds of sizes that no graph has: `torch.export.load` would warn of each.
    used = {symbol for graph in graphs for node in graph.nodes for symbol in free_symbols(node.meta.get("val"))}
    for symbol in program.range_constraints.keys() - used:
        del program.range_constraints[symbol]
    return program


def _replace_by_additions(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Replace a sum of sizes, which torch.export cannot save."""
    terms: Any = node.args[0]
    total, *others = terms
    with graph.inserting_before(node):
        for other in others:
            total = graph.call_function(operator.add, (total, other))
            total.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(total)
    graph.erase_node(node)


class ExportedSearch:
    """Calls `model.pt2` like a `BeamSearch`. The program has its own settings; those of the call are ignored."""

    def __init__(self, path: Path) -> None:
        with quiet():
            self.program = torch.export.load(path).module()

    @torch.no_grad()
    def beam(self, source: Tensor, source_mask: Tensor | None, *settings: object) -> decoding.BeamResult:
        """Return the answers to padded ids [B, S]."""
        return decoding.BeamResult(
            *self.program(source, torch.ones_like(source, dtype=torch.bool) if source_mask is None else source_mask)
        )
