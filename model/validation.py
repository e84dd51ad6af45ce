"""One validation: the loss over all target tokens, and translations by greedy search."""

from collections.abc import Callable

import torch
from torch import Tensor

from data_module.batch import PaddedBatch, SpecialIds
from model.backend import GreedySearch, Search, weights_cast_once
from model.loss import LossSums
from model.transformer import Transformer


class Validation:
    """The sums and the search of one validation, on one rank. It is no module, so that no checkpoint contains it."""

    def __init__(
        self,
        search: Search,
        special: SpecialIds,
        max_extra_tokens: int,
        names: list[str],
        of_pair: Tensor | None,
        device: torch.device,
    ) -> None:
        """Start with sums of zero; for `names` and `of_pair`, see `TranslationModule.report_sources`."""
        self.sums = torch.zeros(4, max(1, len(names)), dtype=torch.float64, device=device)
        """[4, sources]: loss, negative log-likelihood, correct predictions and number of target tokens."""
        self._names, self._of_pair = names, None if of_pair is None else of_pair.to(device)
        self._special, self._max_extra_tokens = special, max_extra_tokens
        self._make_search = search.function
        self._search: GreedySearch | None = None
        self._losses: dict[str, float] = {}

    def step(self, batch: PaddedBatch, losses: LossSums, network: Transformer) -> tuple[Tensor, Tensor, Tensor] | None:
        """Add a batch's losses to the sums, and decode the sources of a batch that is translated with greedy search.

        Returns:
            Pair indices [B], the answers' ids [B, L] and their lengths [B]; None for a batch that is not translated.
        """
        # Indexed by a tensor: a number would make the host wait for the device.
        source = slice(None) if self._of_pair is None else self._of_pair[batch.pairs[:1].long()]
        num_tokens = (batch.target_output != self._special.pad).sum()
        self.sums[:, source] += torch.stack([one.double() for one in (*losses, num_tokens)])[:, None]
        return (batch.pairs, *self._greedy(batch, network)) if batch.is_translated else None

    def _greedy(self, batch: PaddedBatch, network: Transformer) -> tuple[Tensor, Tensor]:
        if self._search is None:  # Made here, once callbacks have put averaged weights in place.
            ids = self._special
            self._search = self._make_search(network, ids.bos, ids.eos, ids.pad, ids.unk)
        # Validation runs in inference mode, in which autocast would cast the weights again for each token.
        with torch.inference_mode(False), torch.no_grad(), weights_cast_once(batch.source.device.type):
            answers = self._search.greedy(batch.source.long(), batch.source_mask, self._max_extra_tokens)
        return answers.tokens, answers.lengths

    def losses(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Return loss, negative log-likelihood, perplexity and accuracy over all ranks' target tokens.

        With several sources, the loss and negative log-likelihood of each are included. All ranks have to call this at
        the end of the validation. The first call adds up the sums of all ranks by `reduce`.
        """
        self._search = None  # Its copy of the weights takes memory.
        if self._losses:
            return self._losses
        total = reduce(self.sums)
        smoothed, negative_log_likelihood, correct, tokens = total.sum(1).tolist()
        *by_source, _, num_tokens = total.tolist()
        self._losses = {
            "validation/loss": smoothed / tokens,
            "validation/negative_log_likelihood": negative_log_likelihood / tokens,
            "validation/perplexity": float(torch.tensor(negative_log_likelihood / tokens).exp()),
            "validation/accuracy": correct / tokens,
        }
        for curve, sums in zip(("loss", "negative_log_likelihood"), by_source, strict=True):
            for name, loss, count in zip(self._names, sums, num_tokens, strict=False):
                if count:
                    self._losses[f"validation/{curve}/{name}"] = loss / count
        return self._losses
