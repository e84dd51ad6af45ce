"""Greedy and beam search (section 6.1) over token ids.

An answer is a sequence of pieces followed by the end symbol. Its length, its limit and its log-probability include
the end symbol. A hypothesis that reaches its limit is continued with the end symbol only, at the probability that the
network assigns, so every score equals what teacher forcing computes for the answer. The begin and padding symbols are
never chosen. Their probability is not redistributed.

The key-value cache is a lattice. Each hypothesis of each step writes its keys and values to a slot once and attends to
the slots on its own path. Selecting hypotheses rewrites the paths and leaves the cache in place. When the cache is
full, the slots that are still on a path are copied to a larger one.

Shapes: B sentences, S source length, N hypotheses per sentence, M answers per sentence, L answer length,
V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.attention import grow_cache
from model.transformer import Transformer


class GreedyResult(NamedTuple):
    """Result of `BeamSearch.greedy`."""

    tokens: Tensor
    """int64 [B, L]. Each row ends with the end symbol, then padding."""
    lengths: Tensor
    """int64 [B], including the end symbol."""
    log_probabilities: Tensor
    """float32 [B]."""


class BeamResult(NamedTuple):
    """Result of `BeamSearch.beam`: M distinct answers per sentence, best first.

    If the search finds fewer than M answers, which happens only with very small vocabularies, the remaining ones have
    score -inf and length 0.
    """

    tokens: Tensor
    """int64 [B, M, L]. Each row ends with the end symbol, then padding."""
    lengths: Tensor
    """int64 [B, M], including the end symbol."""
    scores: Tensor
    """float32 [B, M], log-probability divided by the length penalty."""
    log_probabilities: Tensor
    """float32 [B, M]."""


class _Options(NamedTuple):
    """Arguments of `BeamSearch.beam`, where they are described."""

    beam_size: int
    length_penalty: float
    max_extra_tokens: int
    n_best: int


class _Answers(NamedTuple):
    """The best answers found so far, [B, M], best first. Missing answers have score -inf."""

    scores: Tensor
    """float32."""
    log_probabilities: Tensor
    """float32."""
    ends: Tensor
    """int64: step * N + the hypothesis that the end symbol was appended to."""


def penalty(length: Tensor, length_penalty: float) -> Tensor:
    """Return ((5 + length) / 6) ** length_penalty in float32 (Wu et al. 2016, equation 14)."""
    return ((5.0 + length.float()) / 6.0) ** length_penalty


class BeamSearch(nn.Module):
    """Greedy and beam search with a Transformer.

    The module compiles with `torch.jit.script`. Call `eval()` before searching, since dropout is active otherwise.
    The answers to a sentence do not depend on the other sentences in the batch, except for rounding in matrix
    products of different shapes.
    """

    def __init__(self, network: Transformer, bos_id: int, eos_id: int, pad_id: int) -> None:
        """Initialize the search.

        Args:
            network: the trained network.
            bos_id: id of the begin symbol.
            eos_id: id of the end symbol.
            pad_id: id of the padding symbol.

        Raises:
            ValueError: the three ids are not distinct, or one is outside the vocabulary.
        """
        super().__init__()
        self.network = network
        self.bos_id, self.eos_id, self.pad_id = bos_id, eos_id, pad_id
        self.vocabulary_size = network.vocabulary_size
        if len({bos_id, eos_id, pad_id}) != 3 or not all(
            0 <= special < network.vocabulary_size for special in (bos_id, eos_id, pad_id)
        ):
            raise ValueError(
                f"begin {bos_id}, end {eos_id} and padding {pad_id} must be three different ids below "
                f"{network.vocabulary_size}"
            )
        # 0 means unlimited.
        self.max_positions = network.positions.max_positions

    @torch.jit.export
    def greedy(self, source: Tensor, source_mask: Tensor | None, max_extra_tokens: int) -> GreedyResult:
        """Append the most probable token at each step until the end symbol. See `beam` for the arguments."""
        answers = self.beam(source, source_mask, 1, 0.0, max_extra_tokens, 1)
        return GreedyResult(answers.tokens[:, 0], answers.lengths[:, 0], answers.log_probabilities[:, 0])

    @torch.jit.export
    def beam(
        self,
        source: Tensor,
        source_mask: Tensor | None,
        beam_size: int,
        length_penalty: float,
        max_extra_tokens: int,
        n_best: int,
    ) -> BeamResult:
        """Run beam search. A beam of one hypothesis is greedy search.

        Each step considers the 2 * beam_size most probable continuations of a sentence, as the paper's authors' code
        does. Those that end become answers, and the best beam_size of the others stay open. The search of a sentence
        finishes when no open hypothesis can beat its n_best-th answer: log-probabilities only decrease, so the best
        open one, divided by the penalty of the longest allowed answer, is an upper bound on all future scores.

        Args:
            source: int64 ids [B, S]. Each row ends with the end symbol, then padding.
            source_mask: bool [B, S], True at tokens. Pass None if no row is padded, which is faster.
            beam_size: number of open hypotheses, 1 or more.
            length_penalty: alpha, 0 or more.
            max_extra_tokens: maximum number of tokens that an answer has in addition to the number of its source's
                tokens, both counted with end symbols. Learned positions limit the length too.
            n_best: number of answers per sentence, 1 to beam_size.

        Raises:
            ValueError: an argument is out of bounds.
        """
        options = _Options(beam_size, length_penalty, max_extra_tokens, n_best)
        self._check(source, source_mask, options)
        with torch.no_grad():
            return self._beam(source, source_mask, options)

    def _check(self, source: Tensor, source_mask: Tensor | None, options: _Options) -> None:
        beam_size, length_penalty, max_extra_tokens, n_best = options
        if source.dim() != 2 or source.size(0) == 0 or source.size(1) == 0:
            raise ValueError(f"source ids must be [sentences, tokens] with one or more of each, not {source.shape}")
        if source.dtype != torch.int64:
            raise ValueError(f"source ids must be int64, not {source.dtype}")
        if int(source.min()) < 0 or int(source.max()) >= self.vocabulary_size:
            raise ValueError(f"source ids must be 0 .. {self.vocabulary_size - 1}")
        if source_mask is not None:
            if source_mask.dtype != torch.bool or source_mask.shape != source.shape:
                raise ValueError(f"source_mask must be bool of shape {source.shape}")
            if not bool(source_mask.any(1).all()):
                raise ValueError("source_mask leaves a sentence without any token")
        if self.max_positions > 0 and source.size(1) > self.max_positions:
            raise ValueError(
                f"a source of {source.size(1)} tokens is longer than the network's {self.max_positions} positions"
            )
        if beam_size < 1:
            raise ValueError(f"beam_size {beam_size} must be 1 or more")
        if n_best < 1 or n_best > beam_size:
            raise ValueError(f"n_best {n_best} must be 1 .. beam_size {beam_size}")
        if not 0.0 <= length_penalty < float("inf"):
            raise ValueError(f"length_penalty {length_penalty} must be 0 or more")
        if max_extra_tokens < 0:
            raise ValueError(f"max_extra_tokens {max_extra_tokens} must be 0 or more")

    def _limits(self, source: Tensor, source_mask: Tensor | None, max_extra_tokens: int) -> Tensor:
        """Return the maximum length of each sentence's answers, int64 [B]."""
        if source_mask is not None:
            limits = source_mask.sum(1) + max_extra_tokens
        else:
            limits = torch.full_like(source[:, 0], source.size(1) + max_extra_tokens)
        return limits.clamp(max=self.max_positions) if self.max_positions > 0 else limits

    def _beam(self, source: Tensor, source_mask: Tensor | None, options: _Options) -> BeamResult:
        batch_size, device, beam_size = source.size(0), source.device, options.beam_size
        limits = self._limits(source, source_mask, options.max_extra_tokens)
        shortest_limit, longest_limit = int(limits.min()), int(limits.max())
        limit_penalties = penalty(limits, options.length_penalty)
        # Each check synchronizes the host with a GPU.
        steps_between_checks = 1 if device.type == "cpu" else 8

        cache = self.network.init_cache(self.network.encode(source, source_mask), min(longest_limit, 8) * beam_size)
        used_slots = 0
        # Open hypotheses, best first. A sentence starts with one. Paths are bool [B, N, slots].
        last = torch.full([batch_size, 1], self.bos_id, device=device)
        totals = torch.zeros([batch_size, 1], device=device)
        paths = torch.ones([batch_size, 1, 1], dtype=torch.bool, device=device)
        own_slots = torch.eye(beam_size, dtype=torch.bool, device=device)
        # For each step and hypothesis, the hypothesis it continues and the token it adds: parent * V + token.
        history = torch.zeros([longest_limit, batch_size, beam_size], dtype=torch.int64, device=device)
        # Finished sentences leave the batch. `rows` are the indices in `source` and `results` of the others.
        rows = torch.arange(batch_size, device=device)
        answers = _no_answers(batch_size, options.n_best, device)
        results = _no_answers(batch_size, options.n_best, device)

        for position in range(longest_limit):
            length, num_open = position + 1, totals.size(1)
            if used_slots + num_open > cache[0][0].size(2):
                if beam_size == 1:
                    paths = paths.new_ones([rows.size(0), 1, used_slots + 1])
                cache, paths = grow_cache(cache, paths, used_slots, num_open)
                used_slots = paths.size(2) - num_open
            path_mask = paths if beam_size > 1 else None
            states = self.network.decode_step(last, position, used_slots, cache, source_mask, path_mask)
            used_slots += num_open
            must_end = limits <= length if length >= shortest_limit else None
            values, parents, last = self._continuations(states, totals, must_end, beam_size)
            answers, totals, parents, last = self._select(answers, values, parents, last, position, options)
            history[position, :, : totals.size(1)].index_copy_(0, rows, parents * self.vocabulary_size + last)
            if beam_size > 1:
                paths = _extend_paths(paths, parents, own_slots)

            if length % steps_between_checks and length < longest_limit:
                continue
            is_open = answers.scores[:, -1] < totals[:, 0] / limit_penalties
            open_places = is_open.nonzero().squeeze(1)
            num_left = open_places.size(0)
            if num_left == rows.size(0) and length < longest_limit:
                continue
            _store(results, rows, answers)
            if num_left == 0 or length == longest_limit:
                break
            # Move the last open sentences to the places of finished ones.
            gaps = (~is_open[:num_left]).nonzero().squeeze(1)
            movers = open_places[num_left - gaps.size(0) :]
            order = torch.arange(num_left, device=device).index_copy_(0, gaps, movers)
            rows, limits, limit_penalties, totals = rows[order], limits[order], limit_penalties[order], totals[order]
            paths, last = paths[order], last[order]
            answers = _Answers(answers.scores[order], answers.log_probabilities[order], answers.ends[order])
            source_mask = source_mask[order] if source_mask is not None else None
            cache = _move_sentences(cache, used_slots, gaps, movers, num_left)
        return self._backtrace(results, history)

    def _continuations(
        self, states: Tensor, totals: Tensor, must_end: Tensor | None, beam_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the most probable continuations of each sentence's hypotheses, best first.

        Args:
            states: decoder states [B, N, D].
            totals: log-probabilities of the hypotheses [B, N].
            must_end: bool [B], True for sentences whose hypotheses have reached their limit. None if there are none.
            beam_size: number of open hypotheses. N is smaller in the first steps.

        Returns:
            Log-probabilities, the hypotheses that are continued, and the tokens that are added. Each is
            [B, 2 * beam_size], or smaller if there are fewer continuations. It is [B, 1] if beam_size is 1, since
            greedy search ends at the first end symbol.
        """
        steps = self.network.logits(states).float().log_softmax(-1)
        steps[:, :, self.pad_id] = float("-inf")
        steps[:, :, self.bos_id] = float("-inf")
        count = 2 * beam_size if beam_size > 1 else 1
        values, ids = steps.topk(min(count, steps.size(-1)))
        if must_end is not None:
            only_end = torch.full_like(values, float("-inf"))
            only_end[:, :, 0] = steps[:, :, self.eos_id]
            values = torch.where(must_end[:, None, None], only_end, values)
            ids = ids.masked_fill(must_end[:, None, None], self.eos_id)
        values, best = (values + totals.unsqueeze(-1)).flatten(1).topk(min(count, values.size(1) * values.size(2)))
        return values, best.div(ids.size(2), rounding_mode="floor"), ids.flatten(1).gather(1, best)

    def _select(
        self, answers: _Answers, values: Tensor, parents: Tensor, last: Tensor, position: int, options: _Options
    ) -> tuple[_Answers, Tensor, Tensor, Tensor]:
        """Split continuations into answers and open hypotheses, and keep the best of each.

        Args:
            answers: the best answers before this step.
            values, parents, last: what `_continuations` returned.
            position: position of the added tokens, from 0.
            options: arguments of the search.

        Returns:
            The best answers, then the log-probabilities, parents and tokens [B, N] of the open hypotheses, best first.
        """
        beam_size = options.beam_size
        ends = last == self.eos_id
        # On a GPU the check would cost more than the work it saves.
        if last.device.type != "cpu" or bool(ends.any()):
            ended = values.masked_fill(~ends, float("-inf"))
            new_scores = ended / ((5.0 + (position + 1)) / 6.0) ** options.length_penalty
            scores, best = torch.cat([answers.scores, new_scores], 1).topk(options.n_best)
            answers = _Answers(
                scores,
                torch.cat([answers.log_probabilities, ended], 1).gather(1, best),
                torch.cat([answers.ends, parents + position * beam_size], 1).gather(1, best),
            )
            values, best = values.masked_fill(ends, float("-inf")).topk(min(beam_size, values.size(1)))
            parents, last = parents.gather(1, best), last.gather(1, best)
        return answers, values[:, :beam_size], parents[:, :beam_size], last[:, :beam_size]

    def _backtrace(self, answers: _Answers, history: Tensor) -> BeamResult:
        """Read the answers' tokens from the history [L, B, N], from the last token to the first."""
        scores, log_probabilities, ends = answers
        beam_size = history.size(2)
        lengths = (ends.div(beam_size, rounding_mode="floor") + 1).masked_fill(scores == float("-inf"), 0)
        longest = int(lengths.max())
        # The hypotheses [L, B, M] on each answer's path.
        parents = history.div(self.vocabulary_size, rounding_mode="floor")
        here = ends.remainder(beam_size)
        path = here.new_zeros([longest, here.size(0), here.size(1)])
        for step in range(longest - 2, -1, -1):
            path[step] = here
            here = torch.where(step < lengths - 1, parents[step].gather(1, here), here)
        tokens = history[:longest].remainder(self.vocabulary_size).gather(2, path).permute(1, 2, 0)
        after = torch.arange(longest, device=ends.device) - (lengths.unsqueeze(-1) - 1)
        tokens = tokens.masked_fill(after == 0, self.eos_id).masked_fill(after > 0, self.pad_id)
        return BeamResult(tokens, lengths, scores, log_probabilities)


def _no_answers(batch_size: int, n_best: int, device: torch.device) -> _Answers:
    scores = torch.full([batch_size, n_best], float("-inf"), device=device)
    return _Answers(scores, scores.clone(), torch.full_like(scores, -1, dtype=torch.int64))


def _store(results: _Answers, rows: Tensor, answers: _Answers) -> None:
    """Write the answers of a batch to their rows of the results, in place."""
    results.scores.index_copy_(0, rows, answers.scores)
    results.log_probabilities.index_copy_(0, rows, answers.log_probabilities)
    results.ends.index_copy_(0, rows, answers.ends)


def _extend_paths(paths: Tensor, parents: Tensor, own_slots: Tensor) -> Tensor:
    """Return the paths [B, N, slots + N] of the next step's hypotheses: those of their parents and their own slots."""
    num_open = parents.size(1)
    paths = paths.gather(1, parents.unsqueeze(2).expand(-1, -1, paths.size(2)))
    return torch.cat([paths, own_slots[:num_open, :num_open].expand(paths.size(0), -1, -1)], 2)


def _move_sentences(
    cache: list[tuple[Tensor, Tensor, Tensor, Tensor]], used_slots: int, gaps: Tensor, movers: Tensor, num_left: int
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Copy the cache entries of sentences `movers` to the places `gaps`, and keep the first `num_left` sentences."""
    for keys, values, memory_keys, memory_values in cache:
        for entries in (keys[:, :, :used_slots], values[:, :, :used_slots], memory_keys, memory_values):
            entries.index_copy_(0, gaps, entries[movers])
    return [(k[:num_left], v[:num_left], ck[:num_left], cv[:num_left]) for k, v, ck, cv in cache]
