"""A Marian model of Transformers, such as OPUS-MT's, as the starting point of a run (`fit --init-from FOLDER`).

Such a model starts its answers with the padding symbol. In this network the begin symbol has its own row of the
embedding: a copy of the padding symbol's row, with an output bias that keeps it from being chosen.
"""

import json
from pathlib import Path
from typing import NamedTuple

import sentencepiece
import torch
from torch import Tensor

from data_module.errors import InputError, first_of, install
from data_module.system.files import PlainValues, open_regular, read_json, read_whole
from data_module.tokenization.pair import join_models
from data_module.tokenization.tokenizer import NUM_SPECIAL_IDS, Tokenizer
from model.settings import NetworkSettings
from pipeline.checkpointing.weights_only import load_weights_only
from pipeline.export.huggingface_model import BIAS, SHARED, from_marian, marian_shapes

CONFIG, VOCABULARY = "config.json", "vocab.json"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Files of weights; one that is in parts has an index of them in its place."""
_UNKNOWN = "<unk>"
_ACTIVATIONS = {"relu": "relu", "swish": "swish", "silu": "swish"}
"""Name of an activation in the configuration -> in `NetworkSettings`."""
_FIXED: dict[str, tuple[object, object]] = {
    "model_type": ("marian", None),
    "scale_embedding": (True, False),
    "share_encoder_decoder_embeddings": (True, True),
    "tie_word_embeddings": (True, True),
    "static_position_embeddings": (True, True),
    "normalize_before": (False, False),
    "normalize_embedding": (False, False),
    "add_final_layer_norm": (False, False),
}
"""Keys of the configuration -> the only value that is supported, and the value of a missing key."""
_SIZES = ("vocab_size", "d_model", "encoder_layers", "decoder_layers", "encoder_ffn_dim", "encoder_attention_heads")
_IDS = ("pad_token_id", "eos_token_id", "decoder_start_token_id")
_NEVER = -100.0
"""Output bias of a symbol that must not be chosen: its probability is 0 in float32, and its gradient is finite."""


class MarianModel(NamedTuple):
    """The network's settings, tokenizer and weights in a folder."""

    network: PlainValues
    """The settings that differ from one Marian model to another, by their names in `NetworkSettings`."""
    tokenizer: Tokenizer
    weights: dict[str, Tensor]
    """The state dict of `Transformer`."""


class _Vocabulary(NamedTuple):
    pieces: list[str]
    """In the order of this project's ids."""
    rows: list[int]
    """Their ids in the Marian model."""
    adds_begin: bool
    """Whether the begin symbol is added as a copy of the padding symbol."""


def is_marian(path: Path) -> bool:
    """Return whether a path is a folder in the format of Transformers, and no run folder."""
    return (path / CONFIG).is_file() and not (path / "checkpoints").exists()


def load_marian(folder: Path) -> MarianModel:
    """Read configuration, tokenizer and weights.

    Raises InputError when a file is missing or damaged, when weights or vocabulary do not match the configuration, and
    when this network cannot hold the model.
    """
    config = _configuration(folder)
    vocabulary = _vocabulary(folder, config)
    weights = _network_weights(folder, config, vocabulary)
    activation = _ACTIVATIONS[config["activation_function"]]
    # `Recipe.inherit_network` recognizes an imported network by its output bias.
    output_bias = bool(weights["projection.bias"].any()) or activation != NetworkSettings.activation
    if not output_bias:
        del weights["projection.bias"]
    network = {
        "num_layers": config["encoder_layers"],
        "num_encoder_layers": None,
        "num_decoder_layers": config["decoder_layers"],
        "d_model": config["d_model"],
        "d_ff": config["encoder_ffn_dim"],
        "num_heads": config["encoder_attention_heads"],
        "learned_positions": False,
        "pre_norm": False,
        "norm": NetworkSettings.norm,
        "activation": activation,
        "output_bias": output_bias,
    }
    return MarianModel(network, _tokenizer(folder, vocabulary.pieces), weights)


def _configuration(folder: Path) -> PlainValues:
    """Return the configuration; raise InputError for values that this network does not support."""
    path = folder / CONFIG
    config = _read_json(path)
    wrong = []
    for key, (expected, default) in _FIXED.items():
        if (value := config.get(key, default)) != expected:
            wrong.append(f"{key} is {json.dumps(value)}, not {json.dumps(expected)}")
    if wrong and wrong[0].startswith("model_type"):
        raise InputError(f"{path}: {wrong[0]}; give the folder of a Marian model")
    for key in (*_SIZES, *_IDS):
        smallest = 0 if key in _IDS else 1
        if not isinstance(config.get(key), int) or config[key] < smallest:
            wrong.append(f"{key} is {json.dumps(config.get(key))}, not a whole number from {smallest} on")
    for key, other in (("decoder_ffn_dim", "encoder_ffn_dim"), ("decoder_attention_heads", "encoder_attention_heads")):
        if config.get(key) != config.get(other):
            wrong.append(f"{key} is {json.dumps(config.get(key))}, not {other}, {json.dumps(config.get(other))}")
    if config.get("decoder_vocab_size") not in (None, config.get("vocab_size")):
        wrong.append(f"decoder_vocab_size is {config['decoder_vocab_size']}, not vocab_size, {config['vocab_size']}")
    if (name := config.get("activation_function", "gelu")) not in _ACTIVATIONS:
        wrong.append(f"activation_function is {json.dumps(name)}, not {' or '.join(_ACTIVATIONS)}")
    if not wrong and config["d_model"] % config["encoder_attention_heads"]:
        wrong.append(f"d_model {config['d_model']} is not a multiple of encoder_attention_heads")
    if wrong:
        raise InputError(f"{path}: this network cannot hold the model: {'; '.join(wrong)}; give another model")
    return config


def _read_json(path: Path) -> PlainValues:
    try:
        values = read_json(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); copy the model's folder again") from None
    if values is None:
        raise InputError(f"{path}: is no JSON object; copy the model's folder again")
    return values


def _vocabulary(folder: Path, config: PlainValues) -> _Vocabulary:
    """Return the vocabulary with this project's special symbols first."""
    path, size = folder / VOCABULARY, config["vocab_size"]
    ids = _read_json(path)
    if len(ids) != size or sorted(ids.values(), key=str) != sorted(range(size), key=str):
        raise InputError(
            f"{path}: has {len(ids)} pieces, and not the ids 0 to {size - 1} of vocab_size {size} in {CONFIG}; copy the"
            " model's folder again"
        )
    if _UNKNOWN not in ids:
        raise InputError(f"{path}: lacks the piece {_UNKNOWN}; give another model")
    if (folder / "target_vocab.json").exists():
        raise InputError(f"{folder / 'target_vocab.json'}: this network has one vocabulary; give another model")
    pad, end, begin = (config[key] for key in _IDS)
    adds_begin = begin == pad
    special = [pad, ids[_UNKNOWN], begin, end]
    if max(special) >= size or len(set(special)) != NUM_SPECIAL_IDS - adds_begin:
        raise InputError(
            f"{folder / CONFIG}: pad_token_id {pad}, eos_token_id {end}, decoder_start_token_id {begin} and the id of"
            f" {_UNKNOWN}, {ids[_UNKNOWN]}, must differ, but for the first and the third; give another model"
        )
    rows = [*special, *(number for number in range(size) if number not in special)]
    by_id = {number: piece for piece, number in ids.items()}
    pieces = [by_id[number] for number in rows]
    if adds_begin:
        pieces[2] = "<s>"
        while pieces[2] in ids:
            pieces[2] = f"<{pieces[2]}>"
    return _Vocabulary(pieces, rows, adds_begin)


def _tokenizer(folder: Path, pieces: list[str]) -> Tokenizer:
    models = []
    for path in (folder / "source.spm", folder / "target.spm"):
        try:
            models.append(read_whole(path))
            processor = sentencepiece.SentencePieceProcessor()
            processor.load_from_serialized_proto(models[-1] or b"none")
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}); copy the model's folder again") from None
        except RuntimeError:
            raise InputError(f"{path}: is no sentencepiece model; copy the model's folder again") from None
    source, target = models
    if source == target and [processor.id_to_piece(number) for number in range(len(processor))] == pieces:
        try:
            return Tokenizer(source)  # as this project's exports have it
        except InputError:
            pass  # with other special symbols
    return Tokenizer(join_models(source, target, pieces))


def _network_weights(folder: Path, config: PlainValues, vocabulary: _Vocabulary) -> dict[str, Tensor]:
    """Return the state dict of a `Transformer` with an output bias."""
    path, weights = _read_weights(folder)
    depths, d_model = (config["encoder_layers"], config["decoder_layers"]), config["d_model"]
    # Drop copies of the embedding, which the configuration ties, and position tables, which are computed.
    for name in ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"):
        if (copy := weights.pop(name, None)) is not None:
            weights.setdefault(SHARED, copy)
    for side in ("encoder", "decoder"):
        weights.pop(f"model.{side}.embed_positions.weight", None)
    weights.setdefault(BIAS, torch.zeros(1, config["vocab_size"]))
    shapes = marian_shapes(depths, config["vocab_size"], d_model, config["encoder_ffn_dim"])
    wrong = [f"{name} is missing" for name in shapes if name not in weights]
    wrong += [f"{name} is unknown" for name in weights if name not in shapes]
    for name, shape in shapes.items():
        if name in weights and list(weights[name].shape) != shape:
            wrong.append(f"{name} is {list(weights[name].shape)}, not {shape}")
    if wrong:
        raise InputError(f"{path}: does not match {CONFIG}: {first_of(wrong)}; copy the model's folder again")
    weights = {name: tensor.float() for name, tensor in weights.items()}
    weights[SHARED], weights[BIAS] = weights[SHARED][vocabulary.rows], weights[BIAS][:, vocabulary.rows]
    if vocabulary.adds_begin:
        weights[BIAS][:, Tokenizer.bos_id] = _NEVER
    return from_marian(weights, depths)


def _read_weights(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """Return the file with the weights, or the index of such files, and the tensors; no code in it is executed."""
    for name in _WEIGHTS:
        if (path := folder / name).is_file():
            return path, _read_tensors(path)
        if (path := folder / f"{name}.index.json").is_file():
            return path, _read_shards(path)
    first, older = _WEIGHTS
    raise InputError(f"{folder / first}: is missing, and so is {older}; copy the model's folder again")


def _read_shards(index: Path) -> dict[str, Tensor]:
    """Return the tensors of all files that an index names."""
    places = _read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(
        isinstance(one, str) and Path(one).name == one for one in places.values()
    ):
        raise InputError(f"{index}: its weight_map must name files of this folder; copy the model's folder again")
    shards = {name: _read_tensors(index.with_name(name)) for name in sorted(set(places.values()))}
    wrong = [f"{tensor} is not in {name}" for tensor, name in places.items() if tensor not in shards[name]]
    weights: dict[str, Tensor] = {}
    for name, tensors in shards.items():
        wrong += [f"{tensor} is in {name} and in a file before it" for tensor in tensors if tensor in weights]
        weights |= tensors
    if wrong:
        raise InputError(f"{index}: does not match its files: {first_of(wrong)}; copy the model's folder again")
    return weights


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        open_regular(path).close()  # An index may name a pipe.
        if path.suffix == ".bin":
            weights = load_weights_only(path)
        else:
            from safetensors.torch import load_file  # an optional package

            weights = load_file(path)
    except ImportError:
        raise InputError(f"safetensors is not installed; run: {install('huggingface')}") from None
    except FileNotFoundError:
        raise InputError(f"{path}: is missing; copy the model's folder again") from None
    except Exception:  # Of many types, for a damaged file or one with more than tensors, which is refused below.
        weights = None
    if not isinstance(weights, dict) or not all(isinstance(weight, torch.Tensor) for weight in weights.values()):
        raise InputError(
            f"{path}: cannot be read as weights: it is damaged or holds more; copy the model's folder again"
        )
    return weights
