"""`huggingface/`: network and tokenizer as a Marian model of Transformers, an optional extra that writes it.

Transformers computes the same probabilities. Its beam search divides log-probabilities by length ** alpha instead of
the paper's ((5 + length) / 6) ** alpha, and limits an answer's length by a number, not by the length of its source.

A Marian model's weights differ from the network's in three ways: their names; queries, keys and values, which are one
matrix in the network; and the order of the d_model dimensions. Marian's positions are all sines and then all cosines,
the network's alternate. Reordering d_model in every weight makes up for that: all sums have the same terms.
`marian_import.py` reads such weights.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from data_module.errors import require_package
from data_module.system.files import PlainValues
from data_module.tokenization.tokenizer import Tokenizer
from data_module.tokenization.training import standalone_model
from model.layers import ACTIVATIONS
from model.settings import DecodingSettings
from model.transformer import Transformer
from pipeline.export.support import lacking_layers, refuse
from pipeline.inference.translator import LONGEST


def require_transformers() -> ModuleType:
    """Return the package `transformers`, which prints errors only; raise InputError if it is not installed."""
    transformers = require_package("transformers", "huggingface")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def require_marian(network: Transformer, tokenizer: Tokenizer) -> None:
    """Raise InputError if Transformers is not installed, or its Marian model lacks a part of network or tokenizer."""
    require_transformers()
    settings = network.settings
    lacking = [f"network.{name} true" for name in ("pre_norm", "learned_positions") if getattr(settings, name)]
    lacking += lacking_layers(settings)
    # Marian's tokenizer removes a language code from the beginning of a sentence before sentencepiece encodes it, so
    # that no mark of a space precedes the code. The tokenizer of an imported model does the same.
    symbols = [] if tokenizer.pair else tokenizer.user_symbols
    if codes := [symbol for symbol in symbols if symbol.startswith(">>") and "<<" in symbol]:
        lacking.append(f"corpus.user_symbols {' '.join(codes)} as other symbols than language codes")
    refuse("Transformers' Marian", lacking)


def marian_config(network: Transformer, tokenizer: Tokenizer, num_positions: int) -> PlainValues:
    """Return the arguments of `MarianConfig` for a network."""
    settings = network.settings
    config: PlainValues = {
        "vocab_size": tokenizer.vocabulary_size,
        "d_model": settings.d_model,
        "scale_embedding": True,
        "activation_function": "relu" if ACTIVATIONS[settings.activation] is nn.ReLU else "swish",
        "max_position_embeddings": num_positions,
        "dropout": settings.dropout,
        "pad_token_id": tokenizer.pad_id,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "decoder_start_token_id": tokenizer.bos_id,
        "forced_eos_token_id": None,
    }
    for side, num_layers in (("encoder", settings.encoder_layers), ("decoder", settings.decoder_layers)):
        config[f"{side}_layers"] = num_layers
        config[f"{side}_attention_heads"] = settings.num_heads
        config[f"{side}_ffn_dim"] = settings.d_ff
    return config


def generation_settings(tokenizer: Tokenizer, settings: DecodingSettings, length_penalty: float) -> PlainValues:
    """Return the arguments of `GenerationConfig` that come nearest to the checkpoint's search.

    `length_penalty` is alpha for Transformers' formula.
    """
    values: PlainValues = {
        "num_beams": settings.beam_size,
        # The answer of the longest source has at most this many tokens, and the begin symbol counts.
        "max_length": LONGEST + settings.max_extra_tokens + 1,
        "suppress_tokens": [tokenizer.pad_id, tokenizer.bos_id, tokenizer.unk_id],
        "pad_token_id": tokenizer.pad_id,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "forced_eos_token_id": tokenizer.eos_id,
        "decoder_start_token_id": tokenizer.bos_id,
    }
    if settings.beam_size > 1:
        # For the rule `exact`, Transformers' "never": no open hypothesis can win.
        values |= {"early_stopping": settings.stop_rule == "first" or "never", "length_penalty": length_penalty}
    return values


def write_huggingface(
    network: Transformer,
    tokenizer: Tokenizer,
    settings: DecodingSettings,
    length_penalty: float,
    languages: tuple[str, str],
    folder: Path,
) -> None:
    """Write configuration, weights, generation settings and tokenizer of a model that `require_marian` allows.

    `length_penalty` is alpha for Transformers' formula, `languages` are the source's and the target's language code.
    """
    transformers = require_transformers()
    config = transformers.MarianConfig(**marian_config(network, tokenizer, LONGEST + settings.max_extra_tokens))
    with torch.no_grad():
        model = transformers.MarianMTModel(config).eval()
        weights = to_marian(network.state_dict(), (len(network.encoder), len(network.decoder)))
        # Missing weights are tied to the embedding, computed, or zero.
        model.load_state_dict(weights, strict=False)
    model.generation_config = transformers.GenerationConfig(**generation_settings(tokenizer, settings, length_penalty))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    _write_tokenizer(transformers, tokenizer, languages, folder)


def _write_tokenizer(transformers: ModuleType, tokenizer: Tokenizer, languages: tuple[str, str], folder: Path) -> None:
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


_LAYER = {
    "self_attention.query_key_value": (1, ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    "self_attention.output": (0, ["self_attn.out_proj"]),
    "self_attention_residual.norm": (0, ["self_attn_layer_norm"]),
    "cross_attention.query": (1, ["encoder_attn.q_proj"]),
    "cross_attention.key_value": (1, ["encoder_attn.k_proj", "encoder_attn.v_proj"]),
    "cross_attention.output": (0, ["encoder_attn.out_proj"]),
    "cross_attention_residual.norm": (0, ["encoder_attn_layer_norm"]),
    "feed_forward.inner": (1, ["fc1"]),
    "feed_forward.outer": (0, ["fc2"]),
    "feed_forward_residual.norm": (0, ["final_layer_norm"]),
}
"""Linear layers and norms of a layer by their names in the network: the axis of d_model, 0 for the rows of weight and
bias and 1 for the columns of the weight, and their Marian names, several if the rows are divided among them."""


def parts(encoder_layers: int, decoder_layers: int) -> Iterator[tuple[str, int, list[str]]]:
    """Yield name, axis of d_model and Marian names of all linear layers and norms of a post-norm network."""
    for side, count in (("encoder", encoder_layers), ("decoder", decoder_layers)):
        for number in range(count):
            for ours, (axis, theirs) in _LAYER.items():
                if side == "decoder" or not ours.startswith("cross_attention"):
                    yield f"{side}.{number}.{ours}", axis, [f"model.{side}.layers.{number}.{name}" for name in theirs]


def to_marian(weights: dict[str, Tensor], depths: tuple[int, int]) -> dict[str, Tensor]:
    """Return the weights of a `Transformer` by their Marian names; its d_k and d_v have to be equal.

    `depths` are the numbers of encoder and of decoder layers.
    """
    embedding = weights["embedding.weight"]
    order = halves(embedding.size(1))
    renamed = {SHARED: embedding[:, order]}
    if "projection.bias" in weights:
        renamed[BIAS] = weights["projection.bias"].unsqueeze(0)
    for ours, axis, theirs in parts(*depths):
        for kind in ("weight", "bias"):
            whole = _reordered(weights[f"{ours}.{kind}"], order, axis)
            for name, tensor in zip(theirs, whole.chunk(len(theirs)), strict=True):
                renamed[f"{name}.{kind}"] = tensor.contiguous()
    return renamed


def from_marian(weights: dict[str, Tensor], depths: tuple[int, int]) -> dict[str, Tensor]:
    """Return the state dict of a `Transformer`, from weights by their Marian names.

    Embedding and bias have a row for each piece of their vocabulary.

    Raises KeyError if a weight is missing.
    """
    embedding = weights[SHARED]
    order = halves(embedding.size(1)).argsort()
    renamed = {"embedding.weight": embedding[:, order], "projection.bias": weights[BIAS].flatten()}
    for ours, axis, theirs in parts(*depths):
        for kind in ("weight", "bias"):
            whole = torch.cat([weights[f"{name}.{kind}"] for name in theirs])
            renamed[f"{ours}.{kind}"] = _reordered(whole, order, axis)
    return renamed


def halves(d_model: int) -> Tensor:
    """Return the network's dimension for each Marian dimension: first those of the sines, then of the cosines."""
    return torch.cat([torch.arange(0, d_model, 2), torch.arange(1, d_model, 2)])


def _reordered(tensor: Tensor, order: Tensor, axis: int) -> Tensor:
    """Reorder d_model, which is `axis` of a weight, and the only axis of a bias if `axis` is 0."""
    return tensor.index_select(axis, order) if axis < tensor.dim() else tensor


def marian_shapes(depths: tuple[int, int], vocabulary_size: int, d_model: int, d_ff: int) -> dict[str, list[int]]:
    """Return the shape of each weight by its Marian name, without weights that are computed or tied to another."""
    shapes = {SHARED: [vocabulary_size, d_model], BIAS: [1, vocabulary_size]}
    for ours, _, theirs in parts(*depths):
        rows = d_ff if ours.endswith(".inner") else d_model
        columns = d_ff if ours.endswith(".outer") else d_model
        for name in theirs:
            shapes[f"{name}.weight"] = [rows] if ours.endswith(".norm") else [rows, columns]
            shapes[f"{name}.bias"] = [rows]
    return shapes
