"""`onnx/`: encoder and decoding step as ONNX files, for ONNX Runtime (an optional extra).

The caller writes the decoding loop. Inputs, outputs and shapes are those of `exported_program.Encode` and `Step`.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_module.errors import InputError, install
from model.transformer import Transformer
from pipeline.export.exported_program import Program, encode_program, step_program

NAME = "onnx"
INPUTS = {
    "encode": ["source", "source_mask"],
    "step": ["last", "keys", "values", "cross_keys", "cross_values", "source_mask"],
}
OUTPUTS = {"encode": ["cross_keys", "cross_values"], "step": ["logits", "longer_keys", "longer_values"]}


def require_onnx() -> Any:
    """Return the package `onnxruntime`; raise InputError if it or a package that writes ONNX files is not installed."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  PyTorch imports it
    except ImportError as error:
        raise InputError(f"{error.name} is not installed; run: {install('onnx')}") from None
    return onnxruntime


def write_onnx(network: Transformer, folder: Path) -> None:
    """Write `encode.onnx` and `step.onnx` into a new folder.

    Raises:
        InputError: packages are not installed, or an operator of the network has no form in ONNX.
    """
    require_onnx()
    folder.mkdir()
    for name, program in (("encode", encode_program(network)), ("step", step_program(network))):
        _write(name, program, folder)


def _write(name: str, program: Program, folder: Path) -> None:
    with _quiet():
        try:
            converted = torch.onnx.export(
                program.exported,
                input_names=INPUTS[name],
                output_names=OUTPUTS[name],
                dynamic_shapes=program.dimensions,
                dynamo=True,
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            reason = " ".join(str(error.__cause__ or error).split())
            raise InputError(
                f"PyTorch cannot write the {name} program of this network as ONNX ({reason[:200]}); leave out "
                "--format onnx"
            ) from error
        assert converted is not None
        for node in converted.model.graph.all_nodes():
            # Where in the sources each operator comes from, with paths of this machine.
            node.metadata_props.clear()
        converted.save(folder / f"{name}.onnx")


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what PyTorch says about packages that are not needed and about its own deprecated calls."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def load_onnx(folder: Path) -> dict[str, Callable[..., Any]]:
    """Load `encode` and `step` as functions from tensors to a tuple of tensors, on the CPU."""
    runtime = require_onnx()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()

    def load(name: str) -> Callable[..., Any]:
        session = runtime.InferenceSession(folder / f"{name}.onnx", options, providers=["CPUExecutionProvider"])

        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            arrays = {key: tensor.numpy() for key, tensor in zip(INPUTS[name], inputs, strict=True)}
            return tuple(torch.from_numpy(array) for array in session.run(None, arrays))

        return run

    return {name: load(name) for name in INPUTS}
