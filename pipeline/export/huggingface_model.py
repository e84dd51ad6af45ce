"""`huggingface/`: network and tokenizer as a Marian model of Transformers, an optional extra that writes it.

Transformers computes the same probabilities. Its beam search divides log-probabilities by length ** alpha instead of
the paper's ((5 + length) / 6) ** alpha, and limits an answer's length by a number, not by the length of its source.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data_module.errors import InputError, install
from data_module.tokenization.standalone import standalone_model
from data_module.tokenization.tokenizer import Tokenizer
from model.settings import DecodingSettings
from model.transformer import LearnedPositions, Transformer
from pipeline.export.marian_weights import to_marian
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
    if found := [*_unsupported_settings(network), *_unsupported_symbols(tokenizer)]:
        raise InputError(f"Transformers' Marian cannot hold this model: {'; '.join(found)}; export other formats")


def _unsupported_settings(trained: Transformer) -> list[str]:
    network: Any = trained  # members of a ModuleList are untyped
    layer, attention, found = network.encoder[0], network.encoder[0].self_attention, []
    if layer.feed_forward_residual.pre_norm:
        found.append("network.pre_norm is true")
    if isinstance(network.positions, LearnedPositions):
        found.append("network.learned_positions is true")
    norm, activation = layer.feed_forward_residual.norm, layer.feed_forward.activation
    if type(norm) is not nn.LayerNorm:
        found.append(f"network.norm is {type(norm).__name__}, not LayerNorm")
    if type(activation) not in ACTIVATIONS:
        names = " or ".join(kind.__name__ for kind in ACTIVATIONS)
        found.append(f"network.activation is {type(activation).__name__}, not {names}")
    size = network.embedding.embedding_dim / attention.num_heads
    for name in ("d_k", "d_v"):
        if getattr(attention, name) != size:
            found.append(f"network.{name} is {getattr(attention, name)}, not d_model / num_heads, {size:g}")
    return found


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
