"""Hugging Face's `generate` as an engine of `benchmark decode`; Transformers is an optional extra."""

import importlib
from pathlib import Path
from typing import Any

from data_module.errors import InputError, install
from data_module.tokenization.word_counts import normalize_white_space
from pipeline.benchmark.engine import BATCH_TOKENS, Settings, Turn, load_pieces


def require_transformers() -> Any:
    """The package; raises InputError where it is not installed."""
    try:
        # By name: type checking all of it takes minutes.
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise InputError(f"transformers is not installed; run: {install('benchmark')}") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


class HuggingFace:
    """`generate` of Transformers in float32, with this network's weights, over the batches that this program makes."""

    def __init__(self, settings: Settings) -> None:
        import torch

        self._torch, self._settings = torch, settings
        self._tokenizer = load_pieces(settings.folder)
        folder = settings.folder / "huggingface"
        transformers = require_transformers()
        config = transformers.AutoConfig.from_pretrained(folder)
        self.model = getattr(transformers, config.architectures[0])(config).eval()
        # Not by `from_pretrained`, which makes the position table anew, in its own layout.
        weights = torch.load(folder / "weights.pt", weights_only=True)
        unexpected = self.model.load_state_dict(weights, strict=False).unexpected_keys
        assert not unexpected, unexpected
        self.model.to(settings.device)
        self._sentence_steps = 0
        self.model.model.decoder.register_forward_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, arguments: Any, options: dict[str, Any], output: Any) -> None:
        # A sentence's hypotheses are rows of the batch.
        self._sentence_steps += len(options["input_ids"]) // self._settings.beam_size

    def translate(self, sentences: list[str]) -> Turn:
        """As `Engine.translate`."""
        from pipeline.inference.translator import batches_by_length

        torch, settings, tokenizer = self._torch, self._settings, self._tokenizer
        encoded = tokenizer.encode([normalize_white_space(sentence) for sentence in sentences])
        sources = [[*ids, tokenizer.eos_id()] for ids in encoded]
        found: list[list[int]] = [[] for _ in sources]
        self._sentence_steps = 0
        for batch in batches_by_length([len(source) for source in sources], BATCH_TOKENS):
            rows = [torch.tensor(sources[index]) for index in batch]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_id())
            ids = ids.to(settings.device)
            beam: dict[str, Any] = {}
            if settings.beam_size > 1:
                beam = {"length_penalty": settings.length_penalty, "early_stopping": True}
            output = self.model.generate(
                ids,
                attention_mask=(ids != tokenizer.pad_id()).long(),
                num_beams=settings.beam_size,
                max_new_tokens=ids.size(1) + settings.max_extra_tokens,
                do_sample=False,
                **beam,
            )
            special = {tokenizer.pad_id(), tokenizer.bos_id(), tokenizer.eos_id()}
            for index, row in zip(batch, output.tolist(), strict=True):
                found[index] = [piece for piece in row if piece not in special]
        return Turn(tokenizer.decode(found), sum(len(ids) + 1 for ids in found), self._sentence_steps)


def write_huggingface(model: Any, folder: Path) -> None:
    """The network as Transformers' Marian, or as its Pegasus if it is pre-norm."""
    import torch

    transformers, network, tokenizer = require_transformers(), model.network, model.tokenizer
    attention = network.encoder[0].self_attention
    d_model = network.embedding.embedding_dim
    if not attention.d_k == attention.d_v == d_model / attention.num_heads:
        raise InputError("--baseline huggingface: Transformers has no heads of other sizes than d_model / num_heads")
    pre_norm = isinstance(network.encoder_norm, torch.nn.LayerNorm)
    num_positions = 1024 + model.decoding.max_extra_tokens
    num_positions = min(num_positions, network.positions.max_positions or num_positions)
    shape: dict[str, Any] = {"activation_function": "relu", "scale_embedding": True, "d_model": d_model}
    for side, layers in (("encoder", network.encoder), ("decoder", network.decoder)):
        shape |= {
            f"{side}_layers": len(layers),
            f"{side}_attention_heads": attention.num_heads,
            f"{side}_ffn_dim": layers[0].feed_forward.inner.out_features,
        }
    config = (transformers.PegasusConfig if pre_norm else transformers.MarianConfig)(
        architectures=["PegasusForConditionalGeneration" if pre_norm else "MarianMTModel"],
        vocab_size=tokenizer.vocabulary_size,
        max_position_embeddings=num_positions,
        pad_token_id=tokenizer.pad_id,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
        decoder_start_token_id=tokenizer.bos_id,
        forced_eos_token_id=None,
        **shape,
    )
    config.save_pretrained(folder)
    torch.save(_huggingface_weights(network, num_positions), folder / "weights.pt")


def _huggingface_weights(network: Any, num_positions: int) -> dict[str, Any]:
    weights = {"model.shared.weight": network.embedding.weight}
    weights |= {f"model.{side}.embed_tokens.weight": network.embedding.weight for side in ("encoder", "decoder")}
    weights["lm_head.weight"] = network.embedding.weight

    def put(name: str, module: Any, parts: tuple[str, ...] = ("",)) -> None:
        for kind in ("weight", "bias"):
            for part, tensor in zip(parts, getattr(module, kind).chunk(len(parts)), strict=True):
                weights[f"{name}{part}.{kind}"] = tensor

    for side, layers, norm in (
        ("encoder", network.encoder, network.encoder_norm),
        ("decoder", network.decoder, network.decoder_norm),
    ):
        weights[f"model.{side}.embed_positions.weight"] = network.positions(0, num_positions)
        if hasattr(norm, "weight"):
            put(f"model.{side}.layer_norm", norm)
        for number, layer in enumerate(layers):
            name = f"model.{side}.layers.{number}"
            put(f"{name}.self_attn.", layer.self_attention.query_key_value, ("q_proj", "k_proj", "v_proj"))
            put(f"{name}.self_attn.out_proj", layer.self_attention.output)
            put(f"{name}.self_attn_layer_norm", layer.self_attention_residual.norm)
            if side == "decoder":
                put(f"{name}.encoder_attn.q_proj", layer.cross_attention.query)
                put(f"{name}.encoder_attn.", layer.cross_attention.key_value, ("k_proj", "v_proj"))
                put(f"{name}.encoder_attn.out_proj", layer.cross_attention.output)
                put(f"{name}.encoder_attn_layer_norm", layer.cross_attention_residual.norm)
            put(f"{name}.fc1", layer.feed_forward.inner)
            put(f"{name}.fc2", layer.feed_forward.outer)
            put(f"{name}.final_layer_norm", layer.feed_forward_residual.norm)
    return weights
