"""Stage `decoding`: beam search with networks of the base model's size and beam 4, on synthetic sources."""

from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from model.decoding import BeamSearch
from model.settings import NetworkSettings
from model.transformer import Transformer
from tests.gpu.harvest.batches import SPECIAL
from tests.gpu.harvest.job import Job, per_second


def run_decoding(job: Job) -> None:
    """Run the stage. The weights are random, so nearly all answers reach their limit, source length + 5."""
    base, pieces = NetworkSettings(), 37_000
    if job.tiny:
        base, pieces = NetworkSettings(num_layers=1, d_model=16, d_ff=16, num_heads=2), 100
    for settings in (base, replace(base, num_encoder_layers=12, num_decoder_layers=2)):
        torch.manual_seed(1)
        network = Transformer(pieces, settings).to(job.device)
        for dtype, sentences in product((torch.bfloat16, torch.float32), (2, 3) if job.tiny else (64, 256)):
            search = BeamSearch(network.to(dtype), SPECIAL.bos, SPECIAL.eos, SPECIAL.pad).eval()
            layers = f"{settings.encoder_layers}+{settings.decoder_layers}"
            about = {"layers": layers, "weights": str(dtype).removeprefix("torch."), "sentences": sentences}
            source, mask = sources(sentences, pieces, job.device)
            job.attempt("beam 4", lambda s=search, x=source, m=mask: _measured(job, s, x, m), **about)


def _measured(job: Job, search: BeamSearch, source: Tensor, mask: Tensor) -> dict[str, Any]:
    answers = search.beam(source, mask, 4, 0.6, 5, 1)
    tokens, steps = int(answers.lengths[:, 0].sum()), int(answers.lengths.max())
    milliseconds = job.milliseconds(lambda: search.beam(source, mask, 4, 0.6, 5, 1), repeats=5, warm_up=1)
    return {
        "steps": steps,
        "tokens": tokens,
        "milliseconds": milliseconds,
        "step_milliseconds": milliseconds / steps,
        "tokens_per_second": per_second(tokens, milliseconds),
    }


def sources(sentences: int, pieces: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random sources of 22 to 32 tokens, 27 on average, and their mask."""
    draws = torch.Generator().manual_seed(1)
    lengths = torch.randint(22, 33, (sentences,), generator=draws)
    source = torch.randint(4, pieces, (sentences, int(lengths.max())), generator=draws)
    mask = torch.arange(source.size(1)) < lengths[:, None]
    source[~mask] = SPECIAL.pad
    source[torch.arange(sentences), lengths - 1] = SPECIAL.eos
    return source.to(device), mask.to(device)
