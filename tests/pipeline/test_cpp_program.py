"""`cpp/` of a bundle: the file of weights for networks of every shape, files that are damaged, and what is refused."""

import ctypes
import struct
from pathlib import Path

import pytest
import torch

from data_module.errors import InputError
from data_module.tokenization.tokenizer import Tokenizer
from model.fast.compiled_search import CompiledSearch
from model.transformer import Transformer
from pipeline.export import formats
from pipeline.export.bundle_writer import write_bundle
from pipeline.export.cpp_program import compile_cpp, require_compiled, write_cpp
from tests.model.search_truth import VOCABULARY_SIZE
from tests.pipeline.test_export import SHAPES, TEXT, make_model

BOS, EOS, PAD = 2, 3, 0
EXTRA = 6
HEADER = struct.Struct("<8s10q2fq")


@pytest.fixture(scope="module")
def library(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("cpp") / "cpp"
    write_cpp(make_model(tokenizer).network, EXTRA, folder)
    return compile_cpp(folder)


def written(network: Transformer, folder: Path) -> Path:
    write_cpp(network, EXTRA, folder / "cpp")
    return folder / "cpp" / "weights.bin"


@pytest.mark.parametrize("shape", list(SHAPES))
def test_the_file_holds_each_shape(library: ctypes.CDLL, tokenizer: Tokenizer, tmp_path: Path, shape: str) -> None:
    network = make_model(tokenizer, **SHAPES[shape]).network
    path = written(network, tmp_path)
    found = CompiledSearch(library, path, BOS, EOS, PAD)
    expected = CompiledSearch(library, network, BOS, EOS, PAD)
    longest = 24 if shape == "learned" else 1024
    assert found.max_positions == (24 if shape == "learned" else longest + EXTRA)
    torch.manual_seed(1)
    source = torch.randint(4, VOCABULARY_SIZE, (5, 20))
    mask = torch.arange(20) < torch.tensor([20, 3, 11, 1, 20]).unsqueeze(1)
    for one, other in zip(found.beam(source, mask, 4, 0.6, EXTRA, 4), expected.beam(source, mask, 4, 0.6, EXTRA, 4)):  # noqa: B905
        assert torch.equal(one, other)
    assert torch.equal(found.greedy(source, mask, EXTRA).tokens, expected.greedy(source, mask, EXTRA).tokens)
    if shape == "learned":  # The last position that the file has.
        source = torch.randint(4, VOCABULARY_SIZE, (1, longest))
        assert torch.equal(found.greedy(source, None, EXTRA).tokens, expected.greedy(source, None, EXTRA).tokens)


def test_a_damaged_file_is_refused(library: ctypes.CDLL, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = written(make_model(tokenizer).network, tmp_path)
    whole = path.read_bytes()
    fields = list(HEADER.unpack_from(whole))
    large = (0, -1, 2**28 + 1, 2**31, 2**62, -(2**63))
    damaged = [whole[:size] for size in (0, 7, 8, 103, 104, 105, len(whole) // 2, len(whole) - 4, len(whole) - 1)]
    damaged += [whole + b"\0", whole + whole, b"\0" * len(whole), b"SEARCH02" + whole[8:]]
    for place in (*range(1, 9), 13):
        for value in (*large, fields[place] + 1, fields[place] - 1, 2**28):
            damaged.append(HEADER.pack(*fields[:place], value, *fields[place + 1 :]) + whole[HEADER.size :])
    for place, values in ((9, (1, 2, -1, 2**40)), (10, (-1, 3, 2**40))):
        for value in values:
            damaged.append(HEADER.pack(*fields[:place], value, *fields[place + 1 :]) + whole[HEADER.size :])
    for contents in damaged:
        path.write_bytes(contents)
        assert library.load_model(bytes(path)) is None, contents[:104]
    with pytest.raises(ValueError, match=r"weights\.bin is not a whole file of weights"):
        CompiledSearch(library, path, BOS, EOS, PAD)
    for other in (tmp_path, tmp_path / "nowhere"):
        assert library.load_model(bytes(other)) is None
    path.write_bytes(whole)
    CompiledSearch(library, path, BOS, EOS, PAD)


def test_the_search_refuses_what_is_past_the_positions(
    library: ctypes.CDLL, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    search = CompiledSearch(
        library, written(make_model(tokenizer, **SHAPES["learned"]).network, tmp_path), BOS, EOS, PAD
    )
    with pytest.raises(ValueError, match="longer than the network's 24 positions"):
        search.greedy(torch.full((1, 25), 5), None, EXTRA)
    search.max_positions = 0  # the program itself
    assert search.greedy(torch.full((1, 18), 5), None, EXTRA).lengths.item() > 0
    for source, extra in ((torch.full((1, 25), 5), 0), (torch.full((1, 19), 5), EXTRA), (torch.full((1, 2**20), 5), 0)):
        with pytest.raises(ValueError, match="the search refuses"):
            search.greedy(source, None, extra)
    search.vocabulary_size = 10**6
    with pytest.raises(ValueError, match="the search refuses"):
        search.greedy(torch.tensor([[5, VOCABULARY_SIZE, EOS]]), None, EXTRA)
    search.eos_id = VOCABULARY_SIZE
    with pytest.raises(ValueError, match="the search refuses"):
        search.greedy(torch.tensor([[5, EOS]]), None, EXTRA)


def test_without_a_compiler(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = make_model(tokenizer).network
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(InputError, match=r"--format cpp is compiled to compare .* CXX names /nowhere/g\+\+"):
        require_compiled(network)
    monkeypatch.setenv("CXX", "false")
    path = written(network, tmp_path)
    with pytest.raises(InputError, match=r"--format cpp cannot be compared .* ended with 1: no message"):
        compile_cpp(path.parent)


def test_weights_that_differ_are_refused(
    library: ctypes.CDLL, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    another = make_model(tokenizer, d_ff=40).network
    monkeypatch.setattr(formats, "write_cpp", lambda network, *arguments: write_cpp(another, *arguments))
    monkeypatch.setattr(formats, "compile_cpp", lambda folder: library)
    with pytest.raises(InputError, match=r"cpp \(float32\): \d+ of 12 answers differ.* nothing was written"):
        write_bundle(make_model(tokenizer), tmp_path, ["cpp"], TEXT, [])
