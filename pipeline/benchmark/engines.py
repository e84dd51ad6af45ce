"""The engines that `benchmark decode` compares, each translating the same text with the same settings.

Each engine runs in a process of its own, so that no engine waits for another's threads and the memory of each can be
measured. Heavy packages are therefore imported only by the engine that needs them. `prepare` writes what the engines
read; only this project's own engine reads the checkpoint.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from data_module.errors import InputError
from data_module.tokenization.word_counts import normalize_white_space

BATCH_TOKENS = 4096
"""Upper bound on the padded source tokens of a batch, for every engine."""


class EngineSettings(NamedTuple):
    """Settings that all engines share."""

    checkpoint: Path
    folder: Path
    """Folder to which `prepare` wrote the tokenizer and the network in the baselines' formats."""
    beam_size: int
    length_penalty: float
    max_extra_tokens: int
    stop_rule: str
    threads: int
    bundle: Path | None = None
    """Exported bundle of the checkpoint."""
    device: str = "cpu"
    """cuda if there is a GPU."""


class EngineOutput(NamedTuple):
    """An engine's translations of some sentences."""

    texts: list[str]
    num_tokens: int
    """Number of pieces of the best translations, including their end symbols."""
    sentence_steps: int
    """Sum over sentences of the decoder steps in which the sentence took part."""


class Engine(Protocol):
    """A program that translates text."""

    def translate(self, sentences: list[str]) -> EngineOutput:
        """Translate sentences, including encoding and decoding of text."""
        ...


def prepare(
    checkpoint: Path,
    folder: Path,
    beam_size: int | None,
    length_penalty: float | None,
    stop_rule: str | None,
    baselines: list[str],
    bundle: Path | None = None,
) -> EngineSettings:
    """Write the tokenizer and the baselines' files.

    Args:
        checkpoint: a checkpoint or a run folder.
        folder: folder to write to.
        beam_size: beam size; None for the recipe's.
        length_penalty: exponent alpha of the length penalty; None for the recipe's.
        stop_rule: when a search stops, exact or first; None for the recipe's.
        baselines: keys of `FORMATS`.
        bundle: exported bundle of the checkpoint, if it is to be compared.

    Raises:
        InputError: the checkpoint cannot be read, a setting is out of bounds, a baseline is not installed or does not
            support the network, or the bundle has no model.ts or belongs to another checkpoint.
    """
    import torch

    from pipeline.checkpointing.checkpoint import load_model, resolve_checkpoint
    from pipeline.inference.translator import search_settings

    path = resolve_checkpoint(checkpoint)
    model = load_model(path)
    if baselines and model.tokenizer.pair:
        raise InputError(
            f"{path}: has two tokenizers with one vocabulary, which no baseline reads; leave out --baseline"
        )
    decoding = search_settings(model.decoding, beam_size, length_penalty, stop_rule)
    if bundle is not None:
        require_bundle(bundle, model)
    (folder / "tokenizer.model").write_bytes(model.tokenizer.model)
    for baseline in baselines:
        FORMATS[baseline](model, folder / baseline)
    return EngineSettings(
        path,
        folder,
        decoding.beam_size,
        decoding.length_penalty,
        decoding.max_extra_tokens,
        decoding.stop_rule,
        torch.get_num_threads(),
        bundle,
        "cuda" if torch.cuda.is_available() else "cpu",  # as `load_translator` chooses
    )


def load_pieces(folder: Path) -> Any:
    """Return the tokenizer that `prepare` wrote, as a SentencePieceProcessor."""
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


class PipelineEngine:
    """This project, as `translate` runs it."""

    def __init__(self, settings: EngineSettings) -> None:
        from model.compiled_search import CompiledSearch
        from pipeline.inference.translator import load_translator

        self._translator = load_translator(
            settings.checkpoint, settings.beam_size, settings.length_penalty, settings.stop_rule
        )
        self._sentence_steps = 0
        search = self._translator.search
        if isinstance(search, CompiledSearch):
            plain_search = search.search

            def counted_search(*arguments: Any) -> Any:
                result, num_steps = plain_search(*arguments)
                self._sentence_steps += int(num_steps.sum())
                return result, num_steps

            search.search = counted_search  # type: ignore
        else:
            step = search.network.decode_step

            def counted_step(last: Any, *others: Any) -> Any:
                self._sentence_steps += len(last)
                return step(last, *others)

            search.network.decode_step = counted_step

    def translate(self, sentences: list[str]) -> EngineOutput:
        """Translate sentences."""
        self._sentence_steps = 0
        return _output(self._translator.translate(sentences), self._sentence_steps)


class BundleEngine:
    """An exported model.ts, loaded as the bundle's README describes, with this project's tokenization and batches."""

    def __init__(self, settings: EngineSettings) -> None:
        from data_module.tokenization.tokenizer import Tokenizer
        from model.settings import DecodingSettings
        from pipeline.export.torchscript import load_torchscript
        from pipeline.inference.translator import LONGEST, Translator

        assert settings.bundle is not None
        self._translator = Translator(
            load_torchscript(settings.bundle / "model.ts", settings.device),
            Tokenizer((settings.folder / "tokenizer.model").read_bytes()),
            DecodingSettings(
                settings.beam_size, settings.length_penalty, settings.max_extra_tokens, settings.stop_rule
            ),
            max_source_tokens=LONGEST,
        )

    def translate(self, sentences: list[str]) -> EngineOutput:
        """Translate sentences. Steps are not counted."""
        return _output(self._translator.translate(sentences), 0)


def _output(translations: list[Any], sentence_steps: int) -> EngineOutput:
    num_tokens = sum(translation.hypotheses[0].num_tokens for translation in translations)
    return EngineOutput([translation.text for translation in translations], num_tokens, sentence_steps)


def require_bundle(bundle: Path, model: Any) -> None:
    """Raise InputError if a bundle has no model.ts or was made from another checkpoint than `model`."""
    if not (bundle / "model.ts").is_file():
        raise InputError(f"{bundle}: holds no model.ts; give a folder that export has made")
    card = json.loads((bundle / "card.json").read_text(encoding="utf-8"))
    if (card["tokenizer_sha256"], card["step"]) != (model.tokenizer.sha256, model.step):
        raise InputError(
            f"{bundle}: was made from {card['checkpoint']}, another checkpoint than {model.path}; give that checkpoint "
            "or export this one"
        )


class CTranslate2Engine:
    """CTranslate2 in float32. It makes its own batches of `BATCH_TOKENS`."""

    def __init__(self, settings: EngineSettings) -> None:
        import ctranslate2

        self._settings = settings
        self._tokenizer = load_pieces(settings.folder)
        folder = str(settings.folder / "ctranslate2")
        self._translator = ctranslate2.Translator(
            folder, device=settings.device, compute_type="float32", intra_threads=settings.threads
        )

    def translate(self, sentences: list[str]) -> EngineOutput:
        """Translate sentences."""
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
        # The search of a sentence takes as many steps as its longest hypothesis has tokens.
        steps = sum(max(map(len, result.hypotheses)) + 1 for result in results)
        best = [result.hypotheses[0] for result in results]
        return EngineOutput(tokenizer.decode(best), sum(len(pieces) + 1 for pieces in best), steps)


def _write_ctranslate2(model: Any, folder: Path) -> None:
    from pipeline.export.ctranslate2_model import write_ctranslate2

    write_ctranslate2(model.network, model.tokenizer, folder)


class HuggingFaceEngine:
    """`generate` of Transformers in float32, with this network's weights and this project's batches."""

    def __init__(self, settings: EngineSettings) -> None:
        import torch

        from pipeline.export.huggingface_model import require_transformers

        self._torch, self._settings = torch, settings
        self._tokenizer = load_pieces(settings.folder)
        folder = settings.folder / "huggingface"
        transformers = require_transformers()
        config = transformers.AutoConfig.from_pretrained(folder)
        self.model = getattr(transformers, config.architectures[0])(config).eval()
        # `from_pretrained` would recompute the position table in its own layout.
        weights = torch.load(folder / "weights.pt", weights_only=True)
        unexpected = self.model.load_state_dict(weights, strict=False).unexpected_keys
        assert not unexpected, unexpected
        self.model.to(settings.device)
        self._sentence_steps = 0
        self.model.model.decoder.register_forward_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, arguments: Any, options: dict[str, Any], output: Any) -> None:
        # Each hypothesis of a sentence is a row of the batch.
        self._sentence_steps += len(options["input_ids"]) // self._settings.beam_size

    def translate(self, sentences: list[str]) -> EngineOutput:
        """Translate sentences."""
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
        return EngineOutput(tokenizer.decode(found), sum(len(ids) + 1 for ids in found), self._sentence_steps)


def write_huggingface(model: Any, folder: Path) -> None:
    """Write the network in the format of Transformers' Marian, or of its Pegasus if it is pre-norm."""
    import torch

    from pipeline.export.ctranslate2_model import require_paper_layers
    from pipeline.export.huggingface_model import marian_config, require_transformers
    from pipeline.export.marian_weights import SHARED, to_marian

    transformers, network, tokenizer = require_transformers(), model.network, model.tokenizer
    require_paper_layers(network, "Transformers")
    attention = network.encoder[0].self_attention
    if not attention.d_k == attention.d_v == network.embedding.embedding_dim / attention.num_heads:
        raise InputError(
            "--baseline huggingface: Transformers needs d_k = d_v = d_model / num_heads; leave this baseline out"
        )
    pre_norm = isinstance(network.encoder_norm, torch.nn.LayerNorm)
    num_positions = 1024 + model.decoding.max_extra_tokens
    num_positions = min(num_positions, network.positions.max_positions or num_positions)
    config = (transformers.PegasusConfig if pre_norm else transformers.MarianConfig)(
        architectures=["PegasusForConditionalGeneration" if pre_norm else "MarianMTModel"],
        **marian_config(network, tokenizer, num_positions),
    )
    config.save_pretrained(folder)
    # Positions of any kind can be given as a table, in the order of dimensions that they have.
    weights = to_marian(network.state_dict(), (len(network.encoder), len(network.decoder)), reorder=False)
    for side, norm in (("encoder", network.encoder_norm), ("decoder", network.decoder_norm)):
        weights[f"model.{side}.embed_tokens.weight"] = weights[SHARED]
        weights[f"model.{side}.embed_positions.weight"] = network.positions(0, num_positions)
        if pre_norm:
            weights |= {f"model.{side}.layer_norm.{name}": one for name, one in norm.state_dict().items()}
    torch.save({**weights, "lm_head.weight": weights[SHARED]}, folder / "weights.pt")


FORMATS: dict[str, Callable[[Any, Path], None]] = {
    "ctranslate2": _write_ctranslate2,
    "huggingface": write_huggingface,
}
ENGINES: dict[str, Callable[[EngineSettings], Engine]] = {
    "pipeline": PipelineEngine,
    "bundle": BundleEngine,
    "ctranslate2": CTranslate2Engine,
    "huggingface": HuggingFaceEngine,
}
