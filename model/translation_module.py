"""The LightningModule: one optimizer step over a rank's micro-batches, and validation.

Optimization is manual, so that `global_step` and every interval count optimizer steps, and so that ranks
synchronise gradients once a step. The loss is a sum over target tokens divided by the global batch's count: any
number of ranks and micro-batches gives the same gradient.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from data_module.batching.batch import MicroBatch, RankBatch, SpecialIds
from model.compilation import CompiledForward
from model.decoding import BeamSearch
from model.loss import LossSums, label_smoothed_loss
from model.loss_scaler import LossScaler
from model.lr_schedule import noam_learning_rate
from model.settings import SHORTEST, DecodingSettings, NetworkSettings, TrainingSettings
from model.transformer import Transformer

_SEED_RANGE = 1 << 63


class TranslationModule(LightningModule):
    """The Transformer with its loss, schedule, and validation by loss and by decoding."""

    def __init__(
        self,
        vocabulary_size: int,
        special: SpecialIds,
        network: NetworkSettings,
        training: TrainingSettings,
        decoding: DecodingSettings,
        seed: int,
        compiled: bool = False,
        scaled: bool = False,
    ) -> None:
        """The network of the recipe's settings.

        `compiled` trains it through torch.compile, and validates without; `scaled` scales the loss, for float16.
        """
        super().__init__()
        self.automatic_optimization = False
        self.special, self.training_settings, self.decoding, self.seed = special, training, decoding, seed
        self.network_settings = network
        self.network = Transformer(vocabulary_size, network)
        self.compiled_forward = CompiledForward(self.network) if compiled else None
        self.loss_scale = LossScaler() if scaled else None
        self.validation_sums: dict[str, Tensor] = {}
        self._skipped, self._skipped_in_a_row = torch.zeros(()), torch.zeros(())
        """Steps without a finite gradient: in all, and up to now without one between. On the network's device."""

    def transfer_batch_to_device(self, batch: RankBatch, device: torch.device, dataloader_idx: int) -> RankBatch:
        """One copy, which the host does not wait for; left to itself Lightning would."""
        return batch.to(device, non_blocking=True)

    def on_fit_start(self) -> None:
        """See that attention takes the kernels it is meant to."""
        # On some GPUs PyTorch prefers cuDNN's to its flash kernel; they are planned anew for every shape of batch.
        torch.backends.cuda.enable_cudnn_sdp(False)

    def states(self, batch: MicroBatch) -> Tensor:
        """The decoder's states [B, T, D]."""
        # Validation is short, and has a graph of its own to compile.
        compiled = self.compiled_forward if self.training else None
        return (compiled or self.network)(batch.source, batch.target_input, batch.source_mask)

    def losses(self, batch: MicroBatch) -> LossSums:
        """Sums of the loss over a micro-batch's target tokens."""
        return label_smoothed_loss(
            self.states(batch),
            self.network.embedding.weight,
            batch.target_output,
            self.training_settings.label_smoothing,
            self.special.pad,
            compiled=self.compiled_forward is not None and self.training,
        )

    def training_step(self, share: RankBatch, batch_idx: int) -> dict[str, Any]:
        """One optimizer step over this rank's share of a global batch.

        A step whose gradient is not finite is skipped: weights and moments stay, its batch and its place in the
        schedule are used up. Every rank has the same gradient and decides alike, and no host waits for a device.

        Returns this rank's sums (not means) over its target tokens, as tensors on the device, for the monitor:
        zero for a skipped step. Beside them `tokens`, those that count of all ranks.
        """
        settings = self.training_settings
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        step = self.global_step + 1
        learning_rate = noam_learning_rate(step, self.network_settings.d_model, settings)
        [group] = optimizer.param_groups
        group["lr"] = learning_rate
        # DDP averages gradients over ranks; the loss is their sum over all target tokens.
        scale: float | Tensor = self.trainer.world_size / share.num_target_tokens
        if self.loss_scale is not None:
            scale = scale * self.loss_scale.factor
        sums = {
            "smoothed": torch.zeros((), device=self.device),
            "likelihood": torch.zeros((), device=self.device),
        }
        sums["correct"] = torch.zeros((), device=self.device)
        batches = share.micro_batches
        for number, batch in enumerate(batches):
            # Dropout depends on nothing but where it happens: no random state to save or to disturb.
            _generator(self.device).manual_seed(_dropout_seed(self.seed, step, self.global_rank, number))
            last = number == len(batches) - 1
            with nullcontext() if last else self._without_synchronisation():
                with _weights_cast_once(self.device.type):
                    losses = self.losses(batch)
                self.manual_backward(losses.smoothed * scale)
            sums["smoothed"] += losses.smoothed.detach()
            sums["likelihood"] += losses.negative_log_likelihood
            sums["correct"] += losses.num_correct
        # The optimizer's list: walking through the network's modules for it takes longer than the norm.
        norm = torch.nn.utils.get_total_norm([p.grad for p in group["params"] if p.grad is not None])
        if self.loss_scale is not None:
            norm = norm / self.loss_scale.factor
            optimizer.optimizer.grad_scale = self.loss_scale.factor  # type: ignore[attr-defined]
        if settings.gradient_clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(group["params"], settings.gradient_clip_norm, norm)
        skip = 1.0 - norm.isfinite().float()
        # The fused kernel reads this flag on its own device, and divides by the scale above.
        optimizer.optimizer.found_inf = skip  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
        if self.loss_scale is not None:
            self.loss_scale.update(skip)
        self._skipped = self._skipped + skip
        self._skipped_in_a_row = (self._skipped_in_a_row + 1.0) * skip
        sums["tokens"] = torch.full_like(norm, share.num_target_tokens)
        return {
            **{name: value.where(skip == 0.0, 0.0) for name, value in sums.items()},
            "gradient_norm": norm,
            "skipped": self._skipped,
            "skipped_in_a_row": self._skipped_in_a_row,
            "learning_rate": learning_rate,
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A resumed run goes on counting."""
        checkpoint["skipped_steps"] = [self._skipped.item(), self._skipped_in_a_row.item()]
        if self.loss_scale is not None:
            checkpoint["loss_scale"] = self.loss_scale.state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """As `on_save_checkpoint` gave it; older checkpoints have none."""
        self._skipped, self._skipped_in_a_row = torch.tensor(checkpoint.get("skipped_steps", [0.0, 0.0]))
        if self.loss_scale is not None and "loss_scale" in checkpoint:
            self.loss_scale.load_state(checkpoint["loss_scale"])

    def _without_synchronisation(self) -> AbstractContextManager[None]:
        """Under DDP, a backward pass that keeps its gradients to itself."""
        if isinstance(self.trainer.strategy, DDPStrategy):
            return self.trainer.strategy.model.no_sync()  # type: ignore[union-attr, operator]
        return nullcontext()

    def on_validation_epoch_start(self) -> None:
        """Forget the last validation's sums."""
        self.validation_sums = {
            name: torch.zeros((), dtype=torch.float64, device=self.device)
            for name in ("smoothed", "likelihood", "correct", "tokens")
        }

    def validation_step(  # type: ignore[override]
        self, share: RankBatch, batch_idx: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Adds to the validation loss, and decodes greedily: pair indices [B], ids [B, L] and their lengths [B]."""
        [batch] = share.micro_batches
        losses = self.losses(batch)
        sums = self.validation_sums
        sums["smoothed"] += losses.smoothed
        sums["likelihood"] += losses.negative_log_likelihood
        sums["correct"] += losses.num_correct
        sums["tokens"] += (batch.target_output != self.special.pad).sum()
        # Made anew, since as an attribute it would double the network's weights in every checkpoint.
        search = BeamSearch(self.network, self.special.bos, self.special.eos, self.special.pad)
        # What a search holds grows with its answers: the shortest sentences come in parts, lest they need more memory
        # than a training step.
        most = max(1, batch.source.numel() // SHORTEST)
        tokens, lengths = [], []
        for start in range(0, batch.source.size(0), most):
            rows = slice(start, start + most)
            mask = batch.source_mask[rows] if batch.source_mask is not None else None
            answers = search.greedy(batch.source[rows].long(), mask, self.decoding.max_extra_tokens)
            tokens.append(answers.tokens)
            lengths.append(answers.lengths)
        longest = max(part.size(1) for part in tokens)
        padded = [F.pad(part, [0, longest - part.size(1)], value=self.special.pad) for part in tokens]
        return batch.pairs, torch.cat(padded), torch.cat(lengths)

    def on_validation_epoch_end(self) -> None:
        """Logs loss, negative log-likelihood, perplexity and accuracy over all ranks' target tokens."""
        names = list(self.validation_sums)
        total = torch.stack([self.validation_sums[name] for name in names])
        total = self.trainer.strategy.reduce(total, reduce_op="sum")
        sums = dict(zip(names, total.tolist(), strict=True))
        likelihood = sums["likelihood"] / sums["tokens"]
        scalars = {
            "validation/loss": sums["smoothed"] / sums["tokens"],
            "validation/negative_log_likelihood": likelihood,
            "validation/perplexity": float(torch.tensor(likelihood).exp()),
            "validation/accuracy": sums["correct"] / sums["tokens"],
            # Lightning would put a validation one step before the step it follows.
            "step": float(self.global_step),
        }
        self.log_dict({name: torch.tensor(value, dtype=torch.float64).float() for name, value in scalars.items()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam as in section 5.3; the schedule sets the rate before each step."""
        settings = self.training_settings
        return torch.optim.Adam(
            self.network.parameters(),
            lr=0.0,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_epsilon,
            fused=True,
        )


def _generator(device: torch.device) -> torch.Generator:
    """What dropout draws from.

    Not by way of `torch.manual_seed`: on a machine without CUDA each call of that notes its caller's whole stack, for
    the day that CUDA starts, and keeps it.
    """
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


def _weights_cast_once(device: str) -> torch.autocast:
    """Mixed precision that keeps the weights it has cast, for all of a step's micro-batches.

    Lightning's own, around the step, casts them anew each time; it also forgets them when the step ends.
    """
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return torch.autocast(device, dtype, enabled=enabled, cache_enabled=True)


def _dropout_seed(*parts: int) -> int:
    """One number for (seed, step, rank, micro-batch), well spread, so that no two streams are alike."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part + 0x632BE59BD9B4E019)) * 0xD1342543DE82EF95 & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 29
    return state % _SEED_RANGE
