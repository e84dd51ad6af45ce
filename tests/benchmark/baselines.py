"""A network of PyTorch's layers to compare training with, used in its fastest way.

It has the recipe's size. Dropout is applied in the same places as in our network: after the embeddings and on
sub-layer outputs. Masks are passed only for batches with padding. It trains in a plain loop, without Lightning and
without statistics, on padded batches of its own.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from data_module.batch import PaddedBatch, length_batches, pad_batch
from data_module.corpus.store import lengths_with_eos
from data_module.errors import InputError
from data_module.translation_data_module import TranslationDataModule
from model.optimization import build_optimizer, build_schedule
from model.settings import NetworkSettings
from model.transformer import SinusoidalPositions
from pipeline.config.recipe import Recipe

ENDLESS = 1 << 40
"""`max_steps` of a training that ends when the measurement does."""
Precision = tuple[torch.device, torch.dtype]
"""Device to train on, and type of matrix products; with float32 there is no autocast."""
_DEPTHS = ("num_layers", "num_encoder_layers", "num_decoder_layers")
_SHARED = (*_DEPTHS, "d_model", "d_ff", "num_heads", "dropout", "max_positions")
"""Settings that the baseline supports, or that have no effect without `learned_positions`; others are refused."""


class TorchNetwork(nn.Module):
    """Layers of `torch.nn.Transformer` with one matrix for both embeddings and the output projection."""

    def __init__(self, vocabulary_size: int, settings: NetworkSettings) -> None:
        super().__init__()
        shape = {
            "d_model": settings.d_model,
            "nhead": settings.num_heads,
            "dim_feedforward": settings.d_ff,
            "dropout": settings.dropout,
            "batch_first": True,
        }
        self.embedding = nn.Embedding(vocabulary_size, settings.d_model)
        nn.init.normal_(self.embedding.weight, std=settings.d_model**-0.5)
        self.positions = SinusoidalPositions(settings.d_model)
        self.dropout = nn.Dropout(settings.dropout)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(**shape), settings.encoder_layers, enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**shape), settings.decoder_layers)
        for module in self.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0  # of attention weights
            elif isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
                module.dropout.p = 0.0  # inside the feed-forward network

    def embed(self, ids: Tensor) -> Tensor:
        """Embed ids [B, L] to [B, L, D]."""
        x = self.embedding(ids) * math.sqrt(self.embedding.embedding_dim)
        return self.dropout(x + self.positions(0, ids.size(1)))

    def forward(self, source: Tensor, target: Tensor, source_mask: Tensor | None) -> Tensor:
        """Map ids [B, S] and [B, T] and a mask [B, S], True at tokens, or None, to logits [B, T, V]."""
        padding = ~source_mask if source_mask is not None else None
        # `tgt_is_causal` makes attention causal, but PyTorch requires the mask as well.
        causal = nn.Transformer.generate_square_subsequent_mask(target.size(1), source.device)
        with _fast_attention(source.device.type):
            memory = self.encoder(self.embed(source), src_key_padding_mask=padding)
            states = self.decoder(
                self.embed(target), memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=padding
            )
        return F.linear(states, self.embedding.weight)


def _fast_attention(device: str) -> AbstractContextManager[None]:
    """Select PyTorch's unfused kernel for bf16 on a CPU, where the fused one's backward pass takes half of a step."""
    is_slow = device == "cpu" and torch.is_autocast_enabled(device)
    return sdpa_kernel(SDPBackend.MATH) if is_slow else nullcontext()


def cross_entropy(logits: Tensor, targets: Tensor, pad: int, label_smoothing: float) -> Tensor:
    """Return PyTorch's loss of logits [B, T, V] and targets [B, T], summed over targets that are not padding."""
    rows, labels = logits.flatten(0, 1), targets.flatten().long()
    return F.cross_entropy(rows, labels, ignore_index=pad, label_smoothing=label_smoothing, reduction="sum")


def baseline_network(vocabulary_size: int, settings: NetworkSettings) -> TorchNetwork:
    """Create the network; raise InputError if the baseline does not support a setting."""
    plain = type(settings)()
    odd = [key for key, value in vars(settings).items() if key not in _SHARED and value != vars(plain)[key]]
    if odd:
        keys = ", ".join(f"network.{key}" for key in odd)
        raise InputError(f"--baseline torch: has no network with this recipe's {keys}; leave {keys} out to compare")
    return TorchNetwork(vocabulary_size, settings)


class PaddedStep(NamedTuple):
    """The data of a baseline's optimizer step."""

    micro_batches: list[PaddedBatch]
    num_target_tokens: int
    """Without padding."""


class Baseline:
    """The baseline's network, its optimizer and its batches."""

    def __init__(self, recipe: Recipe, vocabulary_size: int, data: TranslationDataModule, precision: Precision) -> None:
        """Prepare to train with the recipe's loss, schedule, optimizer and clipping, as `baseline_network` does.

        Adam takes the place of Muon, which knows the projections of this project's networks only.
        """
        self._device, self._dtype = precision
        network = baseline_network(vocabulary_size, recipe.network)
        self.network = network.to(self._device).train()
        settings = recipe.training
        if settings.optimizer == "muon":
            settings = replace(settings, optimizer="adam", muon_momentum=None)
        self.optimizer = build_optimizer(self.network.parameters(), settings)
        self._settings, self._pad = settings, data.special.pad
        self._schedule = build_schedule(settings, recipe.network.d_model, ENDLESS)
        self._batches = _padded_steps(data, self._device)
        self._num_steps = 0

    def next_step(self) -> PaddedStep:
        """Return the data of the next step, on the device."""
        return next(self._batches)

    def train(self, step: PaddedStep) -> None:
        """Take one optimizer step."""
        settings = self._settings
        self._num_steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self._schedule(self._num_steps)
        # Around the whole step, as in an uncompiled `fit`: weights are cast once and not in every micro-batch.
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            for batch in step.micro_batches:
                logits = self.network(batch.source, batch.target_input, batch.source_mask)
                loss = cross_entropy(logits, batch.target_output, self._pad, settings.label_smoothing)
                (loss / step.num_target_tokens).backward()
        if settings.gradient_clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), settings.gradient_clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _padded_steps(data: TranslationDataModule, device: torch.device) -> Iterator[PaddedStep]:
    """Yield padded batches for networks that cannot pack sentences, endlessly.

    A step is a random set of batches of pairs of similar length, with up to `batch_tokens` padded tokens per side, as
    many programs compose it. A batch has an eighth of that.
    """
    corpus, limit = data.train_corpus, data.settings.batch_tokens
    source, target = lengths_with_eos(corpus.source), lengths_with_eos(corpus.target)
    random = np.random.default_rng(data.seed)

    def step(batches: list[np.ndarray]) -> PaddedStep:
        tokens = sum(int(target[pairs].sum()) for pairs in batches)
        return PaddedStep([pad_batch(corpus, pairs, data.special).to(device) for pairs in batches], tokens)

    while True:
        shuffled = random.permutation(len(source))  # Else pairs of equal lengths would meet in every epoch.
        lengths = np.maximum(source, target)[shuffled].tolist()
        batches = list(length_batches(lengths, max(limit // 8, data.longest), avoids_masks=False, shortest=1))
        taken: list[np.ndarray] = []
        tokens_left = np.array([limit, limit])
        for index in random.permutation(len(batches)):
            pairs = shuffled[batches[index]]
            size = len(pairs) * np.array([source[pairs].max(), target[pairs].max()], np.int64)
            if taken and (size > tokens_left).any():
                yield step(taken)
                taken, tokens_left = [], np.array([limit, limit])
            taken.append(pairs)
            tokens_left -= size
        yield step(taken)
