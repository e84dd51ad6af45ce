"""An exported bundle as an engine of `benchmark decode`."""

import json
from pathlib import Path
from typing import Any

from data_module.errors import InputError
from data_module.tokenization.tokenizer import Tokenizer
from model.settings import DecodingSettings
from pipeline.benchmark.engine import Settings, Turn
from pipeline.export.torchscript import load_torchscript
from pipeline.inference.translator import LONGEST, Translator


def require_bundle(bundle: Path, model: Any) -> None:
    """Raises InputError where there is no model.ts, or one of another checkpoint than `model`."""
    if not (bundle / "model.ts").is_file():
        raise InputError(f"{bundle}: holds no model.ts; give a folder that export has made")
    card = json.loads((bundle / "card.json").read_text(encoding="utf-8"))
    if (card["tokenizer_sha256"], card["step"]) != (model.tokenizer.sha256, model.step):
        raise InputError(
            f"{bundle}: was made of {card['checkpoint']}, another checkpoint than {model.path}; give that one, or "
            "export this one"
        )


class BundleEngine:
    """An exported model.ts as a bundle's README loads it; text, batches and cutting are this program's."""

    def __init__(self, settings: Settings) -> None:
        assert settings.bundle is not None
        self._translator = Translator(
            load_torchscript(settings.bundle / "model.ts", settings.device),
            Tokenizer((settings.folder / "tokenizer.model").read_bytes()),
            DecodingSettings(settings.beam_size, settings.length_penalty, settings.max_extra_tokens),
            max_source_tokens=LONGEST,
        )

    def translate(self, sentences: list[str]) -> Turn:
        """As `Engine.translate`; steps are not counted."""
        found = self._translator.translate(sentences)
        num_tokens = sum(translation.hypotheses[0].num_tokens for translation in found)
        return Turn([translation.text for translation in found], num_tokens, 0)
