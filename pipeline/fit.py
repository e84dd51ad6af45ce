"""Corpus folder -> run folder. Run again, it resumes; the corpus is prepared first if it is not there.

Settings of the recipe may be given as --section.key value, Lightning's as --trainer.key value.
"""

import argparse
import inspect
import logging
import os
import shutil
import sys
import typing
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data_module.settings import CorpusSettings
    from pipeline.recipe import Recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--config", type=Path, action="append", required=True, help="a recipe; overlays may follow")
    parser.add_argument("--fresh", action="store_true", help="start over: remove the run that is there")


def run(arguments: argparse.Namespace) -> int:
    """Train, or go on training."""
    quiet_lightning()
    from data_module.errors import InputError
    from data_module.tokenizer import Tokenizer
    from pipeline.checkpoint import newest_whole
    from pipeline.recipe import load_recipe
    from pipeline.run_folder import RunFolder

    recipe = load_recipe(arguments.config, arguments.overrides, trainer_signature())
    if not recipe.trainer.get("max_steps"):
        raise InputError("trainer.max_steps is missing; give the number of optimizer steps")
    ensure_corpus(recipe.corpus)
    tokenizer = Tokenizer.load(Path(recipe.corpus.folder) / "tokenizer.model")
    path = recipe.run_folder()
    folder = None
    if process_rank() == 0:
        folder = RunFolder(path)
        if arguments.fresh:
            _remove_run(path)
        forbidden, allowed = folder.differences(recipe)
        if forbidden:
            raise InputError(
                f"{path}: holds a run of another recipe: {'; '.join(forbidden)}; "
                "use --fresh to start over, or another run.folder"
            )
        for change in allowed:
            print(f"changed since the run began: {change}", file=sys.stderr)
        folder.write_config(recipe, tokenizer.model)
    checkpoint, skipped = newest_whole(path)
    for broken in skipped:
        print(f"{broken}: is not whole; skipped", file=sys.stderr)
    if checkpoint is not None:
        step = int(checkpoint.stem.removeprefix("step="))
        if step >= recipe.trainer["max_steps"]:
            print(
                f"{path}: finished at step {step}; raise trainer.max_steps to go on, or use --fresh",
                file=sys.stderr,
            )
            return 0
        print(f"resuming from {checkpoint}", file=sys.stderr)
    train(recipe, path, tokenizer, checkpoint)
    if folder is not None:
        print(f"the run lies in {path}; look at it with: tensorboard --logdir {path}", file=sys.stderr)
        folder.close()
    return 0


def ensure_corpus(settings: "CorpusSettings") -> None:
    """Prepare the corpus, or where its texts are not at hand (it was copied here) see that it is of these settings.

    Raises InputError as `prepare` does.
    """
    from data_module.errors import InputError
    from data_module.manifest import is_corpus, read_manifest
    from data_module.preparation import differs_from, prepare
    from data_module.text_sources import files_of

    texts = [name for text in (*settings.train, *settings.validation) for name in files_of(text)]
    folder = Path(settings.folder)
    if all(Path(name).exists() for name in texts) or not is_corpus(folder):
        prepare(settings)
    elif differences := differs_from(read_manifest(folder), settings):
        raise InputError(
            f"{folder}: was made with other settings: {'; '.join(differences)}; name another corpus.folder"
        )


def train(recipe: "Recipe", path: Path, tokenizer: Any, checkpoint: Path | None) -> None:
    """Wire and run Lightning's Trainer."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import Callback, EarlyStopping
    from lightning.pytorch.loggers import TensorBoardLogger
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from data_module.batch import SpecialIds
    from data_module.errors import InputError
    from data_module.translation_data_module import TranslationDataModule
    from model.translation_module import TranslationModule
    from pipeline.callbacks import CheckpointKeeper, Monitor, ValidationText, WholeCheckpointIO

    special = SpecialIds(pad=tokenizer.pad_id, bos=tokenizer.bos_id, eos=tokenizer.eos_id)
    corpus = Path(recipe.corpus.folder)
    import torch

    torch.manual_seed(recipe.run.seed)
    module = TranslationModule(
        tokenizer.vocabulary_size, special, recipe.network, recipe.training, recipe.decoding, recipe.run.seed
    )
    data = TranslationDataModule(corpus, recipe.batches, special, recipe.run.seed)
    sources, references = data.validation_text()
    # The keeper stands last, so that what it saves has seen what the others did.
    callbacks: list[Callback] = [
        ValidationText(sources, references, tokenizer),
        Monitor(recipe.run.log_every_steps),
    ]
    if recipe.run.patience is not None:
        callbacks.append(EarlyStopping("validation/bleu", mode="max", patience=recipe.run.patience))
    callbacks.append(CheckpointKeeper(path, recipe, tokenizer))
    step = int(checkpoint.stem.removeprefix("step=")) if checkpoint else 0
    options = {"val_check_interval": 1000, **recipe.trainer}
    options["precision"] = options.get("precision") or best_precision(options.get("accelerator", "auto"))
    make_trainer = partial(
        Trainer,
        **{**options, "strategy": strategy(options)},
        max_epochs=-1,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=TensorBoardLogger(path, name="", version="tensorboard", purge_step=step + 1 if checkpoint else None),
        callbacks=callbacks,
        plugins=[WholeCheckpointIO()],
    )
    try:
        trainer = make_trainer()
    except (MisconfigurationException, ValueError, ImportError) as error:
        # What the machine does not have, or keys that exclude one another.
        raise InputError(f"trainer: {' '.join(str(error).split())}") from None
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)


OWNED = {
    "callbacks": "this program has its own",
    "logger": "TensorBoard is always written",
    "plugins": "this program has its own",
    "max_epochs": "count in steps with trainer.max_steps",
    "min_epochs": "count in steps with trainer.min_steps",
    "check_val_every_n_epoch": "count in steps with trainer.val_check_interval",
    "accumulate_grad_batches": "batches.max_tokens_per_device sets the accumulation",
    "gradient_clip_val": "use training.gradient_clip_norm",
    "gradient_clip_algorithm": "use training.gradient_clip_norm",
    "log_every_n_steps": "use run.log_every_steps",
    "default_root_dir": "use run.folder",
    "num_sanity_val_steps": "",
    "use_distributed_sampler": "",
    "reload_dataloaders_every_n_epochs": "",
    "enable_checkpointing": "",
    "enable_progress_bar": "",
    "enable_model_summary": "",
    "enable_autolog_hparams": "",
    "model_registry": "",
    "barebones": "",
    "fast_dev_run": "use trainer.max_steps",
}
"""Keys of Lightning's Trainer that this program sets itself."""


def trainer_signature() -> dict[str, Any]:
    """What a recipe's `trainer:` may hold: the keys of Lightning's Trainer that are not this program's own."""
    from lightning.pytorch import Trainer

    names = inspect.signature(Trainer.__init__).parameters
    hints = typing.get_type_hints(Trainer.__init__)
    return {name: hints[name] for name in names if name != "self" and name not in OWNED}


def best_precision(accelerator: Any) -> Any:
    """bf16 mixed precision wherever the hardware multiplies in it, else float32."""
    import torch

    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    supports = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return "bf16-mixed" if accelerator in ("auto", "cpu") and supports() else "32-true"


def strategy(options: dict[str, Any]) -> Any:
    """DDP with gradients as views of its buckets, where there is more than one device."""
    import torch
    from lightning.pytorch.strategies import DDPStrategy

    asked = options.get("strategy", "auto")
    devices = options.get("devices", "auto")
    if devices in ("auto", -1, "-1"):
        on_gpu = options.get("accelerator", "auto") in ("auto", "gpu", "cuda") and torch.cuda.is_available()
        devices = torch.cuda.device_count() if on_gpu else 1
    count = len(devices) if isinstance(devices, list) else int(devices)
    if asked in ("auto", "ddp") and count * int(options.get("num_nodes", 1)) > 1:
        return DDPStrategy(gradient_as_bucket_view=True)
    return asked


def process_rank() -> int:
    """This process's rank before Lightning has set anything up."""
    for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def quiet_lightning() -> None:
    """Lightning's greetings and its advice on loaders it does not know."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*treespec, LeafSpec.*")
    # Scores are summed over ranks before they are logged.
    warnings.filterwarnings("ignore", ".*recommended to use .*sync_dist=True.*")


def _remove_run(path: Path) -> None:
    for entry in path.iterdir():
        if entry.name == ".lock":
            continue
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
