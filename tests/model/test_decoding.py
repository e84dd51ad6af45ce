"""The search against answers worked out without it.

They come from enumeration, from teacher forcing, and from a plain beam search that has no cache, no batch and
no early stop.
"""

import copy
import itertools
import math
import random
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.decoding import Answers, Search
from model.settings import NetworkSettings
from model.transformer import Transformer

PAD, UNK, BOS, EOS = 0, 1, 2, 3
TIE = 1e-5


VOCABULARY_SIZE = 24
# The source lengths of a batch whose sentences end at different times.
LENGTHS = [9, 4, 7, 1, 12, 2, 7, 5, 3, 10]


def make_network(
    seed: int, vocabulary_size: int = VOCABULARY_SIZE, sharpness: float = 2.0, **settings: Any
) -> Transformer:
    """A random network whose distributions are far from uniform."""
    torch.manual_seed(seed)
    shape = {"num_layers": 2, "d_model": 16, "d_ff": 32, "num_heads": 2, "dropout": 0.1} | settings
    network = Transformer(vocabulary_size, NetworkSettings(**shape)).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 2:
                parameter *= sharpness
    return network


@cache
def trained_network(variant: str = "") -> Transformer:
    """A network that has half learned to repeat its source, pieces doubled by chance: sure of nothing."""
    settings = {
        "": {},
        "pre-norm": {"pre_norm": True, "d_k": 6, "d_v": 10},
        "learned": {"learned_positions": True, "max_positions": 32},
    }[variant]
    network = make_network(5, sharpness=1.0, num_layers=1, **settings)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    draws = random.Random(1)
    for _ in range(150):
        length = draws.randint(1, 10)
        source = torch.randint(4, VOCABULARY_SIZE, (32, length))
        doubled = [[piece for piece in row for _ in range(draws.choice([1, 1, 2]))] for row in source.tolist()]
        answers = [torch.tensor([BOS, *row, EOS]) for row in doubled]
        target = nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=PAD)
        source = F.pad(source, [0, 1], value=EOS)
        logits = network.logits(network(source, target[:, :-1]))
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network


def make_sources(lengths: list[int], vocabulary_size: int = VOCABULARY_SIZE, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random sources of these lengths, end symbol included, padded; and their mask."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in zip(source, lengths, strict=True):
        row[: length - 1] = torch.randint(4, vocabulary_size, (length - 1,), generator=generator)
        row[length - 1] = EOS
    return source, torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)


@torch.no_grad()
def forced_log_probability(network: Transformer, source: Tensor, answer: list[int]) -> float:
    """log P(answer | source) by teacher forcing; source [S] without padding."""
    states = network(source.unsqueeze(0), torch.tensor([[BOS, *answer[:-1]]]))
    steps = network.logits(states).double().log_softmax(-1)[0]
    return float(steps[range(len(answer)), answer].sum())


def penalized(log_probability: float, length: int, alpha: float) -> float:
    return log_probability / ((5 + length) / 6) ** alpha


@torch.no_grad()
def plain_beam(
    network: Transformer, source: Tensor, beam_size: int, alpha: float, limit: int
) -> list[tuple[float, list[int]]]:
    """Section 6.1's search of one sentence, to its limit, through the whole network at each step."""
    hypotheses: list[tuple[float, list[int]]] = [(0.0, [])]
    answers = []
    for length in range(1, limit + 1):
        prefixes = torch.tensor([[BOS, *pieces] for _, pieces in hypotheses])
        states = network(source.expand(len(hypotheses), -1), prefixes)[:, -1]
        steps = network.logits(states).log_softmax(-1).tolist()
        continuations = [
            (total + step, [*pieces, token])
            for (total, pieces), row in zip(hypotheses, steps, strict=True)
            for token, step in enumerate(row)
            if token not in (PAD, BOS) and (length < limit or token == EOS)
        ]
        continuations = sorted(continuations, reverse=True)[: 2 * beam_size]
        answers += [(penalized(total, length, alpha), pieces) for total, pieces in continuations if pieces[-1] == EOS]
        hypotheses = [(total, pieces) for total, pieces in continuations if pieces[-1] != EOS][:beam_size]
    return sorted(answers, reverse=True)


def answers_of(found: Answers, sentence: int) -> list[tuple[float, list[int]]]:
    """A sentence's (score, tokens)s, without padding."""
    return [
        (float(score), tokens[:length].tolist())
        for score, tokens, length in zip(
            found.scores[sentence], found.tokens[sentence], found.lengths[sentence].tolist(), strict=True
        )
    ]


def count_ties(found: list[tuple[float, list[int]]], expected: list[tuple[float, list[int]]]) -> int:
    """How often another answer of equal score stands in a place; anything else that differs is an error."""
    ties = 0
    expected_scores = {tuple(tokens): score for score, tokens in expected}
    for (score, tokens), (expected_score, expected_tokens) in zip(found, expected, strict=False):
        assert score == pytest.approx(expected_score, abs=1e-4)
        if tokens != expected_tokens:
            assert expected_scores[tuple(tokens)] == pytest.approx(expected_score, abs=TIE)
            ties += 1
    return ties


@pytest.mark.parametrize("alpha", [0.6, 1.5])
def test_a_wide_beam_finds_what_enumeration_finds(alpha: float) -> None:
    # Three pieces and the end symbol; answers of at most 4 pieces: 121 of them, at most 81 open at once.
    vocabulary_size, beam_size, extra = 6, 81, 2
    source, mask = make_sources([3, 3, 2, 3], vocabulary_size)
    greedy_is_best, penalty_matters, lengths = [], [], set()
    for seed in range(6):
        network = make_network(seed, vocabulary_size)
        search = Search(network, BOS, EOS, PAD).eval()
        found = search.beam(source, mask, beam_size, alpha, extra, beam_size)
        greedy = search.greedy(source, mask, extra)
        for sentence, source_length in enumerate(mask.sum(1).tolist()):
            ids = source[sentence, :source_length]
            every = [
                [*pieces, EOS]
                for count in range(source_length + extra)
                for pieces in itertools.product([UNK, 4, 5], repeat=count)
            ]
            totals = [(forced_log_probability(network, ids, answer), answer) for answer in every]
            expected = sorted(((penalized(t, len(a), alpha), a) for t, a in totals), reverse=True)[:beam_size]
            answers = [one for one in answers_of(found, sentence) if one[0] > -math.inf]
            assert len(answers) == min(len(every), beam_size)
            assert count_ties(answers, expected) == 0
            best = expected[0][1]
            lengths.add(len(best))
            greedy_is_best.append(greedy.tokens[sentence, : greedy.lengths[sentence]].tolist() == best)
            penalty_matters.append(max(totals)[1] != best)
    assert False in greedy_is_best
    assert True in penalty_matters
    assert len(lengths) >= 3


def test_answers_that_do_not_exist_are_empty() -> None:
    source, _ = make_sources([1], 6)
    found = Search(make_network(0, 6), BOS, EOS, PAD).eval().beam(source, None, 8, 0.6, 1, 8)
    # At most one piece: [], [unk], [4], [5].
    assert found.lengths.tolist()[0][4:] == [0] * 4
    assert sorted(found.lengths.tolist()[0][:4]) == [1, 2, 2, 2]
    assert found.scores[0, 4:].tolist() == [-math.inf] * 4
    assert (found.tokens[0, 4:] == PAD).all()


@pytest.mark.parametrize("variant", ["", "pre-norm", "learned", "random"])
def test_equals_a_plain_beam_search_without_cache_batch_or_early_stop(variant: str) -> None:
    source, mask = make_sources(LENGTHS)
    ties, num_answers, lengths = 0, 0, set()
    network = make_network(1) if variant == "random" else trained_network(variant)
    search = Search(network, BOS, EOS, PAD).eval()
    for beam_size, alpha, extra in [(4, 0.6, 8), (3, 0.0, 4), (4, 1.5, 12)]:
        found = search.beam(source, mask, beam_size, alpha, extra, beam_size)
        for sentence, length in enumerate(LENGTHS):
            expected = plain_beam(network, source[sentence, :length], beam_size, alpha, length + extra)
            ties += count_ties(answers_of(found, sentence), expected)
            num_answers += beam_size
            lengths.add(len(expected[0][1]))
    assert ties <= num_answers // 50
    assert len(lengths) >= 4


def test_a_beam_of_one_is_greedy() -> None:
    extra, lengths = 8, set()
    source, mask = make_sources(LENGTHS)
    for network in (make_network(0), make_network(1), trained_network(), trained_network("learned")):
        search = Search(network, BOS, EOS, PAD).eval()
        greedy, beam = search.greedy(source, mask, extra), search.beam(source, mask, 1, 0.6, extra, 1)
        assert torch.equal(greedy.tokens, beam.tokens[:, 0])
        for sentence, length in enumerate(LENGTHS):
            answer: list[int] = []
            while not answer or answer[-1] != EOS:
                with torch.no_grad():
                    states = network(source[sentence : sentence + 1, :length], torch.tensor([[BOS, *answer]]))
                    logits = network.logits(states[0, -1])
                logits[[PAD, BOS]] = -math.inf
                answer.append(int(logits.argmax()) if len(answer) < length + extra - 1 else EOS)
            lengths.add(len(answer))
            assert greedy.tokens[sentence, : len(answer)].tolist() == answer
            assert int(greedy.lengths[sentence]) == len(answer)
            assert (greedy.tokens[sentence, len(answer) :] == PAD).all()
            total = forced_log_probability(network, source[sentence, :length], answer)
            assert float(greedy.log_probabilities[sentence]) == pytest.approx(total, abs=1e-4)
            assert float(beam.scores[sentence, 0]) == pytest.approx(penalized(total, len(answer), 0.6), abs=1e-4)
    assert len(lengths) >= 6


def test_scores_are_those_of_teacher_forcing_and_answers_sorted_and_distinct() -> None:
    source, mask = make_sources(LENGTHS)
    network = trained_network()
    found = Search(network, BOS, EOS, PAD).eval().beam(source, mask, 5, 0.6, 10, 5)
    for sentence, length in enumerate(LENGTHS):
        answers = answers_of(found, sentence)
        assert [score for score, _ in answers] == sorted((score for score, _ in answers), reverse=True)
        assert len({tuple(tokens) for _, tokens in answers}) == 5
        for rank, (score, tokens) in enumerate(answers):
            assert tokens[-1] == EOS
            assert not {PAD, BOS, EOS} & set(tokens[:-1])
            total = forced_log_probability(network, source[sentence, :length], tokens)
            assert float(found.log_probabilities[sentence, rank]) == pytest.approx(total, abs=1e-4)
            assert score == pytest.approx(penalized(total, len(tokens), 0.6), abs=1e-4)


def test_a_sentence_alone_equals_itself_in_a_batch() -> None:
    source, mask = make_sources(LENGTHS)
    ties = 0
    for network in (make_network(1), trained_network(), trained_network("learned")):
        search = Search(network, BOS, EOS, PAD).eval()
        found = search.beam(source, mask, 4, 0.6, 10, 4)
        for sentence, length in enumerate(LENGTHS):
            alone = search.beam(source[sentence : sentence + 1, :length], None, 4, 0.6, 10, 4)
            ties += count_ties(answers_of(found, sentence), answers_of(alone, 0))
    assert ties <= 2


class Observed(Transformer):
    """Remembers how many sentences each step decoded; if `endless`, the end symbol is all but impossible."""

    batch_sizes: list[int]
    endless: bool

    def decode_step(self, last: Tensor, *others: Any) -> Any:
        self.batch_sizes.append(last.size(0))
        return super().decode_step(last, *others)

    def logits(self, states: Tensor) -> Tensor:
        logits = super().logits(states)
        if self.endless:
            logits[..., EOS] -= 100.0
        return logits


def observed(network: Transformer, endless: bool = False) -> Observed:
    network = copy.deepcopy(network)
    network.__class__ = Observed
    assert isinstance(network, Observed)
    network.batch_sizes, network.endless = [], endless
    return network


def test_finished_sentences_leave_the_batch_and_the_search_stops_early() -> None:
    source, mask = make_sources(LENGTHS)
    network = observed(trained_network())
    Search(network, BOS, EOS, PAD).eval().beam(source, mask, 4, 0.6, 50, 1)
    sizes = network.batch_sizes
    assert len(sizes) < max(LENGTHS) + 25
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == len(LENGTHS)
    assert sizes[-1] < len(LENGTHS) // 2


@pytest.mark.parametrize("beam_size", [1, 4])
def test_each_sentence_has_its_own_limit(beam_size: int) -> None:
    source, mask = make_sources(LENGTHS)
    network = observed(make_network(0), endless=True)
    search = Search(network, BOS, EOS, PAD).eval()
    found = search.beam(source, mask, beam_size, 0.6, 5, beam_size)
    assert found.lengths.tolist() == [[length + 5] * beam_size for length in LENGTHS]
    assert (found.tokens == EOS).sum(-1).eq(1).all()
    total, (_, tokens) = float(found.log_probabilities[0, 0]), answers_of(found, 0)[0]
    assert total == pytest.approx(forced_log_probability(network, source[0, :9], tokens), abs=1e-3)
    assert total < -90


def test_learned_positions_limit_source_and_answer() -> None:
    network = observed(make_network(0, learned_positions=True, max_positions=8), endless=True)
    search = Search(network, BOS, EOS, PAD).eval()
    source, _ = make_sources([8])
    assert search.greedy(source, None, 50).lengths.tolist() == [8]
    longer, _ = make_sources([9])
    with pytest.raises(ValueError, match="9 tokens is longer than the network's 8 positions"):
        search.greedy(longer, None, 50)


def test_bfloat16_finds_answers_as_good() -> None:
    source, mask = make_sources(LENGTHS)
    equal, variants = 0, ["", "pre-norm", "learned"]
    for network in map(trained_network, variants):
        exact = Search(network, BOS, EOS, PAD).eval().beam(source, mask, 4, 0.6, 10, 1)
        rounded = copy.deepcopy(network).bfloat16()
        found = Search(rounded, BOS, EOS, PAD).eval().beam(source, mask, 4, 0.6, 10, 1)
        assert found.scores.dtype == torch.float32
        for sentence, length in enumerate(LENGTHS):
            _, tokens = answers_of(found, sentence)[0]
            equal += tokens == answers_of(exact, sentence)[0][1]
            # What float32 gives to bfloat16's answer is hardly worse than what it gives to its own.
            score = penalized(forced_log_probability(network, source[sentence, :length], tokens), len(tokens), 0.6)
            assert score == pytest.approx(float(exact.scores[sentence, 0]), abs=0.1)
            assert float(found.scores[sentence, 0]) == pytest.approx(score, abs=0.1)
    assert equal >= 0.9 * len(variants) * len(LENGTHS)


SOURCE = torch.tensor([[4, 5, EOS]])
MASK = torch.ones(1, 3, dtype=torch.bool)
BAD_ARGUMENTS = {
    "one or more of each": (SOURCE[:0], None, 4, 0.6, 5, 1),
    "must be int64": (SOURCE.float(), None, 4, 0.6, 5, 1),
    "ids must be 0 .. 23": (SOURCE + 20, None, 4, 0.6, 5, 1),
    "must be 0 .. 23": (-SOURCE, None, 4, 0.6, 5, 1),
    "must be bool of shape": (SOURCE, MASK[:, :2], 4, 0.6, 5, 1),
    "without any token": (SOURCE, ~MASK, 4, 0.6, 5, 1),
    "beam_size 0 must be": (SOURCE, None, 0, 0.6, 5, 1),
    "n_best 5 must be 1 .. beam_size 4": (SOURCE, None, 4, 0.6, 5, 5),
    "n_best 0 must be": (SOURCE, None, 4, 0.6, 5, 0),
    "length_penalty -0.5 must be": (SOURCE, None, 4, -0.5, 5, 1),
    "max_extra_tokens -1 must be": (SOURCE, None, 4, 0.6, -1, 1),
}


def test_wrong_arguments_are_refused_in_python_and_torchscript() -> None:
    search = Search(make_network(0), BOS, EOS, PAD).eval()
    scripted = torch.jit.script(search)
    for message, arguments in BAD_ARGUMENTS.items():
        with pytest.raises(ValueError, match=message):
            search.beam(*arguments)  # type: ignore[arg-type]
        with pytest.raises(torch.jit.Error, match=message):
            scripted.beam(*arguments)


@pytest.mark.parametrize(("bos_id", "eos_id", "pad_id"), [(2, 2, 0), (2, 3, 24), (-1, 3, 0)])
def test_wrong_special_ids_are_refused(bos_id: int, eos_id: int, pad_id: int) -> None:
    with pytest.raises(ValueError, match="three different ids"):
        Search(make_network(0), bos_id, eos_id, pad_id)


CONSUMER = """
import sys
sys.modules["model"] = None
import torch
search = torch.jit.load(sys.argv[1])
source, mask = torch.load(sys.argv[2])
found = [tuple(search.beam(source, mask, 4, 0.6, 10, 4)), tuple(search.greedy(source, mask, 10))]
torch.save(found, sys.argv[3])
"""


@pytest.mark.parametrize("variant", ["", "pre-norm", "learned"])
def test_scripted_equals_eager_also_where_the_project_is_not(tmp_path: Path, variant: str) -> None:
    source, mask = make_sources(LENGTHS)
    search = Search(trained_network(variant), BOS, EOS, PAD).eval()
    expected = [tuple(search.beam(source, mask, 4, 0.6, 10, 4)), tuple(search.greedy(source, mask, 10))]
    torch.jit.script(search).save(str(tmp_path / "search.ts"))
    torch.save((source, mask), tmp_path / "source.pt")
    paths = [str(tmp_path / name) for name in ("search.ts", "source.pt", "found.pt")]
    subprocess.run([sys.executable, "-I", "-W", "ignore", "-c", CONSUMER, *paths], check=True, cwd=tmp_path)
    found = torch.load(tmp_path / "found.pt")
    for one, other in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_finds_the_same_and_waits_for_the_host_every_eighth_step_only() -> None:
    source, mask = make_sources(LENGTHS)
    search = Search(observed(make_network(0), endless=True), BOS, EOS, PAD).eval()
    expected = search.beam(source, mask, 4, 0.6, 60, 4)
    search.cuda()
    with torch.profiler.profile() as profile:
        found = search.beam(source.cuda(), mask.cuda(), 4, 0.6, 60, 4)
    waits = sum(event.name in ("aten::item", "aten::nonzero") for event in profile.events())
    assert waits < 20 + expected.tokens.size(-1) // 4
    for sentence in range(len(LENGTHS)):
        count_ties(answers_of(Answers(*(one.cpu() for one in found)), sentence), answers_of(expected, sentence))
