"""`onnx/`: encoder and decoding step for ONNX Runtime. The caller writes the loop.

A step is a pure function of R hypotheses, each with a source of its own. It takes their keys and values and returns
longer ones, which the caller may reorder. All dimensions but those of the network are dynamic.

Shapes: R hypotheses, S source length, P previous tokens, H heads, K d_k, V d_v, N decoder layers.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data_module.errors import InputError, require_package
from model.transformer import PaddedTransformer, Transformer
from pipeline.export.exported_program import ComputedPositions, quiet, with_computed_positions

INPUTS = {
    "encode": ["source", "source_mask"],
    "step": ["last", "keys", "values", "cross_keys", "cross_values", "source_mask"],
}
OUTPUTS = {"encode": ["cross_keys", "cross_values"], "step": ["logits", "longer_keys", "longer_values"]}
"""The programs, and the names of their inputs and outputs."""


class Positions(ComputedPositions):
    """Does what `sinusoidal_table` does. The exponent is a sum, because the export rounds each number to float32."""

    def forward(self, start: int, length: int) -> Tensor:
        """Return the encodings [length, D] of positions start to start + length - 1."""
        exponent = -math.log(10000.0) / self.d_model
        high = math.floor(exponent * 1048576.0) / 1048576.0
        total = torch.full([], high, dtype=torch.float64) + (exponent - high)
        position = torch.arange(start, start + length, dtype=torch.float64).unsqueeze(1)
        angle = position * torch.exp(torch.arange(0, self.d_model, 2, dtype=torch.float64) * total)
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, : self.d_model].to(torch.float32)


class Encode(nn.Module):
    """The encoder and the cross-attention's keys and values."""

    def __init__(self, network: Transformer) -> None:
        super().__init__()
        network = with_computed_positions(network, Positions)
        # Only the cross-attention of each decoder layer, so that nothing unused is written.
        layers = (nn.ModuleDict({"cross_attention": layer.cross_attention}) for layer in network.decoder)  # type: ignore
        network.decoder = nn.ModuleList(layers)
        self.network = PaddedTransformer(network)

    def forward(self, source: Tensor, source_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Map ids [R, S] and mask [R, S] to the cross-attention's keys [N, R, H, S, K] and values [N, R, H, S, V]."""
        cache = self.network.init_cache(self.network.encode(source, source_mask), 0)
        return torch.stack([layer[2] for layer in cache]), torch.stack([layer[3] for layer in cache])


class Step(nn.Module):
    """One decoding step of every hypothesis."""

    def __init__(self, network: Transformer) -> None:
        super().__init__()
        network = with_computed_positions(network, Positions)
        network.encoder = nn.ModuleList()
        self.network = PaddedTransformer(network)

    def forward(
        self,
        last: Tensor,
        keys: Tensor,
        values: Tensor,
        cross_keys: Tensor,
        cross_values: Tensor,
        source_mask: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next token's logits [R, vocabulary], and keys and values with one more position.

        Args:
            last: int64 ids [R], the newest token of each hypothesis.
            keys: self-attention's keys [N, R, H, P, K]; P is 0 at the first step.
            values: self-attention's values [N, R, H, P, V].
            cross_keys: cross-attention's keys from `Encode`, as `cross_values`.
            source_mask: bool [R, S], True at tokens.
        """
        # A sentence has one hypothesis, whose path has all slots. The cache has no free slot, so it is not written to.
        position, cache = keys.size(3), list(zip(keys, values, cross_keys, cross_values, strict=True))
        states, cache = self.network.step(last.unsqueeze(1), position, position, cache, source_mask, None)
        longer = torch.stack([layer[0] for layer in cache]), torch.stack([layer[1] for layer in cache])
        return self.network.logits(states).squeeze(1), *longer


def _programs(network: Transformer) -> dict[str, tuple[nn.Module, tuple[Any, ...], tuple[dict[int, Any], ...]]]:
    """Return `Encode` and `Step`, arguments to record each with, and the dynamic dimensions of these."""
    longest = network.positions.max_positions
    rows = torch.export.Dim("rows")
    length = torch.export.Dim("source_length", max=longest or None)
    past = torch.export.Dim("past", max=longest - 1 if longest else None)
    source, encode = torch.full([2, 3], 4), Encode(network)
    text, text_dimensions = (source, source > 0), ({0: rows, 1: length},) * 2
    with torch.no_grad():
        cross = encode(*text)
    own = [values[:, :, :, :2].contiguous() for values in cross]
    step_dimensions = ({0: rows}, *({1: rows, 3: past},) * 2, *({1: rows, 3: length},) * 2, {0: rows, 1: length})
    return {
        "encode": (encode.eval(), text, text_dimensions),
        "step": (Step(network).eval(), (source[:, 0], *own, *cross, source > 0), step_dimensions),
    }


def require_onnx() -> None:
    """Raise InputError if ONNX Runtime or the package that writes ONNX files is not installed."""
    for name in ("onnxruntime", "onnxscript"):  # PyTorch imports onnxscript.
        require_package(name, "onnx")


def write_onnx(network: Transformer, folder: Path) -> None:
    """Write `encode.onnx` and `step.onnx` into a new folder.

    Raises InputError if an operator of the network has no form in ONNX.
    """
    folder.mkdir()
    for name, (module, arguments, dimensions) in _programs(network).items():
        with torch.no_grad(), quiet():
            try:
                converted = torch.onnx.export(
                    module,
                    arguments,
                    input_names=INPUTS[name],
                    output_names=OUTPUTS[name],
                    dynamic_shapes=dimensions,
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
            # They name the source line of each operator, with paths of this machine.
            node.metadata_props.clear()
        converted.save(folder / f"{name}.onnx")


def load_onnx(folder: Path) -> dict[str, Callable[..., Any]]:
    """Load `encode` and `step` as functions from tensors to a tuple of tensors, on the CPU."""
    runtime = require_package("onnxruntime", "onnx")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()

    def load(name: str) -> Callable[..., Any]:
        session = runtime.InferenceSession(folder / f"{name}.onnx", options, providers=["CPUExecutionProvider"])

        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            arrays = {key: tensor.numpy() for key, tensor in zip(INPUTS[name], inputs, strict=True)}
            return tuple(torch.from_numpy(array) for array in session.run(None, arrays))

        return run

    return {name: load(name) for name in INPUTS}
