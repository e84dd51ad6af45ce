"""Greedy and beam search (section 6.1): source ids to target ids, no text.

Whole answers are searched: pieces, up to a limit, then the end symbol, whose probability counts too. An answer's
length and every limit here include the end symbol. At its limit a hypothesis can only end, at the
probability that the network gives to it, so each score is what teacher forcing gives the answer. The begin and
the padding symbol are never chosen; their probability is not spread over the others.

The search keeps a lattice: a position has a slot for each of a sentence's N open hypotheses, written once.
A hypothesis is a path through it. Choosing the survivors of a step rewrites the paths, a few integers, and
not the cached keys and values: a hypothesis attends to the slots on its own path.

Shapes: B sentences, S source length, N hypotheses a sentence, M answers a sentence, L answer length.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.positions import LearnedPositions
from model.transformer import Transformer


class Greedy(NamedTuple):
    """What `Search.greedy` returns."""

    tokens: Tensor
    """int64 [B, L], each row ending with the end symbol, then padding."""
    lengths: Tensor
    """int64 [B], the end symbol included."""
    log_probabilities: Tensor
    """float32 [B]."""


class Answers(NamedTuple):
    """What `Search.beam` returns: M different answers a sentence, the best first.

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


class Search(nn.Module):
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
        positions = network.positions
        # Zero: no end.
        self.max_positions = positions.max_positions if isinstance(positions, LearnedPositions) else 0

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
    ) -> Answers:
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
    ) -> Answers:
        batch_size, device = source.size(0), source.device
        limits = self._limits(source, source_mask, max_extra_tokens)
        shortest_limit, longest_limit = int(limits.min()), int(limits.max())
        # A GPU must not wait for the host at each step.
        steps_between_checks = 1 if device.type == "cpu" else 8

        cache = self.network.init_cache(self.network.encode(source, source_mask))
        slots = torch.arange(beam_size, device=device)
        # The lattice's tokens [B, positions, N]; the slots on each open hypothesis's path [B, N, positions].
        pieces = torch.full([batch_size, 1, beam_size], self.bos_id, device=device)
        paths = slots[None, :, None].repeat(batch_size, 1, 1)
        # At first there is one hypothesis; the others are impossible.
        totals = torch.full([batch_size, beam_size], float("-inf"), device=device)
        totals[:, 0] = 0.0
        # The best answers so far, [B, M].
        scores = torch.full([batch_size, n_best], float("-inf"), device=device)
        ended_totals, ended_lengths = scores.clone(), torch.zeros_like(scores, dtype=torch.int64)
        ended_paths = torch.zeros([batch_size, n_best, 1], dtype=torch.int64, device=device)
        # What is returned, by the sentences' first places; `rows` are the places of those still in the batch.
        rows = torch.arange(batch_size, device=device)
        tokens = torch.full([batch_size, n_best, longest_limit], self.pad_id, device=device)
        all_scores, all_totals, all_lengths = scores.clone(), ended_totals.clone(), ended_lengths.clone()

        for position in range(longest_limit):
            length = position + 1
            path_mask = paths.unsqueeze(-1) == slots if beam_size > 1 else None
            states, cache = self.network.decode_step(pieces[:, -1], position, cache, source_mask, path_mask)
            values, parents, ids = self._continuations(
                states, totals, limits <= length if length >= shortest_limit else None
            )

            # Answers: the best of those known and those that end here.
            ends = ids == self.eos_id
            ended = values.masked_fill(~ends, float("-inf"))
            scores, best = torch.cat([scores, ended / ((5.0 + length) / 6.0) ** length_penalty], 1).topk(n_best)
            ended_totals = torch.cat([ended_totals, ended], 1).gather(1, best)
            ended_lengths = torch.cat([ended_lengths, torch.full_like(ids, length)], 1).gather(1, best)
            path_of = torch.cat([slots[:n_best].expand(rows.size(0), n_best), parents + n_best], 1).gather(1, best)
            known_paths = torch.cat([ended_paths, paths], 1)
            ended_paths = known_paths.gather(1, path_of.unsqueeze(-1).expand(-1, -1, length))

            # Hypotheses: the best of those that do not end here.
            totals, best = values.masked_fill(ends, float("-inf")).topk(beam_size)
            parents = parents.gather(1, best).unsqueeze(-1).expand(-1, -1, length)
            paths = torch.cat([paths.gather(1, parents), slots[None, :, None].expand(rows.size(0), -1, -1)], 2)
            pieces = torch.cat([pieces, ids.gather(1, best).unsqueeze(1)], 1)
            ended_paths = F.pad(ended_paths, [0, 1])

            if length % steps_between_checks and length < longest_limit:
                continue
            bound = totals[:, 0] / penalty(limits, length_penalty)
            is_open = (scores[:, -1] <= bound) & (totals[:, 0] > float("-inf"))
            keep = is_open.nonzero().squeeze(1)
            if length == longest_limit or keep.size(0) <= 0.75 * rows.size(0):
                ended_lengths = ended_lengths.masked_fill(scores == float("-inf"), 0)
                tokens[:, :, :length].index_copy_(0, rows, self._spell(pieces, ended_paths, ended_lengths))
                all_scores[rows], all_totals[rows], all_lengths[rows] = scores, ended_totals, ended_lengths
                if keep.size(0) == 0:
                    break
                rows, limits, totals, scores = rows[keep], limits[keep], totals[keep], scores[keep]
                paths, pieces = paths[keep], pieces[keep]
                ended_paths, ended_totals, ended_lengths = (
                    ended_paths[keep],
                    ended_totals[keep],
                    ended_lengths[keep],
                )
                source_mask = source_mask[keep] if source_mask is not None else None
                cache = [(k[keep], v[keep], ck[keep], cv[keep]) for k, v, ck, cv in cache]

        return Answers(tokens[:, :, : int(all_lengths.max())], all_lengths, all_scores, all_totals)

    def _continuations(self, states: Tensor, totals: Tensor, must_end: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The likeliest continuations of each sentence's hypotheses, best first.

        Args:
            states: the decoder's [B, N, D].
            totals: log-probabilities of the hypotheses [B, N].
            must_end: bool [B], the sentences whose hypotheses can only end; None where there are none.

        Returns: log-probabilities, the hypotheses they continue and the tokens they add, each [B, 2 N];
        [B, 1] where N is 1, since the first end symbol is then final.
        """
        num_hypotheses = totals.size(1)
        steps = self.network.logits(states).float().log_softmax(-1)
        steps[:, :, self.pad_id] = float("-inf")
        steps[:, :, self.bos_id] = float("-inf")
        count = 2 * num_hypotheses if num_hypotheses > 1 else 1
        values, ids = steps.topk(min(count, steps.size(-1)))
        if must_end is not None:
            only_end = torch.full_like(values, float("-inf"))
            only_end[:, :, 0] = steps[:, :, self.eos_id]
            values = torch.where(must_end[:, None, None], only_end, values)
            ids = ids.masked_fill(must_end[:, None, None], self.eos_id)
        values, best = (values + totals.unsqueeze(-1)).flatten(1).topk(count)
        return values, best.div(ids.size(2), rounding_mode="floor"), ids.flatten(1).gather(1, best)

    def _spell(self, pieces: Tensor, paths: Tensor, lengths: Tensor) -> Tensor:
        """The tokens [B, M, L] on the given paths [B, M, L + 1] through the lattice [B, L + 1, N]."""
        tokens = pieces.gather(2, paths.transpose(1, 2)).transpose(1, 2)[:, :, 1:]
        after = torch.arange(tokens.size(2), device=tokens.device) - (lengths.unsqueeze(-1) - 1)
        return tokens.masked_fill(after == 0, self.eos_id).masked_fill(after > 0, self.pad_id)
