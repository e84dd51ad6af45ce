"""What `benchmark decode` compares: this program and its baselines, each over the same text and settings.

An engine is made and used in a process of its own, so that none waits for another's threads and each one's memory
can be told. It gets what `prepare` has laid ready, never the checkpoint itself, but for this program's own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_module.tokenization.word_counts import normalize_white_space
from pipeline.benchmark.engine import BATCH_TOKENS, Engine, Settings, Turn, load_pieces
from pipeline.benchmark.huggingface_engine import HuggingFace, write_huggingface


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

    from pipeline.checkpointing.checkpoint import load_model, resolve_checkpoint
    from pipeline.inference.translator import search_settings

    path = resolve_checkpoint(checkpoint)
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
        "cuda" if torch.cuda.is_available() else "cpu",  # as `load_translator` chooses
    )


class Pipeline:
    """This program, as `translate` runs it."""

    def __init__(self, settings: Settings) -> None:
        from pipeline.inference.translator import load_translator

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
        self._tokenizer = load_pieces(settings.folder)
        folder = str(settings.folder / "ctranslate2")
        self._translator = ctranslate2.Translator(
            folder, device=settings.device, compute_type="float32", intra_threads=settings.threads
        )

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


def _write_ctranslate2(model: Any, folder: Path) -> None:
    from pipeline.export.ctranslate2_model import write_ctranslate2

    write_ctranslate2(model.network, model.tokenizer, folder)


def _bundle(settings: Settings) -> Engine:
    from pipeline.benchmark.bundle_engine import BundleEngine

    return BundleEngine(settings)


FORMATS: dict[str, Callable[[Any, Path], None]] = {
    "ctranslate2": _write_ctranslate2,
    "huggingface": write_huggingface,
}
ENGINES: dict[str, Callable[[Settings], Engine]] = {
    "pipeline": Pipeline,
    "bundle": _bundle,
    "ctranslate2": CTranslate2,
    "huggingface": HuggingFace,
}
