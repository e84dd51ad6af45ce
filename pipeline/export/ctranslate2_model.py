"""Conversion of a network to CTranslate2's format, with CTranslate2's Python API (an optional extra).

CTranslate2 computes the same probabilities. Its beam search stops earlier, and it divides log-probabilities by
length ** alpha instead of the paper's ((5 + length) / 6) ** alpha.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from data_module.errors import require_package
from data_module.tokenization.tokenizer import Tokenizer
from model.transformer import Transformer, sinusoidal_table
from pipeline.export.support import lacking_layers, refuse

NUM_POSITIONS = 2048
"""Number of sinusoidal positions in a model; CTranslate2 refuses longer sentences and translations."""


def require_ctranslate2(network: Transformer) -> None:
    """Raise InputError if CTranslate2 is not installed or lacks a part of the network."""
    require_package("ctranslate2", "ctranslate2")
    refuse("CTranslate2", lacking_layers(network.settings))


def write_ctranslate2(
    network: Transformer, tokenizer: Tokenizer, folder: Path, quantization: str | None = None
) -> None:
    """Write model.bin, config.json and shared_vocabulary.json, for a network that `require_ctranslate2` allows.

    The model takes sources as pieces of the tokenizer, with the end symbol. `quantization` is the type of the weights,
    such as "int8"; None for float32.
    """
    specification = _specification(network, tokenizer)
    specification.validate()
    # This detects that the three embedding matrices are tied.
    specification.optimize(quantization=quantization)
    folder.mkdir(parents=True, exist_ok=True)
    specification.save(str(folder))


def _specification(trained: Transformer, tokenizer: Tokenizer) -> Any:
    # An optional extra.
    from ctranslate2.specs import TransformerSpec
    from ctranslate2.specs.common_spec import Activation

    network: Any = trained  # members of a ModuleList are untyped
    settings = trained.settings
    activation = network.encoder[0].feed_forward.activation
    spec = TransformerSpec.from_config(
        (settings.encoder_layers, settings.decoder_layers),
        settings.num_heads,
        pre_norm=settings.pre_norm,
        activation=Activation.SWISH if isinstance(activation, nn.SiLU) else Activation.RELU,
    )
    is_learned = settings.learned_positions
    table = network.positions.table if is_learned else sinusoidal_table(NUM_POSITIONS, settings.d_model)
    for side in (spec.encoder, spec.decoder):
        side.scale_embeddings = True
        side.position_encodings.encodings = _array(table)
    spec.encoder.embeddings[0].weight = _array(network.embedding.weight)
    spec.decoder.embeddings.weight = _array(network.embedding.weight)
    spec.decoder.projection.weight = _array(network.embedding.weight)
    if network.projection.bias is not None:
        spec.decoder.projection.bias = _array(network.projection.bias)
    for stack, layers in ((spec.encoder, network.encoder), (spec.decoder, network.decoder)):
        for target, layer in zip(stack.layer, layers, strict=True):
            own, feed_forward = layer.self_attention, layer.feed_forward
            _sublayer(target.self_attention.linear, [own.query_key_value, own.output])
            _norm(target.self_attention.layer_norm, layer.self_attention_residual.norm)
            if stack is spec.decoder:
                cross = layer.cross_attention
                _sublayer(target.attention.linear, [cross.query, cross.key_value, cross.output])
                _norm(target.attention.layer_norm, layer.cross_attention_residual.norm)
            _sublayer([target.ffn.linear_0, target.ffn.linear_1], [feed_forward.inner, feed_forward.outer])
            _norm(target.ffn.layer_norm, layer.feed_forward_residual.norm)
    if settings.pre_norm:
        _norm(spec.encoder.layer_norm, network.encoder_norm)
        _norm(spec.decoder.layer_norm, network.decoder_norm)
    pieces = tokenizer.pieces()
    spec.register_source_vocabulary(pieces)
    spec.register_target_vocabulary(pieces)
    config = spec.config
    config.bos_token = config.decoder_start_token = pieces[tokenizer.bos_id]
    config.eos_token, config.unk_token = pieces[tokenizer.eos_id], pieces[tokenizer.unk_id]
    config.add_source_bos = config.add_source_eos = False
    config.layer_norm_epsilon = network.encoder[0].feed_forward_residual.norm.eps
    return spec


def _sublayer(targets: list[Any], linears: list[nn.Linear]) -> None:
    for target, linear in zip(targets, linears, strict=True):
        target.weight, target.bias = _array(linear.weight), _array(linear.bias)


def _norm(target: Any, norm: Any) -> None:
    target.gamma, target.beta = _array(norm.weight), _array(norm.bias)


def _array(tensor: Tensor) -> NDArray[np.float32]:
    # A copy, because quantization rounds in place.
    return tensor.detach().to("cpu", torch.float32, copy=True).numpy()
