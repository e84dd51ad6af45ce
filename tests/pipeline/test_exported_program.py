"""The search of `model.pt2` beside `BeamSearch`, and what it refuses."""

import json
import logging
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch

from data_module.errors import InputError
from data_module.tokenization.tokenizer import Tokenizer
from model.decoding import BeamArguments, BeamResult, BeamSearch
from model.settings import DecodingSettings
from pipeline.checkpointing.checkpoint import TrainedModel
from pipeline.export.exported_program import ExportedSearch, SearchProgram, write_exported_program
from tests.model.search_truth import VOCABULARY_SIZE
from tests.pipeline.test_export import make_model, stops_at_first

SOURCE = torch.tensor([[7, 9, 12, 5, 8, 3], [6, 3, 0, 0, 0, 0], [20, 11, 4, 3, 0, 0], [13, 14, 15, 16, 17, 3]])


def answers(model: TrainedModel, source: torch.Tensor, n_best: int) -> BeamResult:
    tokenizer, decoding = model.tokenizer, model.decoding
    search = BeamSearch(model.network, *tokenizer.search_ids).eval()
    settings = decoding.beam_size, decoding.length_penalty, decoding.max_extra_tokens, n_best, decoding.stop_rule
    return search.beam(source, source > 0, *settings)


def search_of(model: TrainedModel, n_best: int) -> SearchProgram:
    """Return the search as it is before its export."""
    size, penalty, extra, rule = astuple(model.decoding)
    options = BeamArguments(size, penalty, extra, n_best, rule == "first")
    return SearchProgram(model.network, model.tokenizer.search_ids, options).eval()


def assert_equal(found: BeamResult, expected: BeamResult) -> None:
    length = expected.tokens.size(2)
    assert torch.equal(found.tokens[:, :, :length], expected.tokens)
    assert not found.tokens[:, :, length:].any()  # padding
    assert torch.equal(found.lengths, expected.lengths)
    for ours, theirs in zip(found[2:], expected[2:], strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_the_search_with_the_first_stop_rule_and_what_it_refuses(
    tokenizer: Tokenizer, exported_search: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("torch._export.serde.serialize")
    logger.addHandler(caplog.handler)
    model, search = stops_at_first(tokenizer), ExportedSearch(exported_search)
    logger.removeHandler(caplog.handler)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    with ZipFile(exported_search) as archive:
        [card] = [archive.read(name) for name in archive.namelist() if name.endswith("/card.json")]
    assert json.loads(card) == {"name": "letters"}
    expected = answers(model, SOURCE, 2)
    assert_equal(search.beam(SOURCE, SOURCE > 0), expected)
    other = answers(replace(model, decoding=replace(model.decoding, stop_rule="exact")), SOURCE, 2)
    assert not torch.equal(other.lengths, expected.lengths)
    # One sentence, and one token.
    for one in (SOURCE[:1], SOURCE[3:, :1]):
        assert_equal(search.beam(one, None), answers(model, one, 2))
    for source, said in (
        (torch.tensor([[4, VOCABULARY_SIZE, 3]]), f"source ids must be 0 .. {VOCABULARY_SIZE - 1}"),
        (torch.tensor([[4, -1, 3]]), "source ids must be 0 .."),
    ):
        with pytest.raises(RuntimeError, match=said):
            search.beam(source, None)
    with pytest.raises(RuntimeError, match="source_mask leaves a sentence without any token"):
        search.beam(SOURCE, torch.arange(4).unsqueeze(1) > SOURCE)


def test_answers_of_all_stages(tokenizer: Tokenizer) -> None:
    """One sentence leaves after the first stage, the others reach the last."""
    model = stops_at_first(tokenizer)
    torch.manual_seed(1)
    source = torch.randint(4, VOCABULARY_SIZE, (4, 6))
    source[2, 3:] = source[3, 5:] = tokenizer.pad_id  # a mask that each stage has to keep
    model = replace(model, decoding=replace(model.decoding, max_extra_tokens=60))
    expected = answers(model, source, 2)
    lengths = expected.lengths.flatten().tolist()
    assert min(lengths) < 8
    assert max(lengths) > 64
    with torch.no_grad():
        assert_equal(BeamResult(*search_of(model, 2)(source, source > 0)), expected)


@pytest.mark.parametrize(
    ("decoding", "n_best", "shape"),
    [
        ({"beam_size": 1, "length_penalty": 0.0}, 1, {}),
        ({"beam_size": 3, "length_penalty": 1.0, "max_extra_tokens": 0}, 3, {"d_k": 6, "d_v": 10}),
        # Answers end where the positions do, before the number of extra tokens.
        ({"beam_size": 2, "max_extra_tokens": 9}, 1, {"learned_positions": True, "max_positions": 8}),
    ],
)
def test_other_settings(tokenizer: Tokenizer, decoding: dict[str, Any], n_best: int, shape: dict[str, object]) -> None:
    """Of the search as it is before its export; test_export.py exports each shape."""
    model = replace(make_model(tokenizer, **shape), decoding=DecodingSettings(**{"max_extra_tokens": 6, **decoding}))
    for source in (SOURCE, SOURCE[1:2, :2]):
        with torch.no_grad():
            assert_equal(BeamResult(*search_of(model, n_best)(source, source > 0)), answers(model, source, n_best))


class BranchingNorm(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if bool(x.sum() > 0) else -x


def test_a_network_that_cannot_be_exported_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = make_model(tokenizer, num_layers=1)
    model.network.encoder_norm = BranchingNorm()
    with pytest.raises(InputError, match=r"^PyTorch cannot export the search of this network .*; leave out"):
        write_exported_program(model, 1, "{}", tmp_path / "model.pt2")
    assert not any(tmp_path.iterdir())
