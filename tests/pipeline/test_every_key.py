"""Every key of a recipe reaches the object that uses it.

One recipe has another value than the default for every key. What `fit` builds from it is asked for these values.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.optim import Optimizer

from data_module.corpus.manifest import Manifest
from data_module.corpus.pairs import open_reader
from data_module.corpus.preparation import prepare
from data_module.corpus.readers import READERS, Reader
from data_module.errors import InputError
from data_module.settings import TextSource
from data_module.system.files import PlainValues
from data_module.tokenization.tokenizer import Tokenizer
from model.attention import SelfAttention
from model.layers import NORMS, SELF_ATTENTIONS
from model.optimization import OPTIMIZERS, muon
from model.training_module import TranslationModule
from model.transformer import LearnedPositions, Transformer
from pipeline.checkpointing.callback import EMA
from pipeline.checkpointing.checkpoint import write_atomic
from pipeline.config.recipe import Recipe, recipe_from_dict
from pipeline.config.settings import TRAINER_KEYS
from pipeline.fit import train
from pipeline.inference.loading import load_translator
from pipeline.runtime.devices import best_precision
from pipeline.training.graceful_stop import MARGIN_SECONDS
from pipeline.training.start import Plan, Start
from pipeline.training.trainer import ConnectedDDP
from tests.conftest import sentences


@dataclass
class Built:
    """What `fit` has built when training would begin, and what translates with its checkpoint."""

    recipe: Recipe
    tokenizer: Tokenizer
    manifest: Manifest
    module: Any = None
    data: Any = None
    trainer: Any = None
    callbacks: dict[str, Any] = field(default_factory=dict)
    """By the names of their classes."""
    deterministic: bool = False
    optimizer: Any = None
    search: list[object] = field(default_factory=list)
    """Arguments of the search."""

    def layers(self) -> list[nn.Module]:
        return [*self.module.network.encoder, *self.module.network.decoder]

    def attentions(self) -> list[nn.Module]:
        return [part for layer in self.layers() for name, part in layer.named_children() if name.endswith("attention")]

    def residuals(self) -> list[nn.Module]:
        return [part for layer in self.layers() for name, part in layer.named_children() if name.endswith("residual")]

    def rates(self) -> list[float]:
        return [self.module._schedule(step) for step in range(1, self.trainer.max_steps + 1)]

    def most_tokens(self) -> int:
        """Of a micro-batch of training or a batch of validation."""
        shape = self.data.row_shape(1)
        return max(
            shape.source_tokens, shape.target_tokens, *(one.source.numel() for one in self.data.val_dataloader())
        )


class OwnReader(Reader):
    """Remembers the languages that it is asked for."""

    languages_of: ClassVar[dict[str, tuple[str, str]]] = {}

    def chunks(self) -> Iterator[tuple[list[bytes], list[bytes]]]:
        self.languages_of[str(self.text.path)] = self.languages
        lines = Path(str(self.text.path)).read_bytes().splitlines(keepends=True)
        yield lines, lines


class OwnAttention(SelfAttention):
    """Another one by its class alone."""


def own_optimizer(*arguments: object) -> Optimizer:
    optimizer = muon(*arguments)
    optimizer.registered_as = "own"
    return optimizer


def same(values: Iterable[object]) -> object:
    first, *others = values
    assert all(other == first for other in others), [first, *others]
    return first


def decay_of(callback: EMA) -> float:
    """Return the share that an average keeps of itself in an update."""
    average = [torch.ones(1, dtype=torch.float64)]
    callback._update(average, [torch.zeros(1, dtype=torch.float64)], torch.tensor(1))
    return average[0].item()


TEXTS: dict[str, list[dict[str, object]]] = {
    "train": [
        {"source": "train.source", "target": "train.target", "repeat": 2, "weight": 2.5, "prefix": ">>de<<"},
        {"tsv": "train.tsv"},
        {"reader": "own", "path": "own", "source_language": "xx", "target_language": "yy"},
        {"reader": "own", "path": "other"},
    ],
    "validation": [
        {"source": f"{name}.source", "target": f"{name}.target", "name": name} for name in ("first", "second")
    ],
    "test": [{"tsv": "test.tsv"}],
}
DATASET = TextSource(dataset="wmt/wmt14", subset="de-en", split="train")
"""Not read here: it needs a package and a network."""
PRECISION = "32-true" if best_precision("cpu") == "bf16-mixed" else "bf16-mixed"
"""Another one than the default of this machine."""

Use = Callable[[Built], object]
TEXT_KEYS: dict[str, Use] = {
    "source": lambda b: b.manifest["source_files"][0]["file"],
    "target": lambda b: b.manifest["source_files"][1]["file"],
    "tsv": lambda b: b.manifest["source_files"][2]["file"],
    "dataset": lambda b: open_reader(DATASET, b.recipe.corpus).names[0].split(":")[0],
    "subset": lambda b: open_reader(DATASET, b.recipe.corpus).names[0].split(":")[1],
    "split": lambda b: open_reader(DATASET, b.recipe.corpus).names[0].split(":")[2],
    "source_language": lambda b: OwnReader.languages_of["own"][0],
    "target_language": lambda b: OwnReader.languages_of["own"][1],
    "repeat": lambda b: b.manifest["train"]["sources"][0]["repeat"],
    "weight": lambda b: b.data.epochs()._weights[1][0],
    "reader": lambda b: "own" if OwnReader.languages_of else None,
    "path": lambda b: b.manifest["source_files"][3]["file"],
    "prefix": lambda b: b.tokenizer.decode([b.data.train_corpus.source[0]])[0].split()[0],
    "name": lambda b: same([b.module._text_sources[0][0], b.callbacks["ValidationSamples"]._text_sources.names[0]]),
}
"""Key of a text source -> its value, read from the object that uses it."""

KEYS: dict[str, tuple[object, Use | None]] = {
    "name": ("every-key", lambda b: replace(b.recipe, run=replace(b.recipe.run, folder=None)).run_folder().name),
    "corpus.folder": ("corpus", lambda b: str(b.data.folder)),
    "corpus.train": (TEXTS["train"], None),
    "corpus.validation": (TEXTS["validation"], None),
    "corpus.test": (TEXTS["test"], None),
    "corpus.source_language": ("en", lambda b: OwnReader.languages_of["other"][0]),
    "corpus.target_language": ("de", lambda b: OwnReader.languages_of["other"][1]),
    "corpus.vocabulary_size": (330, lambda b: same([b.tokenizer.vocabulary_size, b.module.network.vocabulary_size])),
    "corpus.tokenizer_sentences": (100, None),
    "corpus.split_digits": (True, lambda b: b.tokenizer.splits_digits),
    "corpus.character_coverage": (0.99, None),
    "corpus.byte_fallback": (True, lambda b: b.tokenizer.byte_fallback),
    "corpus.user_symbols": ([">>de<<"], lambda b: b.tokenizer.user_symbols),
    "corpus.lowercase": (True, lambda b: b.tokenizer.lowercase),
    "corpus.max_tokens": (90, None),
    "corpus.max_length_ratio": (4.0, None),
    "corpus.drop_invalid_utf8": (True, None),
    "corpus.drop_duplicates": (True, None),
    "corpus.drop_overlap": (True, None),
    "corpus.seed": (7, None),
    "corpus.variants": (2, lambda b: len(b.data.train_variants)),
    "corpus.bpe_dropout": ({"source": 0.1, "target": 0.2}, None),
    "corpus.noise": ({"typos": 0.1}, None),
    "batches.batch_tokens": (20_000, lambda b: b.data.epochs()._settings["batch_tokens"]),
    "batches.max_tokens_per_device": (112, lambda b: 112 if b.most_tokens() == 128 else None),  # rounded up
    "batches.workers": (3, lambda b: b.data.train_dataloader().num_workers),
    "network.num_layers": (
        4,
        lambda b: len(Transformer(9, replace(b.recipe.network, num_encoder_layers=None)).encoder),
    ),
    "network.num_encoder_layers": (3, lambda b: len(b.module.network.encoder)),
    "network.num_decoder_layers": (2, lambda b: len(b.module.network.decoder)),
    "network.d_model": (24, lambda b: b.module.network.embedding.embedding_dim),
    "network.d_ff": (40, lambda b: same(layer.feed_forward.inner.out_features for layer in b.layers())),
    "network.num_heads": (3, lambda b: same(one.num_heads for one in b.attentions())),
    "network.d_k": (5, lambda b: same(one.d_k for one in b.attentions())),
    "network.d_v": (7, lambda b: same(one.d_v for one in b.attentions())),
    "network.dropout": (0.2, lambda b: same(one.dropout.p for one in [*b.residuals(), b.module.network])),
    "network.attention_dropout": (0.3, lambda b: same(one.dropout for one in b.attentions())),
    "network.activation_dropout": (0.4, lambda b: same(layer.feed_forward.dropout.p for layer in b.layers())),
    "network.learned_positions": (True, lambda b: isinstance(b.module.network.positions, LearnedPositions)),
    "network.max_positions": (300, lambda b: b.module.network.positions.max_positions),
    "network.pre_norm": (True, lambda b: same(one.pre_norm for one in b.residuals())),
    "network.norm": ("rms", lambda b: "rms" if same(type(one.norm) for one in b.residuals()) is nn.RMSNorm else None),
    "network.activation": (
        "swish",
        lambda b: "swish" if same(type(layer.feed_forward.activation) for layer in b.layers()) is nn.SiLU else None,
    ),
    "network.self_attention": (
        "own",
        lambda b: "own" if same(type(layer.self_attention) for layer in b.layers()) is OwnAttention else None,
    ),
    "network.output_bias": (True, lambda b: isinstance(b.module.network.projection.bias, nn.Parameter)),
    "training.label_smoothing": (0.2, lambda b: b.module.training_settings.label_smoothing),
    "training.r_drop_alpha": (5.0, lambda b: b.module.training_settings.r_drop_alpha),
    "training.schedule": ("linear", lambda b: "linear" if b.rates()[4:7] == pytest.approx([1.5, 1, 0.5]) else None),
    "training.peak_learning_rate": (1.25, lambda b: max(b.rates()) / 2.0),
    "training.warmup_steps": (3, lambda b: 1 + b.rates().index(max(b.rates()))),
    "training.learning_rate_factor": (2.0, lambda b: max(b.rates()) / 1.25),
    "training.optimizer": ("own", lambda b: b.optimizer.registered_as),
    "training.adam_beta1": (0.8, lambda b: same(group["betas"][0] for group in b.optimizer.param_groups[1:])),
    "training.adam_beta2": (0.99, lambda b: same(group["betas"][1] for group in b.optimizer.param_groups[1:])),
    "training.adam_epsilon": (1e-8, lambda b: same(group["eps"] for group in b.optimizer.param_groups[1:])),
    "training.muon_momentum": (0.8, lambda b: b.optimizer.param_groups[0]["momentum"]),
    "training.weight_decay": (0.01, lambda b: same(group["weight_decay"] for group in b.optimizer.param_groups[:2])),
    "training.gradient_clip_norm": (3.0, lambda b: b.module.training_settings.gradient_clip_norm),
    "training.ema_decay": (0.9, lambda b: decay_of(b.callbacks["EMA"])),
    "decoding.beam_size": (3, lambda b: b.search[2]),
    "decoding.length_penalty": (1.2, lambda b: b.search[3]),
    "decoding.max_extra_tokens": (9, lambda b: same([b.search[4], b.module.decoding.max_extra_tokens])),
    "decoding.stop_rule": ("first", lambda b: b.search[6]),
    "run.folder": ("run", lambda b: str(same([b.callbacks["CheckpointCallback"]._run, b.trainer.logger.run]))),
    "run.seed": (11, lambda b: same([b.module.seed, b.data.seed])),
    "run.checkpoint_every_steps": (6, lambda b: b.callbacks["CheckpointCallback"]._settings.checkpoint_every_steps),
    "run.checkpoint_every_minutes": (
        12.5,
        lambda b: b.callbacks["CheckpointCallback"]._settings.checkpoint_every_minutes,
    ),
    "run.keep_last": (2, lambda b: b.callbacks["CheckpointCallback"]._settings.keep_last),
    "run.best_by": (
        "exact_match",
        lambda b: same(
            [
                b.callbacks["CheckpointCallback"]._settings.best_by,
                *(b.callbacks[name]._best_by for name in ("ValidationSamples", "TrainingMonitor")),
            ]
        ),
    ),
    "run.validation_translations": (
        39,
        lambda b: same(map(len, (b.data.translated_pairs, b.callbacks["ValidationSamples"]._translated))),
    ),
    "run.metrics": (
        ["ter"],
        lambda b: [name for name in b.callbacks["ValidationSamples"]._metrics._metrics if name == "ter"],
    ),
    "run.patience": (8, lambda b: b.callbacks["ResumableEarlyStopping"].patience),
    "run.bleu_tokenizer": ("char", lambda b: b.callbacks["ValidationSamples"].state_dict()["bleu_tokenizer"]),
    "run.log_every_steps": (4, lambda b: b.callbacks["TrainingMonitor"]._every_steps),
    "run.compile": (False, lambda b: b.module.compiled_forward is not None),  # true needs a GPU
    "run.kernels": ("pytorch", lambda b: b.module.backend.search.name.lower()),
    "run.timeout_seconds": (
        123,
        lambda b: same(
            [b.callbacks["GracefulStop"]._timeout_seconds, b.trainer.strategy._timeout.seconds - MARGIN_SECONDS]
        ),
    ),
    "monitoring.attention_sentences": ([3], lambda b: b.callbacks["AttentionPlots"]._pairs),
    "monitoring.embedding_pieces": (20, lambda b: len(b.callbacks["AttentionPlots"]._frequent_pieces)),
    "trainer.accelerator": ("cpu", lambda b: b.trainer.strategy.root_device.type),
    "trainer.strategy": ("ddp", lambda b: "ddp" if type(b.trainer.strategy) is ConnectedDDP else None),
    "trainer.devices": (2, lambda b: b.trainer.num_devices),
    "trainer.num_nodes": (2, lambda b: b.trainer.num_nodes),
    "trainer.precision": (PRECISION, lambda b: b.trainer.precision),
    "trainer.max_steps": (7, lambda b: b.trainer.max_steps),
    "trainer.min_steps": (5, lambda b: b.trainer.min_steps),
    "trainer.max_time": ("00:00:45:00", lambda b: f"00:00:{b.callbacks['GracefulStop']._max_seconds / 60:.0f}:00"),
    "trainer.val_check_interval": (6, lambda b: b.trainer.val_check_interval),
    "trainer.deterministic": ("warn", lambda b: "warn" if b.deterministic else None),
    "trainer.inference_mode": (False, lambda b: b.trainer.fit_loop.epoch_loop.val_loop.inference_mode),
    "trainer.profiler": ("simple", lambda b: type(b.trainer.profiler).__name__.removesuffix("Profiler").lower()),
    "trainer.detect_anomaly": (True, lambda b: b.trainer._detect_anomaly),
}
"""Key -> its value in the recipe, and that value read from the object that uses it.

Without the latter, the prepared corpus is another one if the key has its default, or a list one item less.
"""


def write_texts() -> None:
    """Write texts in which each reason to drop a pair applies to one."""
    texts = {name: sentences(60, seed) for seed, name in enumerate(("train", "first", "second", "test", "own"))}
    long, short = " ".join(texts["train"][:9]), "the dog sees the old blue house near the small red tree"
    pairs = {name: [(line, line) for line in lines] for name, lines in texts.items()}
    pairs["train"] += [*pairs["train"][:1], *pairs["first"][:1], *pairs["test"][:1], (long, long), (short, "a")]
    for name, both in pairs.items():
        Path(f"{name}.source").write_text("".join(f"{one}\n" for one, _ in both))
        Path(f"{name}.target").write_text("".join(f"{other}\n" for _, other in both))
        Path(f"{name}.tsv").write_text("".join(f"{one}\t{other}\n" for one, other in both))
    Path("own").write_bytes("εδαβγ\n".encode() + b"not UTF-8 \xff\n" + "\n".join(texts["own"]).encode())
    Path("other").write_text("a house\n")


def build(recipe: Recipe) -> Built:
    """Do what `fit` does until training begins."""
    manifest = prepare(recipe.corpus, progress=False)
    tokenizer = Tokenizer.load(recipe.corpus_folder() / "tokenizer.model")
    built = Built(recipe, tokenizer, manifest)

    def fit(
        trainer: Trainer, module: TranslationModule, datamodule: object, ckpt_path: object, weights_only: bool
    ) -> None:
        built.trainer, built.module, built.data = trainer, module, datamodule
        built.callbacks = {type(callback).__name__: callback for callback in trainer.callbacks}
        built.deterministic = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(False)
        module.trainer = trainer
        built.optimizer = module.configure_optimizers()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "fit", fit)
        train(Start(Plan(recipe, None, False), None, tokenizer, manifest))
    return built


def arguments_of_search(built: Built) -> list[object]:
    """Translate with a checkpoint of the network; return what the search is called with."""
    weights = {f"network.{name}": weight for name, weight in built.module.network.state_dict().items()}
    contents = {"state_dict": weights, "global_step": 0}
    built.callbacks["CheckpointCallback"].on_save_checkpoint(built.trainer, built.module, contents)
    write_atomic(contents, Path("one.ckpt"))
    translator = load_translator(Path("one.ckpt"))
    given: list[object] = []
    search = translator.search.beam
    translator.search.beam = lambda *arguments: given.extend(arguments) or search(*arguments)
    translator.translate(["a dog"])
    return given


@pytest.fixture(scope="module")
def built(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """Paths of the recipe are relative to the current folder."""
    values: PlainValues = {}
    for key, (value, _) in KEYS.items():
        *section, name = key.split(".")
        (values.setdefault(section[0], {}) if section else values)[name] = value
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("every-key"))
        patch.setitem(NORMS, "rms", nn.RMSNorm)
        patch.setitem(SELF_ATTENTIONS, "own", OwnAttention)
        patch.setitem(READERS, "own", OwnReader)
        patch.setitem(OPTIMIZERS, "own", own_optimizer)
        # Nothing is compiled here.
        patch.setattr("pipeline.runtime.backend_choice.missing_compiler", lambda: None)
        # As torchrun starts the first of two nodes; the last variable is one that Trainer sets, as the benchmark is.
        environment: dict[str, object] = {"WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "RANK": 0, "LOCAL_RANK": 0}
        environment |= dict.fromkeys(("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"), 1)
        environment |= {"GROUP_RANK": 0, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        for name, value in environment.items():
            patch.setenv(name, str(value))
        patch.setattr(torch.backends.cudnn, "benchmark", True)
        write_texts()
        recipe = recipe_from_dict(values)
        built = build(recipe)
        built.search = arguments_of_search(built)
        yield built


def default_of(one: "Field[object]") -> object:
    return one.default if one.default_factory is MISSING else one.default_factory()


def test_every_key_is_in_a_table_with_another_value_than_its_default(built: Built) -> None:
    found = [*(f"trainer.{key}" for key in TRAINER_KEYS)]
    for section in fields(Recipe):
        if is_dataclass(section.type):
            for one in fields(section.type):
                # These two leave other keys without effect.
                if (key := f"{section.name}.{one.name}") not in ("corpus.tokenizer", "corpus.model_type"):
                    assert getattr(getattr(built.recipe, section.name), one.name) != default_of(one), one.name
                    found.append(key)
        elif section.name != "trainer":
            found.append(section.name)
    assert sorted(found) == sorted(KEYS)
    assert list(TEXT_KEYS) == [one.name for one in fields(TextSource)]


def test_every_key_reaches_the_object_that_uses_it(built: Built) -> None:
    for key, (value, use) in KEYS.items():
        assert use is None or use(built) == (pytest.approx(value) if isinstance(value, float) else value), key
    for one in fields(TextSource):
        values = [getattr(text, one.name) for text in [*built.recipe.corpus.texts(), DATASET]]
        assert TEXT_KEYS[one.name](built) == next(value for value in values if value != one.default), one.name


def test_the_loss_is_scaled_in_float16_only(built: Built) -> None:
    assert built.module.loss_scaler is None
    recipe = replace(built.recipe, trainer={**built.recipe.trainer, "precision": "16-mixed"})
    assert build(recipe).module.loss_scaler is not None


def test_every_key_of_the_corpus_has_an_effect_on_it(built: Built) -> None:
    settings = built.recipe.corpus
    with pytest.raises(InputError, match="own:2: invalid UTF-8"):
        prepare(replace(settings, drop_invalid_utf8=False, folder="other-drop_invalid_utf8"), progress=False)
    for one in fields(settings):
        if one.name in ("drop_invalid_utf8", "tokenizer", "model_type") or KEYS[f"corpus.{one.name}"][1] is not None:
            continue
        default = default_of(one)
        changed = getattr(settings, one.name)[:-1] if default is MISSING else default
        other = prepare(replace(settings, **{one.name: changed, "folder": f"other-{one.name}"}), progress=False)
        parts = ("tokenizer", "train", "validation")
        assert [other[part] for part in parts] != [built.manifest[part] for part in parts], one.name
    with pytest.raises(InputError, match=r"^corpus\.bpe_dropout: is not for corpus\.model_type unigram"):
        prepare(replace(settings, model_type="unigram", folder="other-model_type"), progress=False)
    # Other sentences would make another one.
    given = replace(settings, tokenizer="corpus/tokenizer.model", tokenizer_sentences=10_000, folder="other-tokenizer")
    assert prepare(given, progress=False)["tokenizer"] == built.manifest["tokenizer"]
