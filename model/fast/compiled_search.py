"""Search and sampling on a CPU by one compiled program, `search.cpp`, in place of PyTorch's operators.

The search, its arguments and its results are those of `decoding.BeamSearch`, to rounding. A sentence's answers do not
depend on the other sentences at all.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import SelfAttention
from model.beyond.sampling import Sampling, draw_uniforms
from model.decoding import (
    BeamArguments,
    BeamResult,
    BeamSearch,
    Searches,
    answer_limits,
    check_search,
    never_chosen,
    prefix_lengths,
)
from model.layers import ACTIVATIONS, NORMS, SELF_ATTENTIONS, DecoderLayer, EncoderLayer
from model.settings import NetworkSettings
from model.transformer import SinusoidalPositions, Transformer, sinusoidal_table

SOURCES = tuple(Path(__file__).parent / name for name in ("search.cpp", "vectors.h"))
"""The program and its header."""
MAX_TOKENS = 1024
"""Source tokens that a thread decodes at the same time. With more, less of its data stays in the cache."""
BEAM_SIZE, LENGTH_PENALTY, EXTRA_TOKENS = 3, 0.6, 6
"""What `agrees` searches with."""
_PAD, _BOS, _EOS, _VOCABULARY = 0, 2, 3, 600
_INVALID, _NO_MEMORY = -1, -2
_MAGIC = b"SEARCH01"
_ACTIVATIONS: dict[Callable[[], nn.Module], int] = {nn.ReLU: 1, nn.SiLU: 2}
_Progress = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("d_model", "num_heads", "d_k", "d_v", "d_ff", "num_encoder_layers")),
        *((name, ctypes.c_int64) for name in ("num_decoder_layers", "vocabulary_size", "pre_norm", "activation")),
        *((name, ctypes.c_float) for name in ("embedding_scale", "norm_epsilon")),
    )


class _Header(ctypes.Structure):
    _fields_ = (("magic", ctypes.c_char * len(_MAGIC)), ("shape", _Shape), ("num_positions", ctypes.c_int64))


class _Sampling(ctypes.Structure):
    _fields_ = (
        ("uniforms", ctypes.c_void_p),
        *((name, ctypes.c_double) for name in ("temperature", "top_p")),
        ("top_k", ctypes.c_int64),
    )


class _Prefixes(ctypes.Structure):
    _fields_ = (("tokens", ctypes.c_void_p), ("offsets", ctypes.c_void_p))


class _Request(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tokens", "offsets", "limits")),
        *((name, ctypes.c_int64) for name in ("num_sentences", "beam_size", "num_best", "stops_at_first")),
        *((name, ctypes.c_int64) for name in ("max_tokens", "num_threads", "begin_id", "end_id")),
        ("forbidden", ctypes.c_void_p),
        ("num_forbidden", ctypes.c_int64),
        ("length_penalty", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("answers", "lengths", "scores", "log_probabilities", "num_steps")),
        ("progress", _Progress),
        ("sampling", ctypes.POINTER(_Sampling)),
    )


def unsupported(network: NetworkSettings) -> str | None:
    """Return the setting that the program does not compute, such as "network.norm rms"; None if it computes all."""
    if ACTIVATIONS[network.activation] not in _ACTIVATIONS:
        return f"network.activation {network.activation}"
    if SELF_ATTENTIONS[network.self_attention] is not SelfAttention:
        return f"network.self_attention {network.self_attention}"
    if NORMS[network.norm] is not nn.LayerNorm:
        return f"network.norm {network.norm}"
    return None


def load_library(path: Path) -> ctypes.CDLL:
    """Load a compiled program. It runs with this process's rights: see `pipeline/runtime/compiled_code.py`.

    Raises OSError if the file is no such program.
    """
    library = ctypes.CDLL(str(path))
    try:
        library.create_model.argtypes, library.create_model.restype = [ctypes.POINTER(_Shape)], ctypes.c_void_p
        library.load_model.argtypes, library.load_model.restype = [ctypes.c_char_p], ctypes.c_void_p
        library.destroy_model.argtypes, library.destroy_model.restype = [ctypes.c_void_p], None
        library.set_next_weight.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        library.set_positions.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        library.search_with_prefixes.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Request), ctypes.POINTER(_Prefixes)]
        for name in ("set_next_weight", "set_positions", "search_with_prefixes"):
            getattr(library, name).restype = ctypes.c_int64
    except AttributeError as error:
        raise OSError(f"{path} is no compiled search: {error}") from None
    return library


def write_weights(network: Transformer, num_positions: int, file: IO[bytes]) -> None:
    """Write the weights of a network in the layout that `load_model` reads; `unsupported` has to return None.

    Sinusoidal positions are written up to `num_positions`, learned ones all.
    """
    table = network.positions.table.detach().float().contiguous()
    if isinstance(network.positions, SinusoidalPositions):
        table = sinusoidal_table(num_positions, network.embedding.embedding_dim)
    file.write(bytes(_Header(_MAGIC, _shape(network), len(table))))
    for tensor in (table, *_weights(network)):
        file.write(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))


class CompiledSearch(Searches):
    """Greedy and beam search with the weights of a Transformer, which are copied.

    Several threads may search at the same time.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        network: Transformer | Path,
        bos_id: int,
        eos_id: int,
        pad_id: int,
        unk_id: int | None = None,
    ) -> None:
        """Copy the weights of a network, for which `unsupported` returns None, or load a file of `write_weights`.

        The positions of the file are the longest that a sentence may be. See `BeamSearch` for the ids.

        Raises:
            MemoryError: there is not enough memory for the weights.
            ValueError: the file is not a whole file of weights.
        """
        self.bos_id, self.eos_id, self.pad_id = bos_id, eos_id, pad_id
        self.never = never_chosen(bos_id, pad_id, unk_id)
        self.max_tokens = MAX_TOKENS
        """Maximum number of source tokens that each of PyTorch's threads decodes at the same time. Waiting sentences
        join as others finish."""
        self._library = library
        if isinstance(network, Path):
            self._load(network)
        else:
            self._copy(network)

    def _copy(self, network: Transformer) -> None:
        self.vocabulary_size, self.max_positions = network.vocabulary_size, network.positions.max_positions
        self._model = self._library.create_model(_shape(network))
        if not self._model:
            raise MemoryError("there is not enough memory for the network")
        for weight in _weights(network):
            self._check(self._library.set_next_weight(self._model, weight.data_ptr()))
        self._d_model = network.embedding.embedding_dim
        self._table_grows = isinstance(network.positions, SinusoidalPositions)
        self._set_positions(network.positions.table.detach().float())

    def _load(self, path: Path) -> None:
        self._model = self._library.load_model(os.fsencode(path))
        if not self._model:
            raise ValueError(f"{path} is not a whole file of weights, or there is not enough memory for it")
        with path.open("rb") as file:
            header = _Header.from_buffer_copy(file.read(ctypes.sizeof(_Header)))
        self.vocabulary_size, self.max_positions = header.shape.vocabulary_size, header.num_positions
        self._d_model, self._num_positions, self._table_grows = header.shape.d_model, header.num_positions, False

    def __del__(self) -> None:
        if getattr(self, "_model", None):
            self._library.destroy_model(self._model)

    def _check(self, result: int) -> None:
        if result == _INVALID:
            raise ValueError("the search refuses a sentence, a number or an id that is out of bounds")
        if result == _NO_MEMORY:
            raise MemoryError(
                "there is not enough memory for the search; translate fewer or shorter sentences at a time"
            )

    def _set_positions(self, table: Tensor) -> None:
        self._check(self._library.set_positions(self._model, table.contiguous().data_ptr(), len(table)))
        self._num_positions = len(table)

    def _beam(self, *request: Any) -> BeamResult:
        return self.search(*request)[0]

    def search(
        self,
        source: Tensor,
        source_mask: Tensor | None,
        options: BeamArguments,
        lines: Tensor | None = None,
        target_prefix: Tensor | None = None,
        finished: Callable[[int], object] | None = None,
    ) -> tuple[BeamResult, Tensor]:
        """Do what `beam` does or, with `lines`, `sample`; return also the decoder steps of each sentence, int64 [B].

        `finished` is called now and then with the number of sentences that have ended since its last call.

        Raises:
            ValueError: an argument is out of bounds.
            MemoryError: there is not enough memory for the search.
        """
        check_search(source, source_mask, options, lines, self.vocabulary_size, self.max_positions)
        lengths = torch.full_like(source[:, 0], source.size(1)) if source_mask is None else source_mask.sum(1)
        limits, count, n_best = self._limits(lengths, options.max_extra_tokens), len(lengths), options.n_best
        given = {
            "tokens": source.flatten() if source_mask is None else source[source_mask],
            "offsets": F.pad(lengths.cumsum(0), [1, 0]),
            "limits": limits,
            "forbidden": torch.tensor(self.never),
        }
        results = {
            "answers": torch.empty(int(limits.sum()) * n_best, dtype=torch.int32),
            "lengths": torch.empty([count, n_best], dtype=torch.int64),
            "scores": torch.empty([count, n_best]),
            "log_probabilities": torch.empty([count, n_best]),
            "num_steps": torch.empty_like(lengths),
        }
        failure: list[BaseException] = []
        sampling = options.sampling
        uniforms = draw_uniforms(sampling.seed, lines, limits) if sampling and lines is not None else limits[:0]
        request = _Request(
            **{name: tensor.data_ptr() for name, tensor in (given | results).items()},
            num_sentences=count,
            beam_size=options.beam_size,
            num_best=n_best,
            stops_at_first=options.stops_at_first,
            max_tokens=self.max_tokens,
            num_threads=min(torch.get_num_threads(), count),
            begin_id=self.bos_id,
            end_id=self.eos_id,
            num_forbidden=len(given["forbidden"]),
            length_penalty=options.length_penalty,
            progress=_Progress(_reporter(finished, failure)),
            sampling=self._sampling(sampling, uniforms),
        )
        prefix_tokens, prefix_offsets = self._prefixes(target_prefix, limits)
        prefixes = _Prefixes(prefix_tokens.data_ptr(), prefix_offsets.data_ptr())
        call = self._library.search_with_prefixes
        self._check(call(self._model, ctypes.byref(request), ctypes.byref(prefixes)))
        if failure:
            raise failure[0]
        tokens = _padded(results["answers"], limits, results["lengths"], self.pad_id)
        answers = BeamResult(tokens, results["lengths"], results["scores"], results["log_probabilities"])
        return answers, results["num_steps"]

    def _prefixes(self, target_prefix: Tensor | None, limits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens of all target prefixes, one after another, and their offsets [B + 1]."""
        if target_prefix is None:
            return limits[:0], torch.zeros(len(limits) + 1, dtype=torch.int64)
        special = [*self.never, self.eos_id]
        lengths = prefix_lengths(target_prefix, limits, self.vocabulary_size, self.pad_id, special)
        return target_prefix[target_prefix != self.pad_id], F.pad(lengths.cumsum(0), [1, 0])

    def _sampling(self, sampling: Sampling | None, uniforms: Tensor) -> "ctypes._Pointer[_Sampling] | None":
        if sampling is None:
            return None
        top_k = self.vocabulary_size if sampling.top_k is None else sampling.top_k
        return ctypes.pointer(_Sampling(uniforms.data_ptr(), sampling.temperature, sampling.top_p, top_k))

    def _limits(self, lengths: Tensor, max_extra_tokens: int) -> Tensor:
        """Return the maximum length of each answer, after making sure that there are as many sinusoids."""
        limits = answer_limits(lengths, max_extra_tokens, self.max_positions)
        # Of several threads that lengthen the table at the same time, the program keeps the longest.
        if int(limits.max()) > self._num_positions and self._table_grows:
            self._set_positions(sinusoidal_table(int(limits.max()), self._d_model))
        return limits


def _reporter(finished: Callable[[int], object] | None, failure: list[BaseException]) -> Callable[[int], int]:
    """Return a function for the program to call. An exception of `finished`, of any kind, is put into `failure`."""

    def report(num_finished: int) -> int:
        try:
            if finished is not None and num_finished:
                finished(num_finished)
        except BaseException as error:
            failure.append(error)
            return 1
        return 0

    return report


def _padded(answers: Tensor, limits: Tensor, lengths: Tensor, pad_id: int) -> Tensor:
    """Return answers, which are stored one after another in `limits` places each, as int64 [B, M, L]."""
    places = limits.unsqueeze(1).expand_as(lengths).flatten()
    starts = (places.cumsum(0) - places).view_as(lengths)
    columns = torch.arange(int(lengths.max()))
    is_token = columns < lengths.unsqueeze(2)
    index = (starts.unsqueeze(2) + columns).masked_fill(~is_token, 0)
    return answers[index].long().masked_fill(~is_token, pad_id)


def _shape(network: Transformer) -> _Shape:
    layer = network.encoder[0]
    assert isinstance(layer, EncoderLayer)
    attention, feed_forward, norm = layer.self_attention, layer.feed_forward, layer.self_attention_residual.norm
    return _Shape(
        d_model=network.embedding.embedding_dim,
        num_heads=attention.num_heads,
        d_k=attention.d_k,
        d_v=attention.d_v,
        d_ff=feed_forward.inner.out_features,
        num_encoder_layers=len(network.encoder),
        num_decoder_layers=len(network.decoder),
        vocabulary_size=network.vocabulary_size,
        pre_norm=layer.self_attention_residual.pre_norm,
        activation=_ACTIVATIONS[type(feed_forward.activation)],
        embedding_scale=network.embedding_scale,
        norm_epsilon=norm.eps,
    )


def _weights(network: Transformer) -> Iterator[Tensor]:
    """Yield the weights in the order that the program's `Model` has them, each in float32 and contiguous."""
    for weight in _parameters(network):
        yield weight.detach().float().contiguous()


def _parameters(network: Transformer) -> Iterator[Tensor]:
    yield network.embedding.weight
    bias = network.projection.bias
    yield bias if isinstance(bias, Tensor) else torch.zeros(network.vocabulary_size)
    for layers, norm in ((network.encoder, network.encoder_norm), (network.decoder, network.decoder_norm)):
        for layer in layers:
            assert isinstance(layer, EncoderLayer | DecoderLayer)
            parts: list[Any] = [layer.self_attention.query_key_value, layer.self_attention.output]
            parts.append(layer.self_attention_residual.norm)
            if isinstance(layer, DecoderLayer):
                parts += [layer.cross_attention.query, layer.cross_attention.key_value, layer.cross_attention.output]
                parts.append(layer.cross_attention_residual.norm)
            parts += [layer.feed_forward.inner, layer.feed_forward.outer, layer.feed_forward_residual.norm]
            for part in parts:
                yield from (part.weight, part.bias)
        if isinstance(norm, nn.LayerNorm):
            yield from (norm.weight, norm.bias)


def agrees(library: ctypes.CDLL) -> bool:
    """Return whether the program and `BeamSearch` find the same answers with two small random networks."""
    return all(_agrees_on(library, *case) for case in agreement_cases())


@torch.no_grad()
def agreement_cases() -> list[tuple[Transformer, Tensor, list[int]]]:
    """Return networks, sources [B, S] and their lengths for which rounding cannot change any choice of the search."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)  # the other seeds up to 20 have choices between hypotheses that are nearly equal
        return [
            (_network(pre_norm), torch.randint(4, _VOCABULARY, (7, 9)), [9, 3, 7, 1, 5, 8, 2])
            for pre_norm in (False, True)
        ]


def _network(pre_norm: bool) -> Transformer:
    # Sizes that are no multiples of a vector, and a vocabulary of more than one chunk.
    settings = NetworkSettings(num_layers=2, d_model=36, d_ff=52, num_heads=3, d_k=10, d_v=14, pre_norm=pre_norm)
    network = Transformer(_VOCABULARY, settings).eval()
    network.embedding.weight.mul_(3)  # distributions that are far from uniform
    return network


def _agrees_on(library: ctypes.CDLL, network: Transformer, source: Tensor, lengths: list[int]) -> bool:
    mask = torch.arange(source.size(1)) < torch.tensor(lengths).unsqueeze(1)
    arguments = (source, mask, BEAM_SIZE, LENGTH_PENALTY, EXTRA_TOKENS, BEAM_SIZE)
    compiled = CompiledSearch(library, network, _BOS, _EOS, _PAD)
    compiled.max_tokens = 20  # so that sentences wait
    answers = compiled.beam(*arguments)
    expected = BeamSearch(network, _BOS, _EOS, _PAD).eval().beam(*arguments)
    return torch.equal(answers.tokens, expected.tokens) and torch.allclose(answers.scores, expected.scores, atol=1e-3)
