"""Greedy and beam search (section 6.1) over token ids, and sampling.

An answer is a sequence of tokens followed by the end symbol. Its length, its limit and its log-probability include
the end symbol. A hypothesis that reaches its limit is continued with the end symbol only, and one that is shorter than
a given target prefix with the prefix's next token only, at the probability that the network assigns to it. So every
score equals what teacher forcing computes for the answer. The begin, padding and unknown symbols are never chosen, and
their probability is not redistributed.

The key-value cache is a lattice. Each hypothesis of each step writes its keys and values to one slot and attends to the
slots on its own path. Example, beam size 2: the only hypothesis of the first step writes slot 0, and the two that
continue it write slots 1 and 2. If both hypotheses of the third step continue that of slot 2, they write slots 3 and 4.
Their paths are 0, 2, 3 and 0, 2, 4, and slot 1 is on no path any more.
Selecting hypotheses changes the paths, which are masks of a few bytes, and leaves the cache in place: reordering it
would copy all keys and values of all layers in every step. When the cache is full, the slots that are still on a path
are copied to a larger one.

Shapes: B sentences, S source length, N hypotheses per sentence, M answers per sentence, L answer length,
V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.beyond.sampling import Sampling, check_sampling, choose, draw_uniforms
from model.transformer import Cache, PaddedTransformer, Transformer


class GreedyResult(NamedTuple):
    """Result of `BeamSearch.greedy`."""

    tokens: Tensor
    """int64 [B, L]. Each answer ends with the end symbol, then padding."""
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
    """int64 [B, M, L]. Each answer ends with the end symbol, then padding."""
    lengths: Tensor
    """int64 [B, M], including the end symbol."""
    scores: Tensor
    """float32 [B, M], log-probability divided by the length penalty."""
    log_probabilities: Tensor
    """float32 [B, M]."""


class BeamArguments(NamedTuple):
    """Arguments of `BeamSearch.beam`, where they are described."""

    beam_size: int
    length_penalty: float
    max_extra_tokens: int
    n_best: int
    stops_at_first: bool
    sampling: Sampling | None = None
    """How `BeamSearch.sample` draws the next token, with `beam_size` 1. None to take the most probable tokens."""


class Answers(NamedTuple):
    """The best answers found so far, [B, M], best first. Missing answers have score -inf."""

    scores: Tensor
    """float32."""
    log_probabilities: Tensor
    """float32."""
    end_codes: Tensor
    """int64: position * beam_size + the hypothesis that the end symbol was appended to."""
    counts: Tensor
    """int64 [B], number of hypotheses that have ended."""


class _Text(NamedTuple):
    """All sentences of a search, T of them."""

    limits: Tensor
    """int64 [T], maximum length of an answer."""
    offsets: Tensor
    """int64 [T], the index into `history` of the sentence's position 0."""
    history: Tensor
    """int64 [sum of limits, beam_size]: parent * V + token for each sentence, position and hypothesis, where parent is
    the hypothesis that it continues and token the token that it adds."""
    uniforms: Tensor | None
    """float64 [sum of limits, 3], random numbers for each sentence and position; None without sampling."""
    target_prefix: Tensor | None
    """int64 [T, P], the tokens that answers begin with, then padding; None if none are given."""


class _Batch(NamedTuple):
    """The sentences that are being decoded. Finished sentences are removed."""

    sentences: Tensor
    """int64 [B], the sentences' indices in the text."""
    limits: Tensor
    """int64 [B], maximum length of an answer."""
    limit_penalties: Tensor
    """float32 [B], length penalty of an answer of maximum length."""
    totals: Tensor
    """float32 [B, N], log-probabilities of the open hypotheses, best first."""
    last: Tensor
    """int64 [B, N], last tokens of the open hypotheses."""
    paths: Tensor
    """bool [B, N, slots + N], True at the cache slots on each open hypothesis's path. The next step writes the last N
    slots."""
    source_mask: Tensor | None
    """bool [B, S]; None if no source is padded."""


def penalty(length: Tensor, length_penalty: float) -> Tensor:
    """Return ((5 + length) / 6) ** length_penalty in float32 (Wu et al. 2016, equation 14)."""
    return ((5.0 + length.float()) / 6.0) ** length_penalty


def answer_limits(source_lengths: Tensor, max_extra_tokens: int, max_positions: int) -> Tensor:
    """Return the largest length [B] of answers to sources of these lengths [B]; `max_positions` is 0 for no limit."""
    limits = source_lengths + max_extra_tokens
    return limits.clamp(max=max_positions) if max_positions > 0 else limits


def next_log_probabilities(logits: Tensor, never: list[int]) -> Tensor:
    """Return log-probabilities [B, N, V] of the next tokens in float32; -inf for the ids in `never`."""
    log_probs = logits.float().log_softmax(-1)
    for one in never:
        log_probs.select(2, one).fill_(float("-inf"))
    return log_probs


def never_chosen(bos_id: int, pad_id: int, unk_id: int | None) -> list[int]:
    """Return the ids that a search never chooses, the unknown symbol's only if it is given."""
    return [pad_id, bos_id] if unk_id is None else [pad_id, bos_id, unk_id]


def best_continuations(
    log_probs: Tensor, totals: Tensor, forced: Tensor | None, beam_size: int, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the most probable continuations of each sentence, best first.

    Args:
        log_probs: log-probabilities [B, N, V] of the next token of each hypothesis; see `next_log_probabilities`.
        totals: log-probabilities [B, N] of the hypotheses.
        forced: int64 [B], the token that has to follow in each sentence, -1 for any; None if any may in all sentences.
        beam_size: beam size of the search, which may be larger than N.
        chosen: int64 [B, N, 1], the continuation of each hypothesis; None for the most probable ones.

    Returns:
        Log-probabilities, the hypotheses that are continued, and the tokens that are added. Each is
        [B, 2 * beam_size], or smaller if there are fewer continuations. It is [B, 1] if beam_size is 1, since
        greedy search ends at the first end symbol.
    """
    # Each hypothesis has one continuation that ends. So of the best 2 * beam_size continuations, at most beam_size end,
    # and beam_size others can stay open.
    count = 2 * beam_size if beam_size > 1 else 1
    # A sentence's best continuations are among the best of each hypothesis, so the second topk is over few values.
    if chosen is None:
        values, ids = log_probs.topk(min(count, log_probs.size(2)))
    else:
        values, ids = log_probs.gather(2, chosen), chosen
    if forced is not None:
        is_forced, tokens = (forced >= 0)[:, None, None], forced.clamp(min=0)[:, None, None]
        is_first = torch.arange(values.size(2), device=values.device) == 0
        of_token = log_probs.gather(2, tokens.expand(-1, log_probs.size(1), -1))
        only = torch.where(is_first, of_token, float("-inf"))
        values, ids = torch.where(is_forced, only, values), torch.where(is_forced, tokens, ids)
    values = (values + totals.unsqueeze(-1)).flatten(1)
    values, best = values.topk(min(count, values.size(1)))
    return values, best.div(ids.size(2), rounding_mode="floor"), ids.flatten(1).gather(1, best)


def add_answers(
    answers: Answers, values: Tensor, parents: Tensor, is_end: Tensor, positions: Tensor, options: BeamArguments
) -> Answers:
    """Return the best answers among those of earlier steps and the continuations that end in this step.

    Args:
        answers: the best answers of earlier steps.
        values: log-probabilities of the continuations.
        parents: the hypotheses that they continue.
        is_end: bool of the shape of `values`, True where the added token is the end symbol.
        positions: int64 [B], positions of the added tokens.
        options: arguments of the search.
    """
    beam_size = options.beam_size
    ended = values.masked_fill(~is_end, float("-inf"))
    if options.stops_at_first:
        is_late = torch.arange(ended.size(1), device=ended.device) >= beam_size
        # A sentence may take part in some steps after it has finished.
        is_full = (answers.counts >= beam_size).unsqueeze(1)
        ended = ended.masked_fill(is_late | is_full, float("-inf"))
    new_scores = ended / penalty(positions + 1, options.length_penalty).unsqueeze(1)
    scores, best = torch.cat([answers.scores, new_scores], 1).topk(options.n_best)
    new_codes = parents + (positions * beam_size).unsqueeze(1)
    return Answers(
        scores,
        torch.cat([answers.log_probabilities, ended], 1).gather(1, best),
        torch.cat([answers.end_codes, new_codes], 1).gather(1, best),
        answers.counts + (ended > float("-inf")).sum(1),
    )


def best_open(values: Tensor, parents: Tensor, added: Tensor, beam_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return values, parents and tokens [B, N] of the best `beam_size` continuations, given -inf for those that end."""
    values, best = values.topk(min(beam_size, values.size(1)))
    return values, parents.gather(1, best), added.gather(1, best)


def may_improve(answers: Answers, totals: Tensor, limit_penalties: Tensor, options: BeamArguments) -> Tensor:
    """Return bool [B], True for sentences whose search goes on; see `BeamSearch.beam` for the two rules."""
    is_open = totals[:, 0] > float("-inf")
    if options.stops_at_first:
        return is_open & (answers.counts < options.beam_size)
    # A future answer continues an open hypothesis, so its log-probability p is at most the best open total t. It is not
    # longer than the limit, so for alpha >= 0 its penalty is at most that of the limit. Since p <= t <= 0, its score is
    # p / penalty <= t / limit_penalty. If this bound equals the score of the last answer, no better one can follow.
    return is_open & (answers.scores[:, -1] < totals[:, 0] / limit_penalties)


def answer_lengths(answers: Answers, beam_size: int) -> Tensor:
    """Return the lengths [B, M] of answers, 0 of a missing one."""
    lengths = answers.end_codes.div(beam_size, rounding_mode="floor") + 1
    return lengths.masked_fill(answers.scores == float("-inf"), 0)


def trace_back(
    entries: Tensor, here: Tensor, left: Tensor, eos_id: int, pad_id: int, vocabulary_size: int
) -> tuple[Tensor, Tensor]:
    """Return the answers' tokens [B, M] at one position, and the hypotheses [B, M] that they continue.

    Args:
        entries: int64 [B, N], the search's history at this position: for each hypothesis parent * V + token.
        here: int64 [B, M], the hypothesis on each answer's path.
        left: int64 [B, M], number of tokens of each answer after this position: 0 at its end symbol, negative after it.
        eos_id, pad_id: ids of the end and padding symbols.
        vocabulary_size: V.
    """
    entries = entries.gather(1, here)
    others = torch.full_like(entries, pad_id).masked_fill(left == 0, eos_id)
    is_inside = left > 0
    tokens = torch.where(is_inside, entries.remainder(vocabulary_size), others)
    return tokens, torch.where(is_inside, entries.div(vocabulary_size, rounding_mode="floor"), here)


class Searches:
    """Greedy search, beam search and sampling: the methods that `BeamSearch` and the compiled search share."""

    @torch.jit.export
    def greedy(
        self, source: Tensor, source_mask: Tensor | None, max_extra_tokens: int, target_prefix: Tensor | None = None
    ) -> GreedyResult:
        """Append the most probable token at each step until the end symbol. See `beam` for the arguments."""
        answers = self.beam(source, source_mask, 1, 0.0, max_extra_tokens, 1, "exact", target_prefix)
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
        stop_rule: str = "exact",
        target_prefix: Tensor | None = None,
    ) -> BeamResult:
        """Run beam search. A beam of one hypothesis is greedy search.

        Each step considers the 2 * beam_size most probable continuations of a sentence, as the paper's authors' code
        does. Those that end become answers, and the best beam_size of the others stay open. The search of a sentence
        finishes by one of two rules:

        - exact: no open hypothesis can beat its n_best-th answer. Log-probabilities only decrease, so the best open
          one, divided by the penalty of the longest allowed answer, is an upper bound on all future scores.
        - first: beam_size hypotheses have ended. Of the continuations that end, those among the beam_size most
          probable become answers. CTranslate2, fairseq and Hugging Face's `early_stopping=True` do the same.

        Args:
            source: int64 ids [B, S]. Each sentence ends with the end symbol, followed by padding.
            source_mask: bool [B, S], True at tokens. Pass None if no sentence is padded, which is faster.
            beam_size: number of open hypotheses, 1 or more.
            length_penalty: alpha, 0 or more.
            max_extra_tokens: maximum number of tokens that an answer has in addition to the number of its source's
                tokens, both counted with end symbols. Learned positions limit the length too.
            n_best: number of answers per sentence, 1 to beam_size.
            stop_rule: "exact" or "first".
            target_prefix: int64 ids [B, P], padded on the right: the tokens that each answer begins with, fewer than
                its limit. Their log-probability is part of the answer's. None if none are given.

        Raises ValueError if an argument is out of bounds.
        """
        options = BeamArguments(beam_size, length_penalty, max_extra_tokens, n_best, stop_rule == "first")
        if not options.stops_at_first and stop_rule != "exact":
            raise ValueError(f"stop_rule {stop_rule} must be exact or first")
        with torch.no_grad():
            return self._beam(source, source_mask, options, None, target_prefix)

    @torch.jit.export
    def sample(
        self,
        source: Tensor,
        source_mask: Tensor | None,
        lines: Tensor,
        sampling: Sampling,
        max_extra_tokens: int,
        length_penalty: float = 0.0,
        target_prefix: Tensor | None = None,
    ) -> BeamResult:
        """Draw one answer to each sentence, token by token. See `beam` for the other arguments and the result.

        Log-probabilities are those of the network, before temperature, top-k and top-p.

        Args:
            lines: int64 [B], number of each sentence's line. An answer depends on it and on the seed, but not on the
                other sentences.
            sampling: how tokens are drawn.

        Raises ValueError if an argument is out of bounds.
        """
        options = BeamArguments(1, length_penalty, max_extra_tokens, 1, False, sampling)
        with torch.no_grad():
            return self._beam(source, source_mask, options, lines, target_prefix)

    def _beam(
        self,
        source: Tensor,
        source_mask: Tensor | None,
        options: BeamArguments,
        lines: Tensor | None,
        target_prefix: Tensor | None,
    ) -> BeamResult:
        """Run a search, or with `lines` sample, after checking the arguments; see `beam` and `sample`."""
        raise NotImplementedError


class BeamSearch(Searches, nn.Module):
    """Greedy and beam search with a Transformer.

    The module compiles with `torch.jit.script`. Call `eval()` before searching, since dropout is active otherwise.
    The answers to a sentence do not depend on the other sentences in the batch, except for rounding in matrix
    products of different shapes.
    """

    def __init__(self, network: Transformer, bos_id: int, eos_id: int, pad_id: int, unk_id: int | None = None) -> None:
        """Take the network, and the ids of the begin, end, padding and unknown symbols; None if no id is unknown.

        Raises ValueError if the ids are not distinct, or one is outside the vocabulary.
        """
        super().__init__()
        self.network = PaddedTransformer(network)
        self.bos_id, self.eos_id, self.pad_id = bos_id, eos_id, pad_id
        self.never = never_chosen(bos_id, pad_id, unk_id)
        self.vocabulary_size = network.vocabulary_size
        self.special, size = [*self.never, eos_id], network.vocabulary_size
        if len(set(self.special)) != len(self.special) or not all(0 <= one < size for one in self.special):
            raise ValueError(f"special symbols {self.special} must be different ids below {size}")
        # 0 means unlimited.
        self.max_positions = network.positions.max_positions

    def _beam(
        self,
        source: Tensor,
        source_mask: Tensor | None,
        options: BeamArguments,
        lines: Tensor | None,
        target_prefix: Tensor | None,
    ) -> BeamResult:
        check_search(source, source_mask, options, lines, self.vocabulary_size, self.max_positions)
        lengths = torch.full_like(source[:, 0], source.size(1)) if source_mask is None else source_mask.sum(1)
        limits = answer_limits(lengths, options.max_extra_tokens, self.max_positions)
        if target_prefix is not None:
            prefix_lengths(target_prefix, limits, self.vocabulary_size, self.pad_id, self.special)
        history_ends = limits.cumsum(0)
        history = source.new_zeros([int(history_ends[-1]), options.beam_size])
        sampling = options.sampling
        uniforms: Tensor | None = None
        if sampling is not None and lines is not None:
            uniforms = draw_uniforms(sampling.seed, lines, limits)
        text = _Text(limits, history_ends - limits, history, uniforms, target_prefix)
        results = no_answers(source.size(0), options.n_best, source.device)
        self._decode(text, source, source_mask, results, options)
        return self._backtrace(text, results)

    def _decode(
        self, text: _Text, source: Tensor, source_mask: Tensor | None, results: Answers, options: BeamArguments
    ) -> None:
        """Decode until no sentence is open. Writes `text.history` and `results` in place."""
        beam_size, device, uniforms = options.beam_size, source.device, text.uniforms
        steps_between_checks = 1 if device.type == "cpu" else 8
        own_slots = torch.eye(beam_size, dtype=torch.bool, device=device)
        batch, cache = self._begin(text, source, source_mask, options)
        answers = no_answers(source.size(0), options.n_best, device)
        num_left, position, shortest_limit = source.size(0), 0, int(batch.limits.min())
        while num_left > 0:
            # 1. Make room in the cache for the slots of this position.
            if batch.paths.size(2) > cache[0][0].size(2):
                cache, batch = _grow(cache, batch)
            # 2. Find the continuations. Positions stop at limit - 1, where a finished sentence that still takes part
            # overwrites its last row of the history. Only end symbols are ever in that row, and nothing reads them.
            positions = (batch.limits - 1).clamp(max=position)
            history_rows = text.offsets[batch.sentences] + positions
            forced = self._forced(text, batch, position, shortest_limit)
            draws = uniforms[history_rows] if uniforms is not None else None
            values, parents, added = self._step(batch, position, cache, forced, draws, options)
            # 3. Keep the best of those that end as answers, and the best of the others as open hypotheses.
            answers, totals, parents, added = self._select(answers, values, parents, added, positions, options)
            # 4. Note the open hypotheses in the history, and advance by one position.
            entries = parents * self.vocabulary_size + added
            text.history[:, : totals.size(1)].index_copy_(0, history_rows, entries)
            batch = _advance(batch, totals, parents, added, own_slots)
            position += 1
            # 5. Check which sentences have finished. Each check makes the host wait for a GPU. There, checks are rare,
            # and sentences take part in some steps after they have finished. Their answers do not change: by the rule
            # "exact" no better answer can follow, and by "first" `add_answers` adds none.
            if position % steps_between_checks != 0:
                continue
            is_open = may_improve(answers, batch.totals, batch.limit_penalties, options)
            open_indices = is_open.nonzero().squeeze(1)
            num_left = open_indices.size(0)
            if num_left == batch.sentences.size(0):
                continue
            # 6. Store the answers, and remove the finished sentences.
            _store(results, batch.sentences, answers)
            if num_left == 0:
                continue
            cache, batch, answers = _remove_finished(cache, batch, answers, is_open, open_indices)

    def _begin(
        self, text: _Text, source: Tensor, source_mask: Tensor | None, options: BeamArguments
    ) -> tuple[_Batch, Cache]:
        """Encode the sentences; return the batch, with one empty hypothesis for each sentence, and its cache."""
        # Enough for 8 positions. Most answers need much less than the longest allowed one; `_grow` about doubles the
        # cache when it is full.
        num_slots = min(int(text.limits.max()), 8) * options.beam_size
        cache = self.network.init_cache(self.network.encode(source, source_mask), num_slots)
        count, device = source.size(0), source.device
        batch = _Batch(
            torch.arange(count, device=device),
            text.limits,
            penalty(text.limits, options.length_penalty),
            torch.zeros([count, 1], device=device),
            torch.full([count, 1], self.bos_id, device=device),
            torch.ones([count, 1, 1], dtype=torch.bool, device=device),
            source_mask,
        )
        return batch, cache

    def _forced(self, text: _Text, batch: _Batch, position: int, shortest_limit: int) -> Tensor | None:
        """Return the token [B] that has to follow in each sentence, -1 for any; None if any may in all sentences."""
        prefix = text.target_prefix
        forced: Tensor | None = None
        if position + 1 >= shortest_limit:
            any_token = torch.full_like(batch.limits, -1)
            forced = any_token.masked_fill_(position + 1 >= batch.limits, self.eos_id)
        # A prefix is shorter than the limit, so no token is forced by both.
        if prefix is not None and position < prefix.size(1):
            given = prefix[batch.sentences, position]
            others = torch.full_like(given, -1) if forced is None else forced
            forced = torch.where(given == self.pad_id, others, given)
        return forced

    def _step(
        self,
        batch: _Batch,
        position: int,
        cache: Cache,
        forced: Tensor | None,
        draws: Tensor | None,
        options: BeamArguments,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the decoder for one position and return the most probable continuations of each sentence, best first.

        Args:
            batch: the sentences. N is smaller than the beam size in the first steps.
            position: position of the tokens that the step reads.
            cache: with room for this step's slots, which are written in place.
            forced: what `_forced` returned.
            draws: float64 [B, 3], random numbers that choose the continuation; None for the most probable ones.
            options: arguments of the search.

        Returns:
            What `best_continuations` returns.
        """
        start, beam_size, sampling = _used_slots(batch), options.beam_size, options.sampling
        # The path of a beam's only hypothesis has all slots.
        path_mask = batch.paths if beam_size > 1 else None
        if self.max_positions > 0:
            position = min(position, self.max_positions - 1)  # only finished sentences would exceed it
        states = self.network.step(batch.last, position, start, cache, batch.source_mask, path_mask)[0]
        log_probs = next_log_probabilities(self.network.logits(states), self.never)
        chosen: Tensor | None = None
        if draws is not None and sampling is not None:
            chosen = choose(log_probs[:, 0], draws, sampling)[:, None, None]
        return best_continuations(log_probs, batch.totals, forced, beam_size, chosen)

    def _select(
        self,
        answers: Answers,
        values: Tensor,
        parents: Tensor,
        added: Tensor,
        positions: Tensor,
        options: BeamArguments,
    ) -> tuple[Answers, Tensor, Tensor, Tensor]:
        """Split what `_step` returned into answers and open hypotheses, and keep the best of each.

        Returns:
            The best answers, then the log-probabilities, parents and tokens [B, N] of the open hypotheses, best first.
        """
        is_end, size = added == self.eos_id, options.beam_size
        # On a GPU the check would cost more than the work it saves.
        if added.device.type == "cpu" and not bool(is_end.any()):
            return answers, values[:, :size], parents[:, :size], added[:, :size]
        answers = add_answers(answers, values, parents, is_end, positions, options)
        values, parents, added = best_open(values.masked_fill(is_end, float("-inf")), parents, added, size)
        return answers, values, parents, added

    def _backtrace(self, text: _Text, answers: Answers) -> BeamResult:
        """Read the answers' tokens from the history, from the last token to the first."""
        scores, log_probabilities = answers.scores, answers.log_probabilities
        beam_size, vocabulary_size = text.history.size(1), self.vocabulary_size
        lengths = answer_lengths(answers, beam_size)
        longest = int(lengths.max())
        # The hypothesis [T, M] on each answer's path, at first the one to which the end symbol was added. Its entry in
        # the history is parent * V + token: the answer's token at this position, and the hypothesis one position back.
        here = answers.end_codes.remainder(beam_size)
        tokens = here.new_full([longest, here.size(0), here.size(1)], self.pad_id)
        for step in range(longest - 1, -1, -1):
            entries = text.history[text.offsets + (text.limits - 1).clamp(max=step)]
            tokens[step], here = trace_back(
                entries, here, lengths - 1 - step, self.eos_id, self.pad_id, vocabulary_size
            )
        return BeamResult(tokens.permute(1, 2, 0), lengths, scores, log_probabilities)


def no_answers(batch_size: int, n_best: int, device: torch.device) -> Answers:
    """Return the answers at the beginning of a search."""
    scores = torch.full([batch_size, n_best], float("-inf"), device=device)
    end_codes = torch.full_like(scores, -1, dtype=torch.int64)
    return Answers(scores, scores.clone(), end_codes, end_codes.new_zeros([batch_size]))


def _store(results: Answers, sentences: Tensor, answers: Answers) -> None:
    """Write the answers of a batch's sentences to the results, in place."""
    results.scores.index_copy_(0, sentences, answers.scores)
    results.log_probabilities.index_copy_(0, sentences, answers.log_probabilities)
    results.end_codes.index_copy_(0, sentences, answers.end_codes)


def _advance(batch: _Batch, totals: Tensor, parents: Tensor, added: Tensor, own_slots: Tensor) -> _Batch:
    """Return the batch at the next position, with the hypotheses that continue `parents` by `added`."""
    num_open = parents.size(1)
    paths = batch.paths.gather(1, parents.unsqueeze(2).expand(-1, -1, batch.paths.size(2)))
    # A new path is that of the continued hypothesis and a slot of its own: hypothesis n has slot n of the next step.
    paths = torch.cat([paths, own_slots[:num_open, :num_open].expand(paths.size(0), -1, -1)], 2)
    return _Batch(batch.sentences, batch.limits, batch.limit_penalties, totals, added, paths, batch.source_mask)


def _used_slots(batch: _Batch) -> int:
    """Return the number of cache slots that earlier steps have written."""
    return batch.paths.size(2) - batch.last.size(1)


def _remove_finished(
    cache: Cache, batch: _Batch, answers: Answers, is_open: Tensor, open_indices: Tensor
) -> tuple[Cache, _Batch, Answers]:
    """Return cache, batch and answers of the open sentences only; `open_indices` are theirs in the batch.

    The last open sentences move to the indices of finished ones. Keeping the order would copy the cache of almost all
    sentences whenever one has finished. Example: of sentences a b c d e, b and c have finished. Of the three
    indices that are left, 1 and 2 are gaps, to which d and e move: a d e.
    """
    num_left = open_indices.size(0)
    gaps = (~is_open[:num_left]).nonzero().squeeze(1)
    movers = open_indices[num_left - gaps.size(0) :]
    order = torch.arange(num_left, device=gaps.device).index_copy_(0, gaps, movers)
    cache = _move_sentences(cache, _used_slots(batch), gaps, movers, num_left)
    return cache, _reordered(batch, order), _reordered_answers(answers, order)


def _reordered(batch: _Batch, order: Tensor) -> _Batch:
    # TorchScript narrows the type of variables only.
    source_mask = batch.source_mask
    return _Batch(
        batch.sentences[order],
        batch.limits[order],
        batch.limit_penalties[order],
        batch.totals[order],
        batch.last[order],
        batch.paths[order],
        source_mask[order] if source_mask is not None else None,
    )


def _reordered_answers(answers: Answers, order: Tensor) -> Answers:
    return Answers(
        answers.scores[order], answers.log_probabilities[order], answers.end_codes[order], answers.counts[order]
    )


def _move_sentences(cache: Cache, used_slots: int, gaps: Tensor, movers: Tensor, num_left: int) -> Cache:
    """Copy the cache entries of the sentences `movers` to the indices `gaps`; keep the first `num_left` sentences."""
    for keys, values, memory_keys, memory_values in cache:
        for entries in (keys[:, :, :used_slots], values[:, :, :used_slots], memory_keys, memory_values):
            entries.index_copy_(0, gaps, entries[movers])
    return [(k[:num_left], v[:num_left], ck[:num_left], cv[:num_left]) for k, v, ck, cv in cache]


def _grow(cache: Cache, batch: _Batch) -> tuple[Cache, _Batch]:
    """Copy the slots that are on a path to a larger cache; return it, and the batch with its paths through it."""
    num_new, used_slots = batch.totals.size(1), _used_slots(batch)
    needed = batch.paths[:, :, :used_slots].any(1)
    num_needed = int(needed.sum(1).max())
    # A sentence that needs fewer slots also keeps some that are on no path. They are sorted, since the slots of a path
    # have to stay in the order of their positions.
    kept_slots = needed.byte().topk(num_needed).indices.sort().values.unsqueeze(1)
    sentences = torch.arange(batch.paths.size(0), device=needed.device)[:, None, None]
    heads = torch.arange(cache[0][0].size(1), device=needed.device)[:, None]
    num_slots = num_needed + max(8 * num_new, num_needed)
    larger: Cache = []
    for keys, values, source_keys, source_values in cache:
        new_keys = keys.new_empty([keys.size(0), keys.size(1), num_slots, keys.size(3)])
        new_values = values.new_empty([values.size(0), values.size(1), num_slots, values.size(3)])
        for old, new in ((keys, new_keys), (values, new_values)):
            new[:, :, :num_needed] = old[sentences, heads, kept_slots]
        larger.append((new_keys, new_values, source_keys, source_values))
    kept = batch.paths.gather(2, kept_slots.expand(-1, batch.paths.size(1), -1))
    paths = torch.cat([kept, batch.paths[:, :, used_slots:]], 2)
    batch = _Batch(
        batch.sentences, batch.limits, batch.limit_penalties, batch.totals, batch.last, paths, batch.source_mask
    )
    return larger, batch


def check_search(
    source: Tensor,
    source_mask: Tensor | None,
    options: BeamArguments,
    lines: Tensor | None,
    vocabulary_size: int,
    max_positions: int,
) -> None:
    """Raise ValueError if an argument of `BeamSearch.beam` or `sample` is out of bounds.

    `max_positions` is 0 for no limit.
    """
    if source.dim() != 2 or source.size(0) == 0 or source.size(1) == 0:
        raise ValueError(f"source ids must be [sentences, tokens] with one or more of each, not {source.shape}")
    if source.dtype != torch.int64:
        raise ValueError(f"source ids must be int64, not {source.dtype}")
    if int(source.min()) < 0 or int(source.max()) >= vocabulary_size:
        raise ValueError(f"source ids must be 0 .. {vocabulary_size - 1}")
    if source_mask is not None:
        if source_mask.dtype != torch.bool or source_mask.shape != source.shape:
            raise ValueError(f"source_mask must be bool of shape {source.shape}")
        if not bool(source_mask.any(1).all()):
            raise ValueError("source_mask leaves a sentence without any token")
    if max_positions > 0 and source.size(1) > max_positions:
        raise ValueError(f"a source of {source.size(1)} tokens is longer than the network's {max_positions} positions")
    if options.beam_size < 1:
        raise ValueError(f"beam_size {options.beam_size} must be 1 or more")
    if options.n_best < 1 or options.n_best > options.beam_size:
        raise ValueError(f"n_best {options.n_best} must be 1 .. beam_size {options.beam_size}")
    if not 0.0 <= options.length_penalty < float("inf"):
        raise ValueError(f"length_penalty {options.length_penalty} must be 0 or more")
    if options.max_extra_tokens < 0:
        raise ValueError(f"max_extra_tokens {options.max_extra_tokens} must be 0 or more")
    sampling = options.sampling
    if sampling is not None:
        check_sampling(sampling)
    if lines is not None and (lines.dtype != torch.int64 or lines.size() != source.size()[:1]):
        raise ValueError(f"lines must be int64 of shape [{source.size(0)}], not {lines.dtype} {lines.shape}")


def prefix_lengths(
    target_prefix: Tensor, limits: Tensor, vocabulary_size: int, pad_id: int, special: list[int]
) -> Tensor:
    """Return the number of tokens [B] of each target prefix.

    Args:
        target_prefix: as for `BeamSearch.beam`.
        limits: int64 [B], maximum length of an answer.
        vocabulary_size: V.
        pad_id: id of the padding symbol.
        special: ids that are no pieces, padding among them.

    Raises ValueError if a prefix is not made of pieces, or is as long as the limit.
    """
    if target_prefix.dtype != torch.int64 or target_prefix.size()[:-1] != limits.size():
        raise ValueError(
            f"target_prefix must be int64 of shape [{limits.size(0)}, tokens], not {target_prefix.dtype} "
            f"{target_prefix.shape}"
        )
    is_padding = target_prefix == pad_id
    lengths = (~is_padding).sum(1)
    is_behind = torch.arange(target_prefix.size(1), device=lengths.device) >= lengths.unsqueeze(1)
    is_wrong = (is_padding != is_behind) | (target_prefix < 0) | (target_prefix >= vocabulary_size)
    for one in special:
        is_wrong |= (target_prefix == one) & ~is_padding
    if bool(is_wrong.any()):
        raise ValueError(f"target_prefix must be ids of pieces, 0 .. {vocabulary_size - 1}, with padding behind them")
    if bool((lengths >= limits).any()):
        raise ValueError("target_prefix is as long as an answer may be with its end symbol")
    return lengths
