"""The loss scale: as large as gradients allow, so that small ones do not vanish in half precision.

The invariant: the scale depends on nothing but the sequence of verdicts, so ranks that agree on each of them have the
same scale.
"""

_INITIAL = 2.0**16
_WINDOW = 2000  # updates without an overflow before it grows
_LEAST = 2.0**-16


class LossScaler:
    """The scale of one loss: halved at an overflow, doubled after 2000 updates without one. Apex's class of that name.

    Args:
        loss_scale: a number, which stays; or "dynamic".
        min_loss_scale: the floor of a dynamic scale; by default 2**-16.
        max_loss_scale: its ceiling.
    Attributes:
        dynamic: whether it moves.
        num_skipped: updates that have found an overflow.
        is_overflow_pending: whether one has been found that no update has heard of yet.
    """

    def __init__(
        self, loss_scale: float | str, *, min_loss_scale: float | None = None, max_loss_scale: float = 2.0**24
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        # Scripts read, and some set, these three by Apex's names.
        self._loss_scale = min(max_loss_scale, _INITIAL) if self.dynamic else float(loss_scale)
        self._unskipped = 0
        self._scale_seq_len = _WINDOW
        self._min_loss_scale = _LEAST if min_loss_scale is None else min_loss_scale
        self._max_loss_scale = max_loss_scale
        self.num_skipped = 0
        self.is_overflow_pending = False
        self._was_overflow = False
        if self.dynamic:
            self._loss_scale = max(self._min_loss_scale, self._loss_scale)

    def loss_scale(self) -> float:
        """The factor by which this loss is multiplied now."""
        return self._loss_scale

    @property
    def is_at_floor(self) -> bool:
        """Whether an overflow cannot lower the scale any more."""
        return not self.dynamic or self._loss_scale <= self._min_loss_scale

    def update(self, *, is_overflow: bool) -> bool:
        """Take note of what a backward has come to.

        Returns:
            Whether smaller scales are no way out: two overflows in a row, the second of them at the floor.
        """
        is_stuck = is_overflow and self._was_overflow and self.is_at_floor
        self._was_overflow = is_overflow
        if is_overflow:
            self._unskipped = 0
            self.num_skipped += 1
            if self.dynamic:
                self._loss_scale = max(self._min_loss_scale, self._loss_scale / 2.0)
            return is_stuck
        self._unskipped += 1
        if self.dynamic and self._unskipped >= self._scale_seq_len:
            self._loss_scale = min(self._max_loss_scale, self._loss_scale * 2.0)
            self._unskipped = 0
        return False

    def state_dict(self) -> dict[str, float | int]:
        """Apex's two entries, and the number of overflows."""
        return {"loss_scale": self._loss_scale, "unskipped": self._unskipped, "skipped": self.num_skipped}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Go on from ``state``; one that Apex has saved counts no overflows.

        A static scale stays what it is: it is the caller's choice, not the training's.
        """
        if self.dynamic:
            self._loss_scale = float(state["loss_scale"])
        self._unskipped = int(state["unskipped"])
        self.num_skipped = int(state.get("skipped", 0))
        self._was_overflow = False
