"""The LightningModule: training steps over a rank's micro-batches; `validation.py` has the validation.

Optimization is manual, so that `global_step` and all intervals count optimizer steps, and ranks synchronize gradients
once per step. The loss is a sum over target tokens, divided by the number of target tokens in the global batch.
Therefore the gradient does not depend on the number of ranks and micro-batches.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypedDict

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from data_module.batch import PackedBatch, PaddedBatch, RankBatch, SpecialIds
from model.backend import Backend, weights_cast_once
from model.loss import LossSums, label_smoothed_loss
from model.optimization import LossScaler, build_optimizer, build_schedule, take_step
from model.packed_attention import packed_sentences
from model.settings import DecodingSettings, NetworkSettings, TrainingSettings
from model.torch_private import default_generator, total_norm
from model.transformer import PaddedTransformer, Transformer
from model.validation import Validation


class StepOutputs(TypedDict):
    """What a training step tells the monitor, as tensors on the device. The first four are 0 for a skipped step."""

    smoothed: Tensor
    """The loss. This and the next two fields are sums over this rank's target tokens."""
    negative_log_likelihood: Tensor
    correct: Tensor
    """Number of target tokens that the network finds the most probable."""
    tokens: Tensor
    """Number of target tokens of all ranks."""
    gradient_norm: Tensor
    skipped: Tensor
    """Number of skipped steps of the run."""
    skipped_in_a_row: Tensor
    learning_rate: float


class TranslationModule(LightningModule):
    """The Transformer with its loss, optimizer, learning-rate schedule, and validation by loss and decoding."""

    def __init__(
        self,
        vocabulary_size: int,
        special: SpecialIds,
        network: NetworkSettings,
        training: TrainingSettings,
        decoding: DecodingSettings,
        seed: int,
        backend: Backend = Backend(),  # noqa: B008
    ) -> None:
        """Initialize the network; `seed` is that of dropout.

        Raises ValueError if the settings name a part that is not registered.
        """
        super().__init__()
        self.automatic_optimization = False
        self.special, self.training_settings, self.decoding, self.seed = special, training, decoding, seed
        self.network_settings = network
        self.network = Transformer(vocabulary_size, network)
        self.backend = backend
        self.compiled_forward = backend.compiled(self.network) if backend.compiled else None
        # Small gradients would underflow in 16 bits.
        self.loss_scaler = LossScaler() if backend.precision == "16-mixed" else None
        self._text_sources: tuple[list[str], Tensor | None] = [], None
        """The arguments of `report_sources`."""
        self._skipped = torch.zeros(2)
        """Number of skipped steps: in all, and in a row up to now. On the CPU before the first step."""

    def on_fit_start(self) -> None:
        """Disable cuDNN's attention kernels."""
        # On some GPUs PyTorch prefers them to its flash kernel, and cuDNN plans anew for every shape of a batch.
        torch.backends.cuda.enable_cudnn_sdp(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Build the learning-rate schedule and the optimizer."""
        width = self.network_settings.d_model
        self._schedule = build_schedule(self.training_settings, width, self.trainer.max_steps)
        return build_optimizer(self.network.parameters(), self.training_settings)

    def states(self, batch: PackedBatch | PaddedBatch, passes: int = 1) -> Tensor:
        """Return the decoder's states: [M, D] of a packed batch, [B, T, D] of a padded one.

        The states of several passes, each with dropout of its own, are stacked: [passes, ...].
        """
        if isinstance(batch, PaddedBatch):
            padded = PaddedTransformer(self.network)
            forward: Callable[[], Tensor] = partial(padded, batch.source, batch.target_input, batch.source_mask)
        else:
            device = self.network.embedding.weight.device.type
            autocast = torch.is_autocast_enabled(device)
            dtype = torch.get_autocast_dtype(device) if autocast else self.network.embedding.weight.dtype
            source = batch.source, batch.source_positions
            target = batch.target_input, batch.target_positions
            sentences = packed_sentences(batch, dtype, self.backend.attention)
            forward = partial(self.compiled_forward or self.network.rows, source, target, sentences)
        return forward() if passes == 1 else torch.stack([forward() for _ in range(passes)])

    def losses(self, batch: PackedBatch | PaddedBatch, scale: Tensor | float | None = None) -> LossSums:
        """Return sums of the loss over a batch's target tokens; for `scale`, see `label_smoothed_loss`.

        With R-Drop, in training mode, the batch passes through the network twice, with different dropout.
        """
        alpha = self.training_settings.r_drop_alpha if self.training else 0.0
        states = self.states(batch, passes=2 if alpha else 1)
        return label_smoothed_loss(
            *self.network.projection_operands(states),
            batch.target_output,
            self.training_settings.label_smoothing,
            self.special.pad,
            scale=scale,
            r_drop_alpha=alpha,
            chunk_terms=self.backend.chunk_terms,
        )

    def training_step(self, rank_batch: RankBatch, batch_idx: int) -> StepOutputs:
        """Take one optimizer step over this rank's part of a global batch.

        If the gradient is not finite, the step is skipped: weights and optimizer state do not change, but the batch
        and the step number are used up. All ranks have the same gradient and decide alike. With a fused optimizer
        the host does not wait for the device.
        """
        step, optimizer = self.global_step + 1, self.optimizers()
        assert not isinstance(optimizer, list)
        learning_rate = self._schedule(step)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate

        factor, loss_scale = self._loss_factor(rank_batch)
        sums, last = [], len(rank_batch.micro_batches) - 1
        for number, batch in enumerate(rank_batch.micro_batches):
            # Dropout depends on (seed, step, rank, micro-batch) alone. So a resumed run has the same dropout as an
            # uninterrupted one, although no random state is saved, and each micro-batch has dropout of its own.
            default_generator(self.device).manual_seed(_dropout_seed(self.seed, step, self.global_rank, number))
            # Gradients of the micro-batches add up on this rank. The backward pass of the last one reduces the sums
            # over ranks, once per step. The forward pass may be inside `no_sync` or not: under manual optimization
            # Lightning prepares DDP's reducer in `manual_backward`, for each backward pass outside of `no_sync`.
            with nullcontext() if number == last else self._no_synchronization():
                sums.append(self._add_gradients(batch, factor))
        # The cache holds casts of weights that the optimizer is about to change.
        torch.clear_autocast_cache()

        # All ranks have the same gradients now, so they compute the same norm, and clip and skip alike. Parameters come
        # from the optimizer: `network.parameters()` takes the host longer than the norm.
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        if loss_scale is not None:  # The gradients keep this scale until the optimizer step divides by it.
            norm = norm / loss_scale
        if self.training_settings.gradient_clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.training_settings.gradient_clip_norm, norm)
        # A tensor, since a condition would make the host wait for the device.
        skip = 1.0 - norm.isfinite().float()
        # `optimizer` is Lightning's wrapper, whose `step` also counts `global_step`; inside it is PyTorch's optimizer.
        take_step(optimizer.optimizer, optimizer.step, skip, loss_scale)
        optimizer.zero_grad()
        if self.loss_scaler is not None:
            self.loss_scaler.update(skip)

        skipped, in_a_row = self._skipped.to(self.device).unbind()
        self._skipped = torch.stack([skipped + skip, (in_a_row + 1.0) * skip])
        smoothed, negative_log_likelihood, correct = torch.stack(sums).sum(0).where(skip == 0.0, 0.0).unbind()
        return {
            "smoothed": smoothed,
            "negative_log_likelihood": negative_log_likelihood,
            "correct": correct,
            "tokens": (1.0 - skip) * rank_batch.num_target_tokens,
            "gradient_norm": norm,
            "skipped": self._skipped[0],
            "skipped_in_a_row": self._skipped[1],
            "learning_rate": learning_rate,
        }

    def _loss_factor(self, rank_batch: RankBatch) -> tuple[Tensor | float, Tensor | None]:
        """Return the factor on the loss of each micro-batch, and the part of it that the optimizer divides by."""
        # The wanted gradient is that of the sum of all ranks' losses, divided by the number of their target tokens. DDP
        # averages gradients over ranks, which divides the sum by world_size; this factor makes up for it.
        factor = self.trainer.world_size / rank_batch.num_target_tokens
        if self.loss_scaler is None:
            return factor, None
        self.loss_scaler.to(self.device)
        return self.loss_scaler.scale * factor, self.loss_scaler.scale

    def _add_gradients(self, batch: PackedBatch, factor: Tensor | float) -> Tensor:
        """Run the forward and backward passes of a micro-batch.

        Returns:
            [3]: loss, negative log-likelihood and correct predictions, each summed over the target tokens.
        """
        with weights_cast_once(self.device.type):
            losses = self.losses(batch, factor)
        # Plain attention computes products in float32; autocast would compute their backward pass in 16 bits.
        with torch.autocast(self.device.type, enabled=False):
            self.manual_backward(losses.smoothed)
        return torch.stack([losses.smoothed.detach() / factor, losses.negative_log_likelihood, losses.num_correct])

    def warm_up(self, rank_batch: RankBatch) -> None:
        """Do what a training step does before the optimizer step, but do not synchronize gradients between ranks.

        Under DDP this has to be called inside the wrapper's forward pass.
        """
        factor, _ = self._loss_factor(rank_batch)
        with self._no_synchronization():
            for batch in rank_batch.micro_batches:
                self._add_gradients(batch, factor)

    def _no_synchronization(self) -> AbstractContextManager[None]:
        """Return a context in which DDP does not synchronize gradients."""
        if isinstance(self.trainer.strategy, DDPStrategy):
            return self.trainer.strategy.model.no_sync()  # type: ignore[union-attr, operator]
        return nullcontext()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the numbers of skipped steps and the loss scale."""
        checkpoint["skipped_steps"] = self._skipped.tolist()
        if self.loss_scaler is not None:
            checkpoint["loss_scale"] = self.loss_scaler.state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore what `on_save_checkpoint` saved; a run that had another precision has saved no loss scale."""
        self._skipped = torch.tensor(checkpoint["skipped_steps"], dtype=torch.float32)
        if self.loss_scaler is not None and "loss_scale" in checkpoint:
            self.loss_scaler.load_state(checkpoint["loss_scale"])

    def report_sources(self, names: list[str], of_pair: Tensor) -> None:
        """Log the validation's loss for each source as well.

        Args:
            names: the sources' names, two or more.
            of_pair: int64 [pairs], the index into `names` of each validation pair's source. All pairs of a batch have
                the same.
        """
        self._text_sources = names, of_pair

    def on_validation_epoch_start(self) -> None:
        """Begin a validation, without the sums and the search of the last one."""
        search, max_extra_tokens = self.backend.search, self.decoding.max_extra_tokens
        self.validation = Validation(search, self.special, max_extra_tokens, *self._text_sources, self.device)

    def validation_step(  # type: ignore[override]
        self, batch: PaddedBatch, batch_idx: int
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Add to the validation's sums and translate the batch; see `Validation.step`."""
        return self.validation.step(batch, self.losses(batch), self.network)

    def validation_losses(self) -> dict[str, float]:
        """Return what `Validation.losses` describes. All ranks have to call this at the end of a validation."""
        return self.validation.losses(partial(self.trainer.strategy.reduce, reduce_op="sum"))

    def on_validation_epoch_end(self) -> None:
        """Log the validation's losses."""
        # Without the step, Lightning logs a validation one step too early.
        scalars = {**self.validation_losses(), "step": float(self.global_step)}
        self.log_dict({name: torch.tensor(value, dtype=torch.float64).float() for name, value in scalars.items()})


def _dropout_seed(*parts: int) -> int:
    """Hash (seed, step, rank, micro-batch) to a seed, so that each micro-batch has random numbers of its own."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part + 0x632BE59BD9B4E019)) * 0xD1342543DE82EF95 & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 29
    return state % (1 << 63)
