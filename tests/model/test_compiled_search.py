"""The compiled search beside PyTorch's operators; tests/model/test_decoding.py compares both with enumeration."""

import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from model.decoding import BeamArguments
from model.fast.compiled_search import (
    BEAM_SIZE,
    EXTRA_TOKENS,
    LENGTH_PENALTY,
    SOURCES,
    CompiledSearch,
    agreement_cases,
    unsupported,
)
from model.layers import ACTIVATIONS, NORMS
from model.settings import NetworkSettings
from pipeline.runtime.compiled_code import find_compiler
from tests.model.search_truth import (
    BOS,
    EOS,
    LENGTHS,
    PAD,
    SEARCHES,
    answers_of,
    assert_finds,
    compiled_library,
    fixed_network,
    forced_log_probability,
    make_network,
    make_sources,
    penalized,
    plain_beam,
    references,
    tolerance,
    trained_network,
)

VARIANTS: dict[str, dict[str, object]] = {
    "odd sizes, deep encoder": {
        **{"d_model": 42, "d_ff": 70, "num_heads": 3, "d_k": 9, "d_v": 21},
        **{"num_encoder_layers": 3, "num_decoder_layers": 1},
    },
    "odd sizes, pre-norm": {"d_model": 42, "d_ff": 70, "num_heads": 3, "pre_norm": True},
    "learned positions": {"learned_positions": True, "max_positions": 30},
    "swish and an output bias": {"activation": "swish", "output_bias": True},
}


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("variant", VARIANTS)
def test_finds_what_a_plain_search_finds(variant: str) -> None:
    # The vocabulary takes two chunks and a part of a panel.
    network = make_network(11, 1100, sharpness=1.5, **VARIANTS[variant])
    if isinstance(network.projection.bias, Tensor):
        nn.init.normal_(network.projection.bias)
    search = SEARCHES["compiled"](network)
    search.max_tokens = 48
    source, mask = make_sources(LENGTHS, 1100)
    for beam_size, n_best, rule in ((1, 1, "first"), (4, 4, "exact"), (5, 2, "first")):
        options = BeamArguments(beam_size, 0.6, 6, n_best, rule == "first")
        found, num_steps = search.search(source.repeat(2, 1), mask.repeat(2, 1), options)
        assert_finds(network, found, references(network, beam_size, 0.6, 6, rule == "first") * 2)
        assert (num_steps >= found.lengths[:, 0]).all()


def test_a_sentence_has_the_same_answers_in_all_company_to_the_last_bit(threads: Callable[[int], None]) -> None:
    source, mask = make_sources(LENGTHS * 4)
    search = SEARCHES["compiled"](trained_network("pre-norm"))
    threads(1)
    expected = search.beam(source, mask, 4, 0.6, 8, 4)
    for count, max_tokens in ((1, 32), (2, 1024), (3, 64)):
        threads(count)
        search.max_tokens = max_tokens
        found = search.beam(source, mask, 4, 0.6, 8, 4)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    for number, length in enumerate(LENGTHS):
        alone = search.beam(source[number : number + 1, :length], None, 4, 0.6, 8, 4)
        assert answers_of(alone, 0) == answers_of(expected, number)
        assert torch.equal(alone.log_probabilities[0], expected.log_probabilities[number])


def test_of_equal_answers_the_one_of_smaller_ids_comes_first() -> None:
    """Pieces 14 to 23 have the embeddings of 4 to 13, so they are as probable, to the last bit."""
    network = make_network(1)
    with torch.no_grad():
        network.embedding.weight[14:] = network.embedding.weight[4:14]
    source, mask = make_sources(LENGTHS)
    ties = 0
    for beam_size in (2, 6):
        found = SEARCHES["compiled"](network).beam(source, mask, beam_size, 0.6, 8, beam_size)
        for sentence in range(len(LENGTHS)):
            answers = answers_of(found, sentence)
            assert answers == sorted(answers, key=lambda one: (-one[0], one[1]))
            ties += len(answers) - len({score for score, _ in answers})
    assert ties > 20


def test_texts_longer_than_the_table_of_positions() -> None:
    network = fixed_network(2, sharpness=1.0)
    source, _ = make_sources([1200])
    search = SEARCHES["compiled"](network)
    for _ in range(2):
        found = search.beam(source, None, 2, 0.6, 0, 1, "first")
        [(score, tokens)] = answers_of(found, 0)
        assert len(tokens) > 1024
        total = forced_log_probability(network, source[0], tokens)
        # Each of as many additions rounds by 2 ** -24 of the sum at most.
        allowed = len(tokens) * 2**-24 * abs(total) + tolerance(network)
        assert float(found.log_probabilities) == pytest.approx(total, abs=allowed)
        assert score == pytest.approx(penalized(total, len(tokens), 0.6), abs=allowed)


def test_threads_share_a_search_also_while_its_table_of_positions_grows() -> None:
    network = fixed_network(2, sharpness=1.0)
    sources = [make_sources([length]) for length in (1100, 5, 1050, 9)]
    alone = [SEARCHES["compiled"](network).beam(source, mask, 2, 0.6, 0, 1, "first") for source, mask in sources]
    for _ in range(2):
        search = SEARCHES["compiled"](network)
        with ThreadPoolExecutor(len(sources)) as threads:
            found = list(threads.map(lambda one: search.beam(*one, 2, 0.6, 0, 1, "first"), sources))  # noqa: B023
        for results, expected in zip(found, alone, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))


@pytest.mark.slow
def test_a_thread_sanitizer_finds_no_race(tmp_path: Path) -> None:
    program = tmp_path / "threads"
    source, include = Path(__file__).with_name("search_threads.cpp"), f"-I{SOURCES[0].parent}"
    flags = ["-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread", include]
    subprocess.run([*find_compiler(), *flags, str(source), "-o", str(program)], check=True)
    # The sanitizer needs the addresses that it has reserved.
    done = subprocess.run(["setarch", "-R", str(program)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_finished_sentences_are_reported_and_ctrl_c_ends_the_search(threads: Callable[[int], None]) -> None:
    source, mask = make_sources(LENGTHS * 30)
    search = SEARCHES["compiled"](trained_network())
    search.max_tokens = 64
    for count in (1, 2):
        threads(count)
        reported: list[int] = []
        options = BeamArguments(4, 0.6, 8, 1, False)
        search.search(source, mask, options, finished=reported.append)
        assert sum(reported) == len(source)
        assert count > 1 or len(reported) > 2

        def interrupted(number: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            search.search(source, mask, options, finished=interrupted)
    search.beam(source[:3], mask[:3], 4, 0.6, 8, 1)


def test_the_weights_are_a_copy() -> None:
    network = make_network(1)
    source, mask = make_sources(LENGTHS)
    compiled = SEARCHES["compiled"](network)
    expected = compiled.beam(source, mask, 2, 0.6, 4, 1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    assert torch.equal(compiled.beam(source, mask, 2, 0.6, 4, 1).scores, expected.scores)


def test_layers_that_the_program_lacks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACTIVATIONS, "tanh", nn.Tanh)
    monkeypatch.setitem(NORMS, "rms", nn.RMSNorm)
    for settings in ({}, {"activation": "swish", "pre_norm": True}):
        assert unsupported(make_network(0, **settings).settings) is None
    assert unsupported(NetworkSettings(activation="tanh")) == "network.activation tanh"
    assert unsupported(NetworkSettings(norm="rms")) == "network.norm rms"


def test_rounding_cannot_make_the_check_after_compiling_fail() -> None:
    for network, source, lengths in agreement_cases():
        for row, length in zip(source, lengths, strict=True):
            limit = length + EXTRA_TOKENS
            margin = plain_beam(network, row[:length], BEAM_SIZE, LENGTH_PENALTY, limit).margin
            assert margin > 20 * tolerance(network)


def test_memory_that_is_not_there_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __getattr__(self, name: str) -> object:
            return (lambda *_: -2) if name == "search_with_prefixes" else getattr(compiled_library(), name)

    search = CompiledSearch(Full(), make_network(0), BOS, EOS, PAD)  # type: ignore[arg-type]
    source, mask = make_sources(LENGTHS)
    with pytest.raises(MemoryError, match="translate fewer or shorter sentences"):
        search.beam(source, mask, 4, 0.6, 8, 1)
