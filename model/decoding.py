"""Greedy and beam search (section 6.1): source ids to target ids, no text.

Whole answers are searched: pieces, up to a limit, then the end symbol, whose probability counts too. An answer's
length and every limit here include the end symbol. At its limit a hypothesis can only end, at the
probability that the network gives to it, so each score is what teacher forcing gives the answer. The begin and
the padding symbol are never chosen; their probability is not spread over the others.

The search keeps a lattice: each open hypothesis of each step has a slot, written once, and a hypothesis attends
to the slots on its own path. Choosing the survivors of a step rewrites the paths, and not the cached keys and
values; only when the cache is full, slots that no path needs any more are left out of a larger one.

Shapes: B sentences, S source length, N hypotheses a sentence, M answers a sentence, L answer length.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.attention import grow_cache
from model.transformer import Transformer


class Greedy(NamedTuple):
    """What `BeamSearch.greedy` returns."""

    tokens: Tensor
    """int64 [B, L], each row ending with the end symbol, then padding."""
    lengths: Tensor
    """int64 [B], the end symbol included."""
    log_probabilities: Tensor
    """float32 [B]."""


class BeamResult(NamedTuple):
    """What `BeamSearch.beam` returns: M different answers a sentence, the best first.

    Where a sentence has fewer than M answers (a vocabulary of toys), the rest have score -inf and length 0.
    """

    tokens: Tensor
    """int64 [B, M, L], each row ending with the end symbol, then padding."""
    lengths: Tensor
    """int64 [B, M], the end symbol included."""
    scores: Tensor
    """float32 [B, M], log-probability over length penalty."""
    log_probabilities: Tensor
    """float32 [B, M]."""


def penalty(length: Tensor, length_penalty: float) -> Tensor:
    """((5 + length) / 6) ** alpha, float32 of length's shape (Wu et al. 2016, equation 14)."""
    return ((5.0 + length.float()) / 6.0) ** length_penalty


class BeamSearch(nn.Module):
    """Greedy and beam search over a Transformer; scripts as it is and is exported so.

    Put it into evaluation mode: otherwise dropout is at work. A sentence's answers do not depend on what else
    is in its batch, but for the rounding of matrix products of other shapes.
    """

    def __init__(self, network: Transformer, bos_id: int, eos_id: int, pad_id: int) -> None:
        """The network, and the ids of the begin, end and padding symbols.

        Raises ValueError where these ids are not three of the vocabulary's.
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
        # Zero: no end.
        self.max_positions = network.positions.max_positions

    @torch.jit.export
    def greedy(self, source: Tensor, source_mask: Tensor | None, max_extra_tokens: int) -> Greedy:
        """The likeliest next token at each step, to the first end symbol; arguments as for `beam`."""
        answers = self.beam(source, source_mask, 1, 0.0, max_extra_tokens, 1)
        return Greedy(answers.tokens[:, 0], answers.lengths[:, 0], answers.log_probabilities[:, 0])

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
        """Beam search; of one hypothesis it is greedy search.

        At each step the 2 * beam_size likeliest continuations of a sentence are looked at, as in the authors'
        own code: those that end become answers, and the best beam_size of the others stay open. A sentence is
        finished when no open hypothesis can beat its n_best-th answer: log-probabilities only fall, so the
        best one's, over the penalty of the longest answer allowed, bounds every score still to come.

        Args:
            source: int64 ids [B, S], each row ending with the end symbol (then padding).
            source_mask: bool [B, S], True at tokens; None where no row is padded, which is faster.
            beam_size: hypotheses kept open, 1 or more.
            length_penalty: alpha, 0 or more.
            max_extra_tokens: an answer has at most its own source's tokens and this many more (end symbols
                counted in both), and no more than the network has learned positions for.
            n_best: how many answers to give, 1 .. beam_size.

        Raises ValueError for arguments outside these bounds.
        """
        self._check(source, source_mask, beam_size, length_penalty, max_extra_tokens, n_best)
        with torch.no_grad():
            return self._beam(source, source_mask, beam_size, length_penalty, max_extra_tokens, n_best)

    def _check(
        self,
        source: Tensor,
        source_mask: Tensor | None,
        beam_size: int,
        length_penalty: float,
        max_extra_tokens: int,
        n_best: int,
    ) -> None:
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
        """The most tokens an answer may have, int64 [B]."""
        if source_mask is not None:
            limits = source_mask.sum(1) + max_extra_tokens
        else:
            limits = torch.full_like(source[:, 0], source.size(1) + max_extra_tokens)
        return limits.clamp(max=self.max_positions) if self.max_positions > 0 else limits

    def _beam(
        self,
        source: Tensor,
        source_mask: Tensor | None,
        beam_size: int,
        length_penalty: float,
        max_extra_tokens: int,
        n_best: int,
    ) -> BeamResult:
        batch_size, device = source.size(0), source.device
        limits = self._limits(source, source_mask, max_extra_tokens)
        shortest_limit, longest_limit = int(limits.min()), int(limits.max())
        # A GPU must not wait for the host at each step.
        on_cpu = device.type == "cpu"
        steps_between_checks = 1 if on_cpu else 8

        cache = self.network.init_cache(self.network.encode(source, source_mask), min(longest_limit, 8) * beam_size)
        used_slots = 0
        # The open hypotheses, best first: at first there is one. Their paths are bool [B, N, slots].
        last = torch.full([batch_size, 1], self.bos_id, device=device)
        totals = torch.zeros([batch_size, 1], device=device)
        paths = torch.ones([batch_size, 1, 1], dtype=torch.bool, device=device)
        slots = torch.eye(beam_size, dtype=torch.bool, device=device)
        # For each step and hypothesis the token it added and the hypothesis it continues: parent * V + token.
        history = torch.zeros([longest_limit, batch_size, beam_size], dtype=torch.int64, device=device)
        # The best answers so far [B, M]; where they end is step * N + the hypothesis that ended in it.
        scores = torch.full([batch_size, n_best], float("-inf"), device=device)
        answers = torch.full_like(scores, float("-inf")), torch.full_like(scores, -1, dtype=torch.int64)
        # What is returned, by the sentences' first places; `rows` are the places of those still in the batch.
        rows = torch.arange(batch_size, device=device)
        found = scores.clone(), scores.clone(), torch.full_like(scores, -1, dtype=torch.int64)
        limit_penalties = penalty(limits, length_penalty)

        for position in range(longest_limit):
            length, num_open = position + 1, totals.size(1)
            if used_slots + num_open > cache[0][0].size(2):
                if beam_size == 1:
                    paths = paths.new_ones([rows.size(0), 1, used_slots + 1])
                cache, paths = grow_cache(cache, paths, used_slots, num_open)
                used_slots = paths.size(2) - num_open
            states = self.network.decode_step(
                last, position, used_slots, cache, source_mask, paths if beam_size > 1 else None
            )
            used_slots += num_open
            values, parents, last = self._continuations(
                states, totals, limits <= length if length >= shortest_limit else None, beam_size
            )

            # Answers: the best of those known and those that end here.
            ends = last == self.eos_id
            if not on_cpu or bool(ends.any()):
                ended = values.masked_fill(~ends, float("-inf"))
                scores, best = torch.cat([scores, ended / ((5.0 + length) / 6.0) ** length_penalty], 1).topk(n_best)
                answers = (
                    torch.cat([answers[0], ended], 1).gather(1, best),
                    torch.cat([answers[1], parents + position * beam_size], 1).gather(1, best),
                )
                # Hypotheses: the best of those that do not end here, still in order.
                values, best = values.masked_fill(ends, float("-inf")).topk(min(beam_size, values.size(1)))
                parents, last = parents.gather(1, best), last.gather(1, best)
            totals, parents, last = values[:, :beam_size], parents[:, :beam_size], last[:, :beam_size]
            num_open = totals.size(1)
            history[position, :, :num_open].index_copy_(0, rows, parents * self.vocabulary_size + last)
            if beam_size > 1:
                own_slots = slots[:num_open, :num_open].expand(rows.size(0), -1, -1)
                paths = paths.gather(1, parents.unsqueeze(2).expand(-1, -1, used_slots))
                paths = torch.cat([paths, own_slots], 2)

            if length % steps_between_checks and length < longest_limit:
                continue
            is_open = scores[:, -1] < totals[:, 0] / limit_penalties
            open_places = is_open.nonzero().squeeze(1)
            num_left = open_places.size(0)
            if num_left == rows.size(0) and length < longest_limit:
                continue
            found[0].index_copy_(0, rows, scores)
            found[1].index_copy_(0, rows, answers[0])
            found[2].index_copy_(0, rows, answers[1])
            if num_left == 0 or length == longest_limit:
                break
            # The last open sentences move to the places of those that have left.
            gaps = (~is_open[:num_left]).nonzero().squeeze(1)
            movers = open_places[num_left - gaps.size(0) :]
            order = torch.arange(num_left, device=device).index_copy_(0, gaps, movers)
            rows, limits, limit_penalties, totals = rows[order], limits[order], limit_penalties[order], totals[order]
            paths, last, scores = paths[order], last[order], scores[order]
            answers = answers[0][order], answers[1][order]
            source_mask = source_mask[order] if source_mask is not None else None
            for keys, values, memory_keys, memory_values in cache:
                for entries in (keys[:, :, :used_slots], values[:, :, :used_slots], memory_keys, memory_values):
                    entries.index_copy_(0, gaps, entries[movers])
            cache = [(k[:num_left], v[:num_left], ck[:num_left], cv[:num_left]) for k, v, ck, cv in cache]

        return self._backtrace(found[0], found[1], found[2], history)

    def _continuations(
        self, states: Tensor, totals: Tensor, must_end: Tensor | None, beam_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The likeliest continuations of each sentence's hypotheses, best first.

        Args:
            states: the decoder's [B, N, D].
            totals: log-probabilities of the hypotheses [B, N].
            must_end: bool [B], the sentences whose hypotheses can only end; None where there are none.
            beam_size: of this search; N may be smaller in its first steps.

        Returns: log-probabilities, the hypotheses they continue and the tokens they add, each [B, 2 * beam_size], or
        fewer where there are no more; [B, 1] where beam_size is 1, since the first end symbol is then final.
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

    def _backtrace(self, scores: Tensor, totals: Tensor, ends: Tensor, history: Tensor) -> BeamResult:
        """Answers [B, M], from their scores, log-probabilities, ends and the steps' history [L, B, N]."""
        beam_size = history.size(2)
        lengths = (ends.div(beam_size, rounding_mode="floor") + 1).masked_fill(scores == float("-inf"), 0)
        longest = int(lengths.max())
        # Backwards: the hypotheses [L, B, M] on each answer's path.
        parents = history.div(self.vocabulary_size, rounding_mode="floor")
        here = ends.remainder(beam_size)
        path = here.new_zeros([longest, here.size(0), here.size(1)])
        for step in range(longest - 2, -1, -1):
            path[step] = here
            here = torch.where(step < lengths - 1, parents[step].gather(1, here), here)
        tokens = history[:longest].remainder(self.vocabulary_size).gather(2, path).permute(1, 2, 0)
        after = torch.arange(longest, device=ends.device) - (lengths.unsqueeze(-1) - 1)
        tokens = tokens.masked_fill(after == 0, self.eos_id).masked_fill(after > 0, self.pad_id)
        return BeamResult(tokens, lengths, scores, totals)
