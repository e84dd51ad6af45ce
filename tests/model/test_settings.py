"""The defaults are the paper's base model, and values that are out of bounds are refused."""

import math
import re
from dataclasses import asdict, replace

import pytest

from data_module.settings import BatchSettings
from model.settings import DecodingSettings, NetworkSettings, TrainingSettings, changed_keys
from pipeline.config.settings import MonitoringSettings, RunSettings


def test_defaults_are_the_papers() -> None:
    """Table 3 (base), sections 5.3, 5.4 and 6.1."""
    network, training, decoding = NetworkSettings(), TrainingSettings(), DecodingSettings()
    assert (network.num_layers, network.d_model, network.d_ff, network.num_heads) == (6, 512, 2048, 8)
    assert (network.key_size, network.value_size, network.dropout) == (64, 64, 0.1)
    assert not network.learned_positions
    assert not network.pre_norm
    assert (training.adam_beta1, training.adam_beta2, training.adam_epsilon) == (0.9, 0.98, 1e-9)
    assert (training.warmup_steps, training.learning_rate_factor, training.label_smoothing) == (4000, 1.0, 0.1)
    assert training.gradient_clip_norm is None
    assert training.ema_decay is None
    assert (training.schedule, training.peak_learning_rate) == ("paper", None)
    assert (network.attention_dropout, network.activation_dropout) == (0.0, 0.0)
    assert (training.weight_decay, training.r_drop_alpha) == (0.0, 0.0)
    assert (decoding.beam_size, decoding.length_penalty, decoding.max_extra_tokens) == (4, 0.6, 50)


PEAKED = ("inverse_sqrt", "linear", "cosine")


@pytest.mark.parametrize(
    ("settings", "values", "said"),
    [
        (NetworkSettings, {"d_ff": 0}, "network.d_ff 0 "),
        (NetworkSettings, {"d_model": 10, "num_heads": 3}, "network.num_heads"),
        (NetworkSettings, {"d_model": 10, "num_heads": 3, "d_k": 4}, "network.num_heads"),
        (DecodingSettings, {"length_penalty": -0.1}, "decoding.length_penalty -0.1 "),
        (DecodingSettings, {"length_penalty": math.nan}, "decoding.length_penalty nan "),
        (DecodingSettings, {"beam_size": 10**12}, f"decoding.beam_size {10**12} "),
        (DecodingSettings, {"max_extra_tokens": 10**11}, f"decoding.max_extra_tokens {10**11} "),
        (RunSettings, {"checkpoint_every_minutes": math.nan}, "run.checkpoint_every_minutes nan "),
        (TrainingSettings, {"r_drop_alpha": math.nan}, "training.r_drop_alpha nan "),
        (TrainingSettings, {"gradient_clip_norm": math.inf}, "training.gradient_clip_norm inf "),
        (TrainingSettings, {"warmup_steps": 0}, "1 or more"),
        (TrainingSettings, {"warmup_steps": -1}, "1 or more"),
        (TrainingSettings, {"warmup_steps": 10**21}, f"training.warmup_steps {10**21} is too large; give "),
        (NetworkSettings, {"d_ff": 10**7}, "network.d_ff 10000000 is not 1,000,000 or less"),
        (NetworkSettings, {"num_decoder_layers": 10**5}, "network.num_decoder_layers 100000 is not 10,000 or less"),
        (
            BatchSettings,
            {"batch_tokens": 10**13},
            f"batches.batch_tokens {10**13} is too large; give 1,000,000,000,000 or",
        ),
        (BatchSettings, {"workers": 10**6}, "batches.workers 1000000 is not from 0 to 1,000"),
        (RunSettings, {"timeout_seconds": 10**12}, f"run.timeout_seconds {10**12} is not from 1 to "),
        (MonitoringSettings, {"embedding_pieces": 10**21}, f"monitoring.embedding_pieces {10**21} is too large"),
        (TrainingSettings, {"muon_momentum": 0.9}, "muon_momentum has no effect on training.optimizer adam; give"),
        (TrainingSettings, {"peak_learning_rate": 1e-3}, "learning_rate_factor instead"),
        *((TrainingSettings, {"schedule": one}, f"schedule {one} needs training.peak_learning_rate") for one in PEAKED),
        *(
            (TrainingSettings, {"schedule": one, "peak_learning_rate": 0.0}, "0.0 is not a finite number above 0")
            for one in PEAKED
        ),
    ],
)
def test_what_is_refused(settings: type, values: dict[str, object], said: str) -> None:
    """Most bounds themselves are in `configs/recipe.schema.json`, which is compared with what the settings accept."""
    with pytest.raises(ValueError, match=re.escape(said)):
        settings(**values)


def test_what_is_accepted() -> None:
    RunSettings(seed=2**63 - 1)
    TrainingSettings(warmup_steps=10**12)
    for schedule in (*PEAKED, "registered elsewhere"):
        TrainingSettings(schedule=schedule, peak_learning_rate=1e-9)
    for optimizer in ("muon", "registered elsewhere"):
        TrainingSettings(optimizer=optimizer, muon_momentum=0.9)
    sizes = NetworkSettings(d_model=10, num_heads=3, d_k=4, d_v=5)
    assert (sizes.key_size, sizes.value_size) == (4, 5)


def test_changed_keys_are_those_that_make_another_network() -> None:
    deep = NetworkSettings(num_encoder_layers=12, num_decoder_layers=2)
    for same in (
        deep,
        replace(deep, num_layers=3),
        NetworkSettings(num_layers=12, num_decoder_layers=2),
        NetworkSettings(num_layers=2, num_encoder_layers=12),
    ):
        assert changed_keys(asdict(deep), asdict(same)) == []
    for other, keys in (
        (NetworkSettings(), ["num_encoder_layers", "num_decoder_layers"]),
        (NetworkSettings(num_encoder_layers=2, num_decoder_layers=12), ["num_encoder_layers", "num_decoder_layers"]),
        (NetworkSettings(num_layers=12), ["num_layers", "num_encoder_layers", "num_decoder_layers"]),
        (replace(deep, num_decoder_layers=3), ["num_decoder_layers"]),
        (replace(deep, num_layers=3, d_ff=5), ["d_ff"]),
    ):
        assert changed_keys(asdict(deep), asdict(other)) == keys
    older = {key: value for key, value in asdict(deep).items() if key != "self_attention"}
    assert changed_keys(older, asdict(deep)) == changed_keys(asdict(deep), older) == []
    assert changed_keys(older, asdict(replace(deep, self_attention="own"))) == ["self_attention"]
    newer = {**asdict(deep), "from_a_newer_version": 1}
    assert changed_keys(newer, asdict(deep)) == changed_keys(asdict(deep), newer) == ["from_a_newer_version"]
