"""Early stopping that can be resumed with another patience."""

from typing import Any

from lightning.pytorch.callbacks import EarlyStopping


class ResumableEarlyStopping(EarlyStopping):
    """Lightning's EarlyStopping, with the recipe's patience also when the resumed run had another."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the callback's state, except for the patience."""
        super().load_state_dict({**state_dict, "patience": self.patience})
