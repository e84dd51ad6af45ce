"""Conversion of a network to CTranslate2's format, with CTranslate2's Python API (an optional extra).

CTranslate2 computes the same probabilities. Its beam search stops earlier, and it divides log-probabilities by
length ** alpha instead of the paper's ((5 + length) / 6) ** alpha.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data_module.errors import InputError, install
from data_module.tokenization.tokenizer import Tokenizer
from model.attention import CrossAttention, SelfAttention
from model.layers import FeedForward, Residual
from model.transformer import LearnedPositions, Transformer, sinusoidal_table

NUM_POSITIONS = 2048
"""Number of sinusoidal positions in a model; CTranslate2 refuses longer sentences and translations."""


def require_ctranslate2() -> Any:
    """Return the package `ctranslate2`; raise InputError if it is not installed."""
    try:
        import ctranslate2
    except ImportError:
        raise InputError(f"ctranslate2 is not installed; run: {install('ctranslate2')}") from None
    return ctranslate2


def require_shape(trained: Transformer) -> None:
    """Raise InputError if CTranslate2 is not installed or does not support the network."""
    require_ctranslate2()
    network: Any = trained
    layer, attention = network.encoder[0], network.encoder[0].self_attention
    for key, expected, module in (
        ("norm", (nn.LayerNorm,), layer.feed_forward_residual.norm),
        ("activation", (nn.ReLU, nn.SiLU), layer.feed_forward.activation),
        ("self_attention", (SelfAttention,), attention),
    ):
        if type(module) not in expected:
            names = " and ".join(kind.__name__ for kind in expected)
            raise InputError(
                f"CTranslate2 export knows {names} as network.{key} only; this network has "
                f"{type(module).__name__}; leave network.{key} out of the recipe to export it"
            )
    d_model = network.embedding.embedding_dim
    if not attention.d_k == attention.d_v == d_model / attention.num_heads:
        raise InputError(
            f"CTranslate2 needs d_k = d_v = d_model / num_heads; this network has d_k {attention.d_k}, "
            f"d_v {attention.d_v}, d_model {d_model}, num_heads {attention.num_heads}; export other formats"
        )


def write_ctranslate2(
    network: Transformer, tokenizer: Tokenizer, folder: Path, quantization: str | None = None
) -> None:
    """Write model.bin, config.json and shared_vocabulary.json.

    The model takes sources as pieces of the tokenizer, with the end symbol.

    Args:
        network: the network.
        tokenizer: its tokenizer.
        folder: the folder to write to; created if missing.
        quantization: type of the weights, such as "int8"; None for float32.

    Raises:
        InputError: CTranslate2 is not installed or does not support the network.
    """
    require_shape(network)
    specification = _specification(network, tokenizer)
    specification.validate()
    # Detects that three matrices are tied.
    specification.optimize(quantization=quantization)
    folder.mkdir(parents=True, exist_ok=True)
    specification.save(str(folder))


def _specification(trained: Transformer, tokenizer: Tokenizer) -> Any:
    from ctranslate2.specs import TransformerSpec
    from ctranslate2.specs.common_spec import Activation

    network: Any = trained  # members of a ModuleList are untyped
    attention = network.encoder[0].self_attention
    d_model = network.embedding.embedding_dim
    is_pre_norm = isinstance(network.encoder_norm, nn.LayerNorm)
    activation = network.encoder[0].feed_forward.activation
    spec = TransformerSpec.from_config(
        (len(network.encoder), len(network.decoder)),
        attention.num_heads,
        pre_norm=is_pre_norm,
        activation=Activation.SWISH if isinstance(activation, nn.SiLU) else Activation.RELU,
    )
    table = (
        network.positions.table
        if isinstance(network.positions, LearnedPositions)
        else sinusoidal_table(NUM_POSITIONS, d_model)
    )
    for side in (spec.encoder, spec.decoder):
        side.scale_embeddings = True
        side.position_encodings.encodings = _array(table)
    spec.encoder.embeddings[0].weight = _array(network.embedding.weight)
    spec.decoder.embeddings.weight = _array(network.embedding.weight)
    spec.decoder.projection.weight = _array(network.embedding.weight)
    if network.projection.bias is not None:
        spec.decoder.projection.bias = _array(network.projection.bias)
    for target, layer in zip(spec.encoder.layer, network.encoder, strict=True):
        _self_attention(target.self_attention, layer.self_attention, layer.self_attention_residual)
        _feed_forward(target.ffn, layer.feed_forward, layer.feed_forward_residual)
    for target, layer in zip(spec.decoder.layer, network.decoder, strict=True):
        _self_attention(target.self_attention, layer.self_attention, layer.self_attention_residual)
        _cross_attention(target.attention, layer.cross_attention, layer.cross_attention_residual)
        _feed_forward(target.ffn, layer.feed_forward, layer.feed_forward_residual)
    if is_pre_norm:
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


def _self_attention(target: Any, attention: SelfAttention, residual: Residual) -> None:
    _linear(target.linear[0], attention.query_key_value)
    _linear(target.linear[1], attention.output)
    _norm(target.layer_norm, residual.norm)


def _cross_attention(target: Any, attention: CrossAttention, residual: Residual) -> None:
    _linear(target.linear[0], attention.query)
    _linear(target.linear[1], attention.key_value)
    _linear(target.linear[2], attention.output)
    _norm(target.layer_norm, residual.norm)


def _feed_forward(target: Any, feed_forward: FeedForward, residual: Residual) -> None:
    _linear(target.linear_0, feed_forward.inner)
    _linear(target.linear_1, feed_forward.outer)
    _norm(target.layer_norm, residual.norm)


def _linear(target: Any, linear: nn.Linear) -> None:
    target.weight, target.bias = _array(linear.weight), _array(linear.bias)


def _norm(target: Any, norm: Any) -> None:
    target.gamma, target.beta = _array(norm.weight), _array(norm.bias)


def _array(tensor: Tensor) -> Any:
    # A copy, because quantization rounds in place.
    return tensor.detach().to("cpu", torch.float32, copy=True).numpy()
