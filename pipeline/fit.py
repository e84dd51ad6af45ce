"""Corpus folder -> run folder. Run again, it resumes; the corpus is prepared first if it is not there.

Settings of the recipe may be given as --section.key value, Lightning's as --trainer.key value.
"""

import argparse
import inspect
import json
import logging
import os
import sys
import typing
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data_module.settings import CorpusSettings
    from data_module.tokenizer import Tokenizer
    from pipeline.recipe import Recipe
    from pipeline.run_folder import RunFolder


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
    folder = RunFolder(path) if process_rank() == 0 else None
    checkpoint, skipped = (None, []) if arguments.fresh else newest_whole(path)
    for broken in skipped:
        print(f"{broken}: is not whole; skipped", file=sys.stderr)
    if folder is not None and checkpoint is not None:
        forbidden, allowed = folder.differences(recipe)
        if forbidden:
            raise InputError(
                f"{path}: holds a run of another recipe: {'; '.join(forbidden)}; "
                "use --fresh to start over, or another run.folder"
            )
        for change in allowed:
            print(f"changed since the run began: {change}", file=sys.stderr)
    if checkpoint is not None:
        if end := how_it_ended(recipe, path, checkpoint):
            print(f"{path}: {end}, or use --fresh", file=sys.stderr)
            return 0
        print(f"resuming from {checkpoint}", file=sys.stderr)
    train(recipe, folder, tokenizer, checkpoint, arguments.fresh)
    if folder is not None:
        print(f"the run lies in {path}; look at it with: tensorboard --logdir {path}", file=sys.stderr)
        folder.close()
    return 0


def how_it_ended(recipe: "Recipe", path: Path, checkpoint: Path) -> str | None:
    """Why there is nothing left to train, and what would change that; None where there is something."""
    from pipeline.run_folder import STOPPED_EARLY

    step = step_of(checkpoint)
    if step >= recipe.trainer["max_steps"]:
        return f"finished at step {step}; raise trainer.max_steps to go on"
    if (path / STOPPED_EARLY).exists():
        stop = json.loads((path / STOPPED_EARLY).read_text())
        if stop["step"] == step and recipe.run.patience is not None and recipe.run.patience <= stop["patience"]:
            return f"stopped early at step {step} after {stop['patience']} validations; raise run.patience to go on"
    return None


def step_of(checkpoint: Path) -> int:
    """The optimizer steps that a checkpoint has behind it, from its name."""
    return int(checkpoint.stem.removeprefix("step="))


def ensure_corpus(settings: "CorpusSettings") -> None:
    """Prepare the corpus, or see that the one that is there is of these texts and settings.

    Of several ranks one prepares it and the others wait; only the first looks at texts again, where they are at hand.

    Raises InputError as `prepare` does.
    """
    from data_module.errors import InputError
    from data_module.manifest import is_corpus, read_manifest, summary
    from data_module.preparation import differs_from, prepare
    from data_module.text_sources import is_at_hand

    folder = Path(settings.folder)
    if not is_corpus(folder):
        manifest = prepare(settings)
        if process_rank() == 0:
            print(summary(manifest), file=sys.stderr)
    elif process_rank() == 0 and all(map(is_at_hand, settings.texts())):
        prepare(settings)  # reads all texts to see that they are the same: once is enough
    elif differences := differs_from(read_manifest(folder), settings):
        raise InputError(
            f"{folder}: was made with other settings: {'; '.join(differences)}; name another corpus.folder"
        )


def train(
    recipe: "Recipe", folder: "RunFolder | None", tokenizer: "Tokenizer", checkpoint: Path | None, fresh: bool
) -> None:
    """Wire and run Lightning's Trainer. The folder is None on all ranks but the first, which alone writes.

    Nothing is removed or written before everything that can be wrong with a recipe has been looked at.
    """
    import torch
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import Callback, EarlyStopping
    from lightning.pytorch.loggers import TensorBoardLogger
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from data_module.batch import SpecialIds
    from data_module.errors import InputError
    from data_module.translation_data_module import TranslationDataModule
    from model.translation_module import TranslationModule
    from pipeline.callbacks import CheckpointKeeper, Monitor, MovingAverage, ValidationText, WholeCheckpointIO
    from pipeline.run_folder import STOPPED_EARLY
    from pipeline.whole_file import whole_file

    path = recipe.run_folder()
    special = SpecialIds(pad=tokenizer.pad_id, bos=tokenizer.bos_id, eos=tokenizer.eos_id)
    torch.manual_seed(recipe.run.seed)
    module = TranslationModule(
        tokenizer.vocabulary_size, special, recipe.network, recipe.training, recipe.decoding, recipe.run.seed
    )
    data = TranslationDataModule(Path(recipe.corpus.folder), recipe.batches, special, recipe.run.seed)
    if recipe.network.learned_positions and data.longest > recipe.network.max_positions:
        raise InputError(
            f"network.max_positions {recipe.network.max_positions} is less than the longest training sentence, "
            f"{data.longest} tokens; raise it, or lower corpus.max_tokens"
        )
    sources, references = data.validation_text()
    # The keeper stands last, so that what it saves has seen what the others did.
    callbacks: list[Callback] = [
        ValidationText(sources, references, tokenizer),
        Monitor(recipe.run.log_every_steps),
    ]
    patience = recipe.run.patience
    early_stopping = EarlyStopping("validation/bleu", mode="max", patience=patience or 1)
    if patience is not None:
        callbacks.append(early_stopping)
    if recipe.training.ema_decay is not None:
        callbacks.append(MovingAverage(decay=recipe.training.ema_decay))
    callbacks.append(CheckpointKeeper(path, recipe, tokenizer))
    options = trainer_options(recipe.trainer)
    step = step_of(checkpoint) if checkpoint else 0
    try:
        trainer = Trainer(
            **options,
            max_epochs=-1,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            logger=TensorBoardLogger(path, name="", version="tensorboard", purge_step=step + 1),
            callbacks=callbacks,
            plugins=[WholeCheckpointIO()],
        )
    except (MisconfigurationException, ValueError, ImportError) as error:
        # What the machine does not have, or keys that exclude one another.
        raise InputError(f"trainer: {' '.join(str(error).split())}") from None
    if folder is not None:
        if fresh:
            folder.remove_run()
        folder.write_config(recipe, tokenizer.model)
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    if folder is not None and patience is not None and early_stopping.wait_count >= patience:
        stop = {"step": trainer.global_step, "patience": patience}
        with whole_file(path / STOPPED_EARLY) as file:
            file.write(json.dumps(stop).encode())


def trainer_options(recipe_options: dict[str, Any]) -> dict[str, Any]:
    """A recipe's `trainer:` with what it leaves open decided: accelerator, precision, strategy.

    Raises InputError for a precision that cannot be trained in.
    """
    import torch

    from data_module.errors import InputError

    options = {"val_check_interval": 1000, "accelerator": "auto", **recipe_options}
    if options["accelerator"] == "auto" and not torch.cuda.is_available():
        options["accelerator"] = "cpu"
    options["precision"] = options.get("precision") or best_precision(options["accelerator"])
    if str(options["precision"]).startswith("16"):
        raise InputError("trainer.precision 16 needs loss scaling, which is not there yet; use bf16-mixed or 32-true")
    options["strategy"] = strategy(options)
    return options


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
    "limit_train_batches": "use trainer.max_steps",
    "overfit_batches": "give a small corpus",
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
    if isinstance(devices, str):
        devices = [part for part in devices.split(",") if part] if "," in devices else int(devices)
    count = len(devices) if isinstance(devices, list) else devices
    if asked in ("auto", "ddp") and count * int(options.get("num_nodes", 1)) > 1:
        return DDPStrategy(gradient_as_bucket_view=True)
    return asked


def process_rank() -> int:
    """This process's rank before Lightning has set anything up."""
    # Lightning's own launcher sets LOCAL_RANK, also inside an interactive SLURM job, where SLURM_PROCID is 0 for all.
    for names in (("RANK",), ("LOCAL_RANK", "NODE_RANK"), ("SLURM_PROCID",)):
        if os.environ.get(names[0], "").isdigit():
            return sum(int(os.environ.get(name, 0)) for name in names)
    return 0


def quiet_lightning() -> None:
    """Lightning's greetings and its advice on loaders it does not know."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*treespec, LeafSpec.*")
    # Scores are summed over ranks before they are logged.
    warnings.filterwarnings("ignore", ".*recommended to use .*sync_dist=True.*")
