"""Tokenizer models for programs that use sentencepiece without this project.

`Tokenizer` normalizes white space before it calls sentencepiece. A program without this project does not, so a tab or
a line break would be an unknown character. These models turn both into spaces themselves.
"""

import io

from data_module.tokenization.tokenizer import RuleFile, Tokenizer, lowercase_rules
from data_module.tokenization.word_counts import SPACE_LIKE


def standalone_model(tokenizer: Tokenizer) -> bytes:
    """Return the tokenizer's sentencepiece model with white-space normalization inside.

    It encodes every text as `Tokenizer.encode` does, but for NUL, which sentencepiece has no rule for.
    """
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    rules = lowercase_rules() if tokenizer.lowercase else {}
    rules |= {character: " " for character in SPACE_LIKE + "\n" if character != "\0"}
    rules_only = io.BytesIO()
    with RuleFile(rules) as options:
        # sentencepiece compiles rules only when it trains a model.
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["a"]),
            model_writer=rules_only,
            model_type="char",
            vocab_size=5,
            hard_vocab_limit=False,
            minloglevel=2,
            **options,
        )
    read = sentencepiece_model_pb2.ModelProto.FromString  # type: ignore[attr-defined]
    proto = read(tokenizer.model)
    compiled = read(rules_only.getvalue()).normalizer_spec
    proto.normalizer_spec.precompiled_charsmap = compiled.precompiled_charsmap
    return proto.SerializeToString(deterministic=True)
