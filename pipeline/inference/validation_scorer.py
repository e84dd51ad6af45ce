"""Scores a network on the validation text of its corpus: negative log-likelihood, and BLEU of greedy translations."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_module.batching.batch import PaddedBatch, SpecialIds, pad_batch
from data_module.batching.length_buckets import LengthBucket
from data_module.corpus.manifest import TOKENIZER_NAME
from data_module.corpus.store import lengths_with_eos, open_corpus
from data_module.errors import InputError
from data_module.tokenization.tokenizer import Tokenizer
from model.decoding import BeamSearch
from model.loss import label_smoothed_loss
from model.settings import DecodingSettings
from model.transformer import Transformer
from pipeline.inference.metrics import corpus_score, metrics_on
from pipeline.inference.translator import batches_by_length

_BATCH_TOKENS = 4096
"""Upper bound on the padded source tokens of a batch."""


class ValidationScorer:
    """Scores what the network's weights are at the time of the call, on the network's device.

    Both scores are those that a run logs of its validations, in float32.
    """

    def __init__(
        self,
        network: Transformer,
        tokenizer: Tokenizer,
        decoding: DecodingSettings,
        folder: Path,
        bleu_tokenizer: str,
    ) -> None:
        """Open the validation text.

        Args:
            network: the network, in evaluation mode.
            tokenizer: the tokenizer that it was trained with.
            decoding: the recipe's `decoding:`; only the length limit is used.
            folder: the prepared corpus.
            bleu_tokenizer: sacreBLEU's tokenizer for BLEU.

        Raises:
            InputError: the corpus is gone or incomplete, or was made with another tokenizer.
        """
        self.network = network
        self._tokenizer, self._decoding = tokenizer, decoding
        self._special = SpecialIds(pad=tokenizer.pad_id, bos=tokenizer.bos_id, eos=tokenizer.eos_id)
        self._corpus = open_corpus(folder, "validation")
        if Tokenizer.load(folder / TOKENIZER_NAME).sha256 != tokenizer.sha256:
            raise InputError(f"{folder}: has another vocabulary than the run")
        references = (folder / "validation.target.txt").read_text(encoding="utf-8").split("\n")[:-1]
        self._references = tokenizer.lower(references) if tokenizer.lowercase else references
        self._bleu = metrics_on(bleu_tokenizer)["bleu"]

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self._corpus)

    @property
    def signature(self) -> str:
        """BLEU's signature."""
        return self._bleu.signature()

    @torch.inference_mode()
    def negative_log_likelihood(self, progress: Any) -> float:
        """Return the mean over target tokens, in nats; `progress.update(pairs)` is called after each batch."""
        total, tokens = 0.0, 0
        for batch in self._batches():
            states = self.network(batch.source, batch.target_input, batch.source_mask)
            sums = label_smoothed_loss(*self.network.as_product(states), batch.target_output, 0.0, self._special.pad)
            total += float(sums.negative_log_likelihood)
            tokens += int((batch.target_output != self._special.pad).sum())
            progress.update(len(batch.pairs))
        return total / tokens

    @torch.inference_mode()
    def bleu(self, progress: Any) -> float:
        """Return BLEU in percent of greedy translations, as validation does; see `negative_log_likelihood`."""
        hypotheses = [""] * len(self)
        search = BeamSearch(self.network, self._special.bos, self._special.eos, self._special.pad)
        for batch in self._batches():
            answers = search.greedy(batch.source.long(), batch.source_mask, self._decoding.max_extra_tokens)
            rows = zip(answers.tokens.tolist(), answers.lengths.tolist(), strict=True)
            texts = self._tokenizer.decode([row[: length - 1] for row, length in rows])
            for pair, text in zip(batch.pairs.tolist(), texts, strict=True):
                hypotheses[pair] = text
            progress.update(len(batch.pairs))
        return corpus_score(self._bleu, hypotheses, self._references)

    def _batches(self) -> Iterator[PaddedBatch]:
        """Yield all pairs, the longest sources first."""
        source, target = (
            lengths_with_eos(side).astype(np.int64) for side in (self._corpus.source, self._corpus.target)
        )
        device = self.network.embedding.weight.device
        for pairs in batches_by_length(source.tolist(), _BATCH_TOKENS):
            rows = np.array(pairs)
            bucket = LengthBucket(rows, int(source[rows].max()), int(target[rows].max()))
            yield pad_batch(self._corpus, bucket, self._special).to(device)
