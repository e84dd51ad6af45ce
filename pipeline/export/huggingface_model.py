"""`huggingface/`: network and tokenizer as a Marian model of Transformers, an optional extra that writes it.

Transformers computes the same probabilities. Its beam search divides log-probabilities by length ** alpha instead of
the paper's ((5 + length) / 6) ** alpha, and limits an answer's length by a number, not by the length of its source.

A Marian model's weights are the network's but for three things: their names; queries, keys and values, which are one
matrix here; and the order of the d_model dimensions. Positions there are all sines and then all cosines, here they
alternate. Reordering the dimensions of d_model in every weight makes up for that: all sums stay sums of the same terms.
`marian_import.py` reads such weights.
"""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from data_module.errors import InputError, install
from data_module.tokenization.tokenizer import Tokenizer
from data_module.tokenization.training import standalone_model
from model.attention import SelfAttention
from model.settings import DecodingSettings
from model.transformer import LearnedPositions, Transformer
from pipeline.inference.translator import LONGEST

ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.SiLU: "swish"}
"""Transformers' names of the activations that it shares with this project."""


def require_transformers() -> Any:
    """Return the package `transformers`; raise InputError if it is not installed."""
    try:
        # By name, because type checking the package takes minutes.
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise InputError(f"transformers is not installed; run: {install('huggingface')}") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def require_marian(network: Transformer, tokenizer: Tokenizer) -> None:
    """Raise InputError if Transformers is not installed, or its Marian cannot hold the network or the tokenizer."""
    require_transformers()
    if obstacles := [*_unsupported_settings(network), *_unsupported_symbols(tokenizer)]:
        raise InputError(f"Transformers' Marian cannot hold this model: {'; '.join(obstacles)}; export other formats")


def _unsupported_settings(trained: Transformer) -> list[str]:
    network: Any = trained  # members of a ModuleList are untyped
    layer, attention, unsupported = network.encoder[0], network.encoder[0].self_attention, []
    if layer.feed_forward_residual.pre_norm:
        unsupported.append("network.pre_norm is true")
    if isinstance(network.positions, LearnedPositions):
        unsupported.append("network.learned_positions is true")
    norm, activation = layer.feed_forward_residual.norm, layer.feed_forward.activation
    if type(norm) is not nn.LayerNorm:
        unsupported.append(f"network.norm is {type(norm).__name__}, not LayerNorm")
    if type(attention) is not SelfAttention:
        unsupported.append(f"network.self_attention is {type(attention).__name__}, not SelfAttention")
    if type(activation) not in ACTIVATIONS:
        names = " or ".join(kind.__name__ for kind in ACTIVATIONS)
        unsupported.append(f"network.activation is {type(activation).__name__}, not {names}")
    size = network.embedding.embedding_dim / attention.num_heads
    for name in ("d_k", "d_v"):
        if getattr(attention, name) != size:
            unsupported.append(f"network.{name} is {getattr(attention, name)}, not d_model / num_heads, {size:g}")
    return unsupported


def _unsupported_symbols(tokenizer: Tokenizer) -> list[str]:
    if tokenizer.pair:  # an imported one, which does the same
        return []
    # Marian's tokenizer takes them off the beginning of a sentence before sentencepiece sees it, which then does not
    # mark the beginning of a word before them.
    codes = [symbol for symbol in tokenizer.user_symbols if symbol.startswith(">>") and "<<" in symbol]
    return (
        [f"corpus.user_symbols has {', '.join(codes)}, which Marian's tokenizer encodes differently"] if codes else []
    )


def marian_config(network: Any, tokenizer: Tokenizer, num_positions: int) -> dict[str, Any]:
    """Return the arguments of `MarianConfig` for a network."""
    attention, feed_forward = network.encoder[0].self_attention, network.encoder[0].feed_forward
    config: dict[str, Any] = {
        "vocab_size": tokenizer.vocabulary_size,
        "d_model": network.embedding.embedding_dim,
        "scale_embedding": True,
        "activation_function": ACTIVATIONS[type(feed_forward.activation)],
        "max_position_embeddings": num_positions,
        "pad_token_id": tokenizer.pad_id,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "decoder_start_token_id": tokenizer.bos_id,
        "forced_eos_token_id": None,
    }
    for side, layers in (("encoder", network.encoder), ("decoder", network.decoder)):
        config[f"{side}_layers"] = len(layers)
        config[f"{side}_attention_heads"] = attention.num_heads
        config[f"{side}_ffn_dim"] = feed_forward.inner.out_features
    return config


def generation_settings(tokenizer: Tokenizer, settings: DecodingSettings, length_penalty: float) -> dict[str, Any]:
    """Return the arguments of `GenerationConfig` that come nearest to the checkpoint's search.

    Args:
        tokenizer: the tokenizer.
        settings: the recipe's `decoding:`.
        length_penalty: alpha for Transformers' formula.
    """
    never = [tokenizer.pad_id, tokenizer.bos_id]
    is_beam = settings.beam_size > 1
    return {
        "num_beams": settings.beam_size,
        # For the rule `exact`, Transformers' "never": no open hypothesis can win.
        **({"early_stopping": settings.stop_rule == "first" or "never"} if is_beam else {}),
        **({"length_penalty": length_penalty} if is_beam else {}),
        # The answer of the longest source has at most this many tokens, and the begin symbol counts.
        "max_length": LONGEST + settings.max_extra_tokens + 1,
        "suppress_tokens": never,
        "pad_token_id": tokenizer.pad_id,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "forced_eos_token_id": tokenizer.eos_id,
        "decoder_start_token_id": tokenizer.bos_id,
    }


def write_huggingface(
    network: Transformer,
    tokenizer: Tokenizer,
    settings: DecodingSettings,
    length_penalty: float,
    languages: tuple[str, str],
    folder: Path,
) -> None:
    """Write configuration, weights, generation settings and tokenizer.

    Args:
        network: the network.
        tokenizer: its tokenizer.
        settings: the recipe's `decoding:`.
        length_penalty: alpha for Transformers' formula.
        languages: the source's and the target's language code.
        folder: the folder to write to; created if missing.

    Raises:
        InputError: Transformers is not installed, or its Marian cannot hold the model.
    """
    require_marian(network, tokenizer)
    transformers = require_transformers()
    trained: Any = network
    config = transformers.MarianConfig(
        **marian_config(trained, tokenizer, LONGEST + settings.max_extra_tokens), dropout=trained.dropout.p
    )
    with torch.no_grad():
        model = transformers.MarianMTModel(config).eval()
        weights = to_marian(network.state_dict(), (len(network.encoder), len(network.decoder)))
        missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    # Tied to the embedding, computed, or zero.
    derived = ("embed_tokens.weight", "lm_head.weight", "embed_positions.weight", "final_logits_bias")
    assert all(name.endswith(derived) for name in missing), missing
    model.generation_config = transformers.GenerationConfig(**generation_settings(tokenizer, settings, length_penalty))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    _write_tokenizer(transformers, tokenizer, languages, folder)


def _write_tokenizer(transformers: Any, tokenizer: Tokenizer, languages: tuple[str, str], folder: Path) -> None:
    pieces = tokenizer.pieces()
    paths = [folder / name for name in ("source.spm", "target.spm", "vocab.json")]
    models = tokenizer.pair or [standalone_model(tokenizer)] * 2
    for path, model in zip(paths[:2], models, strict=True):
        path.write_bytes(model)
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    paths[2].write_text(json.dumps(vocabulary, ensure_ascii=False, indent=0), encoding="utf-8")
    source_language, target_language = languages
    special = {f"{name}_token": pieces[getattr(tokenizer, f"{name}_id")] for name in ("pad", "unk", "bos", "eos")}
    marian = transformers.MarianTokenizer(
        *map(str, paths),
        source_lang=source_language,
        target_lang=target_language,
        model_max_length=LONGEST,
        # The special symbols cannot be written in a text, as in this project.
        split_special_tokens=True,
        **special,
    )
    marian.save_pretrained(folder)


SHARED = "model.shared.weight"
"""Name of the embedding matrix."""
BIAS = "final_logits_bias"
"""Name of the output projection's bias, [1, V]."""


class Part(NamedTuple):
    """A linear layer or a norm: its name here, its names there, and where d_model is in its weight."""

    ours: str
    theirs: tuple[str, ...]
    """Several if the rows of the weight and of the bias are divided among as many layers."""
    axis: int
    """0 if the rows of weight and bias are d_model, 1 if the columns of the weight are."""


def parts(encoder_layers: int, decoder_layers: int) -> Iterator[Part]:
    """Yield all linear layers and norms of a post-norm network."""
    for side, count in (("encoder", encoder_layers), ("decoder", decoder_layers)):
        for number in range(count):
            ours, theirs = f"{side}.{number}", f"model.{side}.layers.{number}"
            yield from _attention(f"{ours}.self_attention", f"{theirs}.self_attn", ("query_key_value",))
            if side == "decoder":
                yield from _attention(f"{ours}.cross_attention", f"{theirs}.encoder_attn", ("query", "key_value"))
            yield Part(f"{ours}.feed_forward.inner", (f"{theirs}.fc1",), 1)
            yield Part(f"{ours}.feed_forward.outer", (f"{theirs}.fc2",), 0)
            yield Part(f"{ours}.feed_forward_residual.norm", (f"{theirs}.final_layer_norm",), 0)


def _attention(ours: str, theirs: str, projections: tuple[str, ...]) -> Iterator[Part]:
    for name in projections:
        yield Part(f"{ours}.{name}", tuple(f"{theirs}.{word[0]}_proj" for word in name.split("_")), 1)
    yield Part(f"{ours}.output", (f"{theirs}.out_proj",), 0)
    yield Part(f"{ours}_residual.norm", (f"{theirs}_layer_norm",), 0)


def to_marian(weights: dict[str, Tensor], depths: tuple[int, int]) -> dict[str, Tensor]:
    """Return a network's weights by their names there.

    Args:
        weights: the state dict of a `Transformer` whose d_k and d_v are equal.
        depths: number of encoder and of decoder layers.
    """
    embedding = weights["embedding.weight"]
    order = halves(embedding.size(1))
    renamed = {SHARED: embedding[:, order]}
    if "projection.bias" in weights:
        renamed[BIAS] = weights["projection.bias"].unsqueeze(0)
    for part in parts(*depths):
        for kind in ("weight", "bias"):
            whole = _reordered(weights[f"{part.ours}.{kind}"], order, part.axis)
            for name, tensor in zip(part.theirs, whole.chunk(len(part.theirs)), strict=True):
                renamed[f"{name}.{kind}"] = tensor.contiguous()
    return renamed


def from_marian(weights: dict[str, Tensor], depths: tuple[int, int]) -> dict[str, Tensor]:
    """Return the state dict of a `Transformer`, from weights by their names there.

    Embedding and bias have a row for each piece of their vocabulary.

    Raises:
        KeyError: a weight is missing.
    """
    embedding = weights[SHARED]
    order = halves(embedding.size(1)).argsort()
    renamed = {"embedding.weight": embedding[:, order], "projection.bias": weights[BIAS].flatten()}
    for part in parts(*depths):
        for kind in ("weight", "bias"):
            whole = torch.cat([weights[f"{name}.{kind}"] for name in part.theirs])
            renamed[f"{part.ours}.{kind}"] = _reordered(whole, order, part.axis)
    return renamed


def halves(d_model: int) -> Tensor:
    """Return, for each dimension there, the dimension here: first those of the sines, then those of the cosines."""
    return torch.cat([torch.arange(0, d_model, 2), torch.arange(1, d_model, 2)])


def _reordered(tensor: Tensor, order: Tensor, axis: int) -> Tensor:
    """Reorder d_model, which is an axis of a weight, or all of a bias if it is axis 0."""
    return tensor.index_select(axis, order) if axis < tensor.dim() else tensor


def marian_shapes(depths: tuple[int, int], vocabulary_size: int, d_model: int, d_ff: int) -> dict[str, list[int]]:
    """Return the shape of each weight by its name there, without weights that are computed or tied to another."""
    shapes = {SHARED: [vocabulary_size, d_model], BIAS: [1, vocabulary_size]}
    for part in parts(*depths):
        rows = d_ff if part.ours.endswith(".inner") else d_model
        columns = d_ff if part.ours.endswith(".outer") else d_model
        for name in part.theirs:
            shapes[f"{name}.weight"] = [rows] if part.ours.endswith(".norm") else [rows, columns]
            shapes[f"{name}.bias"] = [rows]
    return shapes
