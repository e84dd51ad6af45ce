"""Which backend `fit` chooses, and what it says where the machine cannot run a part of it."""

import copy
import sys
import sysconfig
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from data_module.batch import PaddedBatch, SpecialIds
from data_module.errors import InputError
from model.backend import Backend
from model.decoding import BeamSearch
from model.fast.compilation import CompiledForward
from model.fast.compiled_search import EXTRA_TOKENS, agreement_cases
from model.layers import NORMS
from model.packed_attention import FLASH_ATTENTION, PLAIN_ATTENTION
from model.settings import DecodingSettings, NetworkSettings, TrainingSettings
from model.training_module import TranslationModule
from pipeline.runtime.backend_choice import choose_backend, compiled_search, try_parts

ON_GPU = {"accelerator": "gpu", "precision": "bf16-mixed"}
NETWORK = NetworkSettings()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU as far as PyTorch is asked about it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    return monkeypatch


def test_each_process_asks_its_own_gpu(gpu: pytest.MonkeyPatch) -> None:
    """Only the third GPU is an older one, which flash attention does not take."""
    gpu.setattr(torch.cuda, "device_count", lambda: 4)
    gpu.setattr(torch.cuda, "get_device_capability", lambda device=0: (7, 5) if device == 2 else (9, 0))
    for name, rank, devices, is_old in (
        ("LOCAL_RANK", "2", 4, True),
        ("LOCAL_RANK", "1", "auto", False),
        ("SLURM_LOCALID", "2", "auto", True),
        ("LOCAL_RANK", "1", [0, 2], True),
        ("LOCAL_RANK", "1", "3,2", True),
        ("LOCAL_RANK", "2", [2, 0], False),  # a mistake, which Lightning reports
    ):
        with gpu.context() as environment:
            environment.setenv(name, rank)
            backend = choose_backend(None, False, {**ON_GPU, "devices": devices}, NETWORK)
        assert backend.attention == (PLAIN_ATTENTION if is_old else FLASH_ATTENTION)


@pytest.mark.parametrize(
    ("accelerator", "precision", "kernels", "settings", "parts"),
    [
        ("cpu", "bf16-mixed", None, {}, ("C++", "PyTorch")),
        ("cpu", "bf16-mixed", None, {"d_model": 256}, ("C++", "C++")),
        ("cpu", "32-true", None, {}, ("C++", "C++")),
        ("cpu", "32-true", "pytorch", {}, ("plain", "PyTorch")),
        ("cpu", "64-true", None, {"d_model": 256}, ("plain", "PyTorch")),
        ("cpu", "16-mixed", None, {"d_model": 256}, ("plain", "PyTorch")),
        ("mps", "32-true", None, {"d_model": 256}, ("plain", "PyTorch")),
        # The compiled attention takes heads of whole vectors, without dropout; the compiled search knows one norm.
        ("cpu", "32-true", None, {"d_k": 16, "d_v": 48}, ("C++", "C++")),
        ("cpu", "32-true", None, {"d_k": 24}, ("plain", "C++")),
        ("cpu", "32-true", None, {"d_v": 8}, ("plain", "C++")),
        ("cpu", "32-true", None, {"attention_dropout": 0.1}, ("plain", "C++")),
        ("cpu", "32-true", None, {"norm": "rms"}, ("C++", "PyTorch")),
    ],
)
def test_what_is_compiled(
    accelerator: str,
    precision: str,
    kernels: str | None,
    settings: dict[str, object],
    parts: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(NORMS, "rms", nn.RMSNorm)
    options = {"accelerator": accelerator, "precision": precision}
    backend = choose_backend(kernels, None, options, NetworkSettings(**settings))
    assert (backend.attention.name, backend.search.name, backend.notes) == (*parts, ())
    assert not backend.attention.constant_rows
    assert f"attention {parts[0]}, compilation none, search {parts[1]}" in backend.line()


@pytest.mark.filterwarnings("ignore:.*Trainer")
def test_validation_searches_with_the_weights_as_they_are() -> None:
    """The compiled search copies them. Of these two networks, rounding changes no choice."""
    module = TranslationModule(
        *(600, SpecialIds(pad=0, bos=2, eos=3), NetworkSettings(num_layers=1, d_model=8, d_ff=8, num_heads=1)),
        *(TrainingSettings(), DecodingSettings(max_extra_tokens=EXTRA_TOKENS), 1, Backend(search=compiled_search())),
    ).eval()
    answers = []
    for network, source, lengths in agreement_cases():
        mask = torch.arange(source.size(1)) < torch.tensor(lengths).unsqueeze(1)
        module.on_validation_epoch_start()
        module.network = network  # as EMA does after the start of a validation
        with torch.no_grad():
            _, tokens, _ = module.validation_step(PaddedBatch(source, mask, source, source, torch.arange(7)), 0)
            expected = BeamSearch(network, 2, 3, 0).greedy(source, mask, EXTRA_TOKENS).tokens
        assert torch.equal(tokens, expected)
        answers.append(tokens)
    assert not torch.equal(*answers)
    module.on_validation_epoch_start()
    assert list(copy.deepcopy(module).state_dict()) == [f"network.{name}" for name in network.state_dict()]


@pytest.mark.parametrize(
    ("precision", "settings", "capability", "reason"),
    [
        ("bf16-mixed", {}, (8, 0), None),
        ("16-mixed", {}, (12, 0), None),
        ("16-mixed", {}, (7, 5), "this GPU's compute capability is 7.5, below 8.0"),
        ("32-true", {}, (8, 0), "trainer.precision 32-true is not of 16 bits"),
        ("64-true", {}, (8, 0), "trainer.precision 64-true is not of 16 bits"),
        ("bf16-mixed", {"d_k": 32}, (8, 0), None),
        ("bf16-mixed", {"d_k": 72}, (8, 0), "heads have d_k 72, above d_v 64"),
        ("bf16-mixed", {"d_k": 20}, (8, 0), "heads have d_k 20 and d_v 64, not multiples of 8 up to 256"),
        ("bf16-mixed", {"d_v": 68}, (8, 0), "heads have d_k 64 and d_v 68, not multiples of 8 up to 256"),
        ("bf16-mixed", {"d_k": 256, "d_v": 256}, (8, 0), None),
        ("bf16-mixed", {"attention_dropout": 0.1}, (8, 0), "network.attention_dropout is 0.1"),
        ("bf16-mixed", {"d_v": 264}, (8, 0), "heads have d_k 64 and d_v 264, not multiples of 8 up to 256"),
    ],
)
def test_what_flash_attention_cannot_take_is_plain(
    precision: str,
    settings: dict[str, object],
    capability: tuple[int, int],
    reason: str | None,
    gpu: pytest.MonkeyPatch,
) -> None:
    """With a note. The paper's heads, d_k = d_v = 64, unless settings change them, on GPUs of several generations."""
    gpu.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    for accelerator in ("gpu", "cuda", "auto"):
        options = {"accelerator": accelerator, "precision": precision}
        backend = choose_backend("pytorch", False, options, NetworkSettings(**settings))
        assert backend.attention.name == ("plain" if reason else "flash")
        assert backend.attention.constant_rows == (reason is None)
        assert [note.partition(", which is slower: ")[2] for note in backend.notes] == [reason][: len(reason or "")]


def test_when_to_compile(gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def chosen(compiles: bool | None, accelerator: str) -> Backend:
        return choose_backend("pytorch", compiles, {"accelerator": accelerator, "precision": "bf16-mixed"}, NETWORK)

    assert not chosen(None, "cpu").compiled
    for compiles in (None, False):  # both the network and the loss
        backend = chosen(compiles, "auto")
        assert [backend.compiled is None, backend.chunk_terms is None] == 2 * [compiles is False]
    for variable in ("CC", "CXX"):
        gpu.delenv(variable, raising=False)
    gpu.setenv("PATH", "")
    [note] = chosen(None, "gpu").notes
    assert note.startswith("training without torch.compile, which is slower: it needs a compiler: none of gcc")
    with pytest.raises(InputError, match=r"run\.compile: .*gcc"):
        chosen(True, "gpu")
    gpu.setenv("CC", "/nowhere/cc")
    assert chosen(None, "gpu").notes[0].endswith("needs a compiler: CC names /nowhere/cc, which is not installed")
    gpu.setenv("CC", sys.executable)
    assert chosen(None, "gpu").compiled
    gpu.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))  # Python without its headers
    backend = chosen(None, "gpu")
    assert not backend.compiled
    assert f"python3-dev or python3-devel, and {tmp_path}/Python.h is missing" in backend.notes[0]
    (tmp_path / "Python.h").touch()
    assert chosen(None, "gpu").compiled


@pytest.mark.parametrize(
    ("backend", "problem"),
    [
        (Backend(), None),
        (Backend(attention=FLASH_ATTENTION), "flash attention does not run on cpu: .*; install a torch that fits"),
        (
            Backend(compiled=CompiledForward),
            "run.compile: torch.compile does not run on cpu: backend='no_gcc' raised: OSError: no gcc; mend that, or "
            "set run.compile to false to train without it",
        ),
    ],
)
def test_parts_that_do_not_run_are_found_before_training(
    backend: Backend, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, which has no flash attention, and with a compiler that fails."""

    def no_gcc(*_: object) -> Callable[..., object]:
        raise OSError("no gcc")

    monkeypatch.setattr("pipeline.runtime.backend_choice.start_compiler", lambda: None)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=no_gcc))
    with nullcontext() if problem is None else pytest.raises(InputError, match=problem):
        try_parts(backend, torch.device("cpu"))


@pytest.mark.parametrize(
    ("accelerator", "precision", "reason"),
    [("cpu", "bf16-mixed", "it is for GPUs"), ("gpu", "32-true", "plain attention cannot be compiled")],
)
def test_compilation_is_ignored_where_nothing_can_be_compiled(
    accelerator: str, precision: str, reason: str, gpu: pytest.MonkeyPatch
) -> None:
    """With a warning where it is requested; and the backend's line says what runs."""
    options = {"accelerator": accelerator, "precision": precision}
    for requested, notes in ((True, [f"run.compile is ignored: {reason}"]), (None, []), (False, [])):
        backend = choose_backend("pytorch", requested, options, NETWORK)
        others = [note for note in backend.notes if "without flash attention" not in note]
        assert (backend.compiled, others) == (None, notes)
        assert "attention plain, compilation none" in backend.line()
