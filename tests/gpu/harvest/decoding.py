"""Stage `decoding`: beam search with networks of the base model's size and beam 4, on synthetic sources."""

from dataclasses import replace
from typing import Any

import torch

from data_module.batching.batch import SpecialIds
from model.decoding import BeamSearch
from model.settings import NetworkSettings
from model.transformer import Transformer
from tests.gpu.harvest.job import Job, per_second

SPECIAL = SpecialIds(pad=0, bos=2, eos=3)
EXTRA_TOKENS = 5


def run(job: Job) -> None:
    """Run the stage. The weights are random, so nearly all answers reach their limit, source length + 5."""
    base, pieces = NetworkSettings(), 37_000
    if job.tiny:
        base, pieces = NetworkSettings(num_layers=1, d_model=16, d_ff=16, num_heads=2), 100
    for settings in (base, replace(base, num_encoder_layers=12, num_decoder_layers=2)):
        _run(job, settings, pieces)


def _run(job: Job, settings: NetworkSettings, pieces: int) -> None:
    torch.manual_seed(1)
    network = Transformer(pieces, settings).to(job.device)
    for dtype in (torch.bfloat16, torch.float32):
        search = BeamSearch(network.to(dtype), SPECIAL.bos, SPECIAL.eos, SPECIAL.pad).eval()
        for sentences in (2, 3) if job.tiny else (64, 256):
            job.attempt(
                "beam 4",
                lambda s=search, n=sentences: _measured(job, s, n),
                layers=f"{settings.encoder_layers}+{settings.decoder_layers}",
                weights=str(dtype).removeprefix("torch."),
                sentences=sentences,
            )


def _measured(job: Job, search: BeamSearch, sentences: int) -> dict[str, Any]:
    source, mask = sources(sentences, search.vocabulary_size, job.device)
    answers = search.beam(source, mask, 4, 0.6, EXTRA_TOKENS, 1)
    tokens, steps = int(answers.lengths[:, 0].sum()), int(answers.lengths.max())
    milliseconds = job.milliseconds(lambda: search.beam(source, mask, 4, 0.6, EXTRA_TOKENS, 1), repeats=5, warm_up=1)
    return {
        "steps": steps,
        "tokens": tokens,
        "milliseconds": milliseconds,
        "step_milliseconds": milliseconds / steps,
        "tokens_per_second": per_second(tokens, milliseconds),
    }


def sources(sentences: int, pieces: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random sources of 22 to 32 tokens, 27 on average, and their mask."""
    draws = torch.Generator().manual_seed(1)
    lengths = torch.randint(22, 33, (sentences,), generator=draws)
    source = torch.randint(4, pieces, (sentences, int(lengths.max())), generator=draws)
    mask = torch.arange(source.size(1)) < lengths[:, None]
    source[~mask] = SPECIAL.pad
    source[torch.arange(sentences), lengths - 1] = SPECIAL.eos
    return source.to(device), mask.to(device)
