"""Chooses the backend of a run and the search of a device: the only place that decides which implementation runs.

Besides plain PyTorch there are the fast paths of `model/fast/`. Programs that are compiled on this machine are compared
with plain PyTorch here before they are used.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from data_module.errors import InputError
from model.backend import PYTORCH_SEARCH, Backend, Search
from model.fast import compiled_attention, packed_linear
from model.fast import compiled_search as search_program
from model.fast.compilation import CompiledForward, compiled_chunk_terms
from model.packed_attention import FLASH_ATTENTION, PLAIN_ATTENTION, RowSentences
from model.settings import NetworkSettings
from model.transformer import Transformer
from pipeline.runtime.compiled_code import Program, load_program, missing_compiler, start_compiler
from pipeline.runtime.console import report
from pipeline.runtime.devices import TrainerOptions, device_indices
from pipeline.runtime.launch import local_rank
from pipeline.runtime.memory import limit_onednn_cache

_FLOAT32 = ("32-true", "32")
_SEARCHES_IN_FLOAT32 = 256
"""Up to this d_model, the compiled search in float32 is faster even than PyTorch's search in bfloat16."""


def choose_backend(
    kernels: str | None, compiles: bool | None, options: TrainerOptions, network: NetworkSettings
) -> Backend:
    """Return the backend of training: what the recipe names, or else PyTorch and, on a CPU, compiled programs.

    Programs are compiled and compared with PyTorch's operators here, which takes some seconds the first time.
    `kernels` and `compiles` are the recipe's `run.kernels` and `run.compile`.

    Raises InputError if the machine cannot run what is requested.
    """
    precision = str(options["precision"])
    notes: list[str] = []
    parts: dict[str, Any] = {"attention": PLAIN_ATTENTION, "search": PYTORCH_SEARCH}
    if (obstacle := flash_obstacle(options, network)) is None:
        parts["attention"] = FLASH_ATTENTION
    elif options["accelerator"] == "cpu" and kernels is None:
        parts |= _compiled_programs(precision, network, notes)
    elif _on_gpu(options):
        notes.append(f"training without flash attention, and so without torch.compile, which is slower: {obstacle}")
    if should_compile(compiles, options, parts["attention"] is PLAIN_ATTENTION, notes):
        parts |= {"compiled": CompiledForward, "chunk_terms": compiled_chunk_terms()}
    return Backend(precision, notes=tuple(notes), **parts)


def _compiled_programs(precision: str, network: NetworkSettings, notes: list[str]) -> dict[str, Any]:
    """Return the compiled parts to use, by their names in `Backend`; add a note about parts that cannot be loaded."""
    is_float32 = precision in _FLOAT32
    loaders: dict[str, Callable[[], Any]] = {}
    if (is_float32 or precision == "bf16-mixed") and _compiled_attention_takes(network):
        loaders["attention"] = lambda: load_compiled_attention().attention()
    is_faster = is_float32 or (precision == "bf16-mixed" and network.d_model <= _SEARCHES_IN_FLOAT32)
    if is_faster and search_program.unsupported(network) is None:
        loaders["search"] = compiled_search
    parts: dict[str, Any] = {}
    lacking: dict[str, list[str]] = {}
    for part, load in loaders.items():
        try:
            parts[part] = load()
        except OSError as error:
            lacking.setdefault(str(error), []).append(part)
    for reason, names in lacking.items():
        notes.append(f"training without the compiled {', '.join(names)}, which is slower: {reason}")
    return parts


def _compiled_attention_takes(network: NetworkSettings) -> bool:
    """Return whether the compiled attention supports the network."""
    multiple = compiled_attention.HEAD_MULTIPLE
    takes_heads = network.key_size % multiple == network.value_size % multiple == 0
    return takes_heads and not network.attention_dropout and network.self_attention == NetworkSettings.self_attention


def _own_device(options: TrainerOptions) -> int:
    """Return the index of the GPU that Lightning will give to this process."""
    indices, rank = device_indices(options), local_rank()
    index = indices[rank] if rank < len(indices) else 0
    return index if index < torch.cuda.device_count() else 0  # Lightning reports the mistake.


def _on_gpu(options: TrainerOptions) -> bool:
    return options["accelerator"] in ("auto", "gpu", "cuda") and torch.cuda.is_available()


def should_compile(requested: bool | None, options: TrainerOptions, is_plain: bool, notes: list[str]) -> bool:
    """Return whether to train with torch.compile: by default on a GPU, where there is a compiler.

    Plain attention (`is_plain`) has groups of sentences that change shape from step to step. `notes` gets a line if a
    missing compiler makes training slower, or if `requested` is ignored.

    Raises InputError if compilation is requested, and there is no compiler.
    """
    obstacle = "plain attention cannot be compiled" if is_plain else None
    obstacle = obstacle if _on_gpu(options) else "it is for GPUs"
    if requested and obstacle:
        notes.append(f"run.compile is ignored: {obstacle}")
    if requested is False or obstacle:
        return False
    missing = missing_compiler()
    if missing is None:
        return True
    if requested:
        hint = "install what is missing, or set run.compile to false to train without it"
        raise InputError(f"run.compile: torch.compile {missing}; {hint}")
    notes.append(f"training without torch.compile, which is slower: it {missing}")
    return False


def flash_obstacle(options: TrainerOptions, network: NetworkSettings) -> str | None:
    """Return why PyTorch's variable-length flash attention cannot be used; None if it can."""
    if not _on_gpu(options):
        return "it is for GPUs"
    d_k, d_v, precision = network.key_size, network.value_size, str(options["precision"])
    capability = torch.cuda.get_device_capability(_own_device(options))
    obstacles = {
        f"trainer.precision {precision} is not of 16 bits": not precision.startswith(("bf16", "16")),
        f"network.attention_dropout is {network.attention_dropout}": network.attention_dropout > 0.0,
        f"network.self_attention is {network.self_attention}": network.self_attention != NetworkSettings.self_attention,
        f"heads have d_k {d_k} and d_v {d_v}, not multiples of 8 up to 256": d_k % 8 or d_v % 8 or max(d_k, d_v) > 256,
        f"heads have d_k {d_k}, above d_v {d_v}": d_k > d_v,
        f"this GPU's compute capability is {'.'.join(map(str, capability))}, below 8.0": capability < (8, 0),
    }
    return "; ".join(line for line, holds in obstacles.items() if holds) or None


def try_gpu(backend: Backend, options: TrainerOptions) -> None:
    """Try a backend's parts on this process's GPU, if training has one; raise InputError as `try_parts` does."""
    if _on_gpu(options):
        try_parts(backend, torch.device("cuda", _own_device(options)))


def try_parts(backend: Backend, device: torch.device) -> None:
    """Compute a small attention by the backend's kernel, and compile a sum, if training compiles.

    Raises InputError if the driver, the C compiler or a library fails.
    """
    way_out = "install a torch that fits this GPU and its driver"
    tried = f"{backend.attention.name} attention"
    try:
        x = torch.ones(8, 24, dtype=torch.bfloat16, device=device)
        offsets = torch.tensor([0, 8], dtype=torch.int32, device=device)
        if backend.attention.function is not None:
            x = backend.attention.function([x], RowSentences(offsets, offsets, 8, False), 1, 8, 0.0)
        x.tolist()  # waits for the device
        if backend.compiled is not None:
            tried, way_out = "run.compile: torch.compile", "mend that, or set run.compile to false to train without it"
            start_compiler()
            torch.compile(lambda x: x + 1)(x).tolist()
    except RuntimeError as error:
        # The compiler's advice on how to debug it follows after an empty line.
        reason = " ".join(str(error).partition("\n\n")[0].split())[:300]
        raise InputError(f"{tried} does not run on {device}: {reason}; {way_out}") from error


def choose_search(
    device: str, network: Transformer, search_ids: tuple[int, int, int, int]
) -> Transformer | search_program.CompiledSearch:
    """Return the fastest search on a device. On a CPU, the network cannot be used for anything else afterwards.

    `search_ids` are the ids that `BeamSearch` takes.
    """
    if device != "cpu":
        return network
    lacking = search_program.unsupported(network.settings)
    try:
        if lacking is None:
            return search_program.CompiledSearch(load_compiled_search(), network, *search_ids)
        reason = f"it lacks {lacking}"
    except OSError as error:
        reason = str(error)
    report(f"translating without the compiled search, which is slower: {reason}")
    limit_onednn_cache()
    if packed_linear.can_pack(network):
        packed_linear.pack_linears(network)
    return network


def load_compiled_attention() -> compiled_attention.CompiledAttention:
    """Return the compiled attention; raise OSError as `load_program` does."""
    module = compiled_attention
    return load_program(Program("attention", module.SOURCES, module.CompiledAttention, module.agrees))


def load_compiled_search() -> ctypes.CDLL:
    """Return the compiled search; raise OSError as `load_program` does."""
    module = search_program
    return load_program(Program("search", module.SOURCES, module.load_library, module.agrees))


def compiled_search() -> Search:
    """Return the compiled search as a part of the backend; it copies the weights.

    Raises OSError as `load_program` does.
    """
    library = load_compiled_search()

    # Not `functools.partial`: EMA copies the module with its backend, and a library cannot be copied.
    def search(network: Transformer, *ids: Any) -> search_program.CompiledSearch:
        return search_program.CompiledSearch(library, network, *ids)

    return Search("C++", search)
