"""Early stopping that can be resumed with another patience."""

from typing import Any

from lightning.pytorch.callbacks import EarlyStopping


class ResumableEarlyStopping(EarlyStopping):
    """Lightning's, with the recipe's patience also where a run goes on that had another."""

    @property
    def state_key(self) -> str:
        """Key of the state in checkpoints: the class name in version 0.1.0."""
        return "Patience{'monitor': 'validation/bleu', 'mode': 'max'}"

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `state_dict` gave it."""
        super().load_state_dict({**state_dict, "patience": self.patience})
