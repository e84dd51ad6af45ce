"""What `benchmark decode` compares: this program and its baselines, each over the same text and settings.

An engine is made and used in a process of its own, so that none waits for another's threads and each one's memory
can be told. It gets what `prepare` has laid ready, never the checkpoint itself, but for this program's own.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from data_module.errors import InputError
from data_module.word_counts import normalize_white_space

BATCH_TOKENS = 4096


class Settings(NamedTuple):
    """What all engines have in common."""

    checkpoint: Path
    folder: Path
    """Where `prepare` has laid the tokenizer and the baselines' own formats of the network."""
    beam_size: int
    length_penalty: float
    max_extra_tokens: int
    threads: int
    bundle: Path | None = None
    """What export has made of the checkpoint."""


class Turn(NamedTuple):
    """What an engine did with some sentences."""

    texts: list[str]
    num_tokens: int
    """Pieces of the best answers and their end symbols."""
    sentence_steps: int
    """Decoder steps, each times the sentences that were searched in it."""


class Engine(Protocol):
    """Text to text."""

    def translate(self, sentences: list[str]) -> Turn:
        """Translate; tokenization in and out included."""
        ...


def prepare(
    checkpoint: Path,
    folder: Path,
    beam_size: int | None,
    length_penalty: float | None,
    baselines: list[str],
    bundle: Path | None = None,
) -> Settings:
    """Write the tokenizer and what the baselines need; None stands for what the checkpoint's recipe says.

    Raises InputError where there is no such checkpoint, a setting is out of bounds, or a baseline is not installed or
    has no such network, or where the bundle has no model.ts or is of another checkpoint.
    """
    import torch

    from pipeline.checkpoint import choose, load_model
    from pipeline.translator import search_settings

    path = choose(checkpoint)
    model = load_model(path)
    decoding = search_settings(model.decoding, beam_size, length_penalty)
    if bundle is not None:
        from pipeline.benchmark.bundle_engine import require_bundle

        require_bundle(bundle, model)
    (folder / "tokenizer.model").write_bytes(model.tokenizer.model)
    for baseline in baselines:
        FORMATS[baseline](model, folder / baseline)
    return Settings(
        path,
        folder,
        decoding.beam_size,
        decoding.length_penalty,
        decoding.max_extra_tokens,
        torch.get_num_threads(),
        bundle,
    )


class Pipeline:
    """This program, as `translate` runs it."""

    def __init__(self, settings: Settings) -> None:
        from pipeline.translator import load_translator

        self._translator = load_translator(settings.checkpoint, settings.beam_size, settings.length_penalty)
        network = self._translator.search.network
        self._sentence_steps = 0
        step = network.decode_step

        def counted(last: Any, *others: Any) -> Any:
            self._sentence_steps += len(last)
            return step(last, *others)

        network.decode_step = counted

    def translate(self, sentences: list[str]) -> Turn:
        """As `Engine.translate`."""
        self._sentence_steps = 0
        found = self._translator.translate(sentences)
        num_tokens = sum(translation.hypotheses[0].num_tokens for translation in found)
        return Turn([translation.text for translation in found], num_tokens, self._sentence_steps)


class CTranslate2:
    """CTranslate2 in float32. It makes its own batches, of as many tokens."""

    def __init__(self, settings: Settings) -> None:
        import ctranslate2

        self._settings = settings
        self._tokenizer = _tokenizer(settings.folder)
        folder = str(settings.folder / "ctranslate2")
        self._translator = ctranslate2.Translator(folder, compute_type="float32", intra_threads=settings.threads)

    def translate(self, sentences: list[str]) -> Turn:
        """As `Engine.translate`."""
        settings, tokenizer = self._settings, self._tokenizer
        sources = tokenizer.encode([normalize_white_space(sentence) for sentence in sentences], out_type=str)
        end = tokenizer.id_to_piece(tokenizer.eos_id())
        longest = max(map(len, sources), default=0) + 1
        results = self._translator.translate_batch(
            [[*source, end] for source in sources],
            beam_size=settings.beam_size,
            num_hypotheses=settings.beam_size,
            length_penalty=settings.length_penalty,
            max_decoding_length=longest + settings.max_extra_tokens,
            max_batch_size=BATCH_TOKENS,
            batch_type="tokens",
        )
        # A sentence's search ends with the last of its hypotheses, which is therefore as long as it took steps.
        steps = sum(max(map(len, result.hypotheses)) + 1 for result in results)
        best = [result.hypotheses[0] for result in results]
        return Turn(tokenizer.decode(best), sum(len(pieces) + 1 for pieces in best), steps)


class HuggingFace:
    """`generate` of Transformers in float32, with this network's weights, over the batches that this program makes."""

    def __init__(self, settings: Settings) -> None:
        import torch

        self._torch, self._settings = torch, settings
        self._tokenizer = _tokenizer(settings.folder)
        folder = settings.folder / "huggingface"
        transformers = _transformers()
        config = transformers.AutoConfig.from_pretrained(folder)
        self.model = getattr(transformers, config.architectures[0])(config).eval()
        # Not by `from_pretrained`, which makes the position table anew, in its own layout.
        weights = torch.load(folder / "weights.pt", weights_only=True)
        unexpected = self.model.load_state_dict(weights, strict=False).unexpected_keys
        assert not unexpected, unexpected
        self._sentence_steps = 0
        self.model.model.decoder.register_forward_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, arguments: Any, options: dict[str, Any], output: Any) -> None:
        # A sentence's hypotheses are rows of the batch.
        self._sentence_steps += len(options["input_ids"]) // self._settings.beam_size

    def translate(self, sentences: list[str]) -> Turn:
        """As `Engine.translate`."""
        from pipeline.translator import batches_by_length

        torch, settings, tokenizer = self._torch, self._settings, self._tokenizer
        encoded = tokenizer.encode([normalize_white_space(sentence) for sentence in sentences])
        sources = [[*ids, tokenizer.eos_id()] for ids in encoded]
        found: list[list[int]] = [[] for _ in sources]
        self._sentence_steps = 0
        for batch in batches_by_length([len(source) for source in sources], BATCH_TOKENS):
            rows = [torch.tensor(sources[index]) for index in batch]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_id())
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


def _tokenizer(folder: Path) -> Any:
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def _transformers() -> Any:
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise InputError(
            "transformers is not installed; run: .venv/bin/pip install -c constraints.txt -e '.[benchmark]'"
        ) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _write_ctranslate2(model: Any, folder: Path) -> None:
    from pipeline.ctranslate2_model import write_ctranslate2

    write_ctranslate2(model.network, model.tokenizer, folder)


def _write_huggingface(model: Any, folder: Path) -> None:
    """The network as Transformers' Marian, or as its Pegasus if it is pre-norm."""
    import torch

    transformers, network, tokenizer = _transformers(), model.network, model.tokenizer
    attention = network.encoder[0].self_attention
    d_model = network.embedding.embedding_dim
    if not attention.d_k == attention.d_v == d_model / attention.num_heads:
        raise InputError("--baseline huggingface: Transformers has no heads of other sizes than d_model / num_heads")
    pre_norm = isinstance(network.encoder_norm, torch.nn.LayerNorm)
    num_positions = 1024 + model.decoding.max_extra_tokens
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


FORMATS: dict[str, Callable[[Any, Path], None]] = {
    "ctranslate2": _write_ctranslate2,
    "huggingface": _write_huggingface,
}
ENGINES: dict[str, Callable[[Settings], Engine]] = {
    "pipeline": Pipeline,
    "bundle": lambda settings: importlib.import_module("pipeline.benchmark.bundle_engine").BundleEngine(settings),
    "ctranslate2": CTranslate2,
    "huggingface": HuggingFace,
}
