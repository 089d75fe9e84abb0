"""What a run checks of its own numbers: that losses and gradients are finite."""

from train.exits import Exit, Stop
from train.report import say


class BadSteps:
    """Tells of steps whose loss or gradient is not finite, and of their batches; the step itself leaves them out.

    Args:
      most: such steps in a row that end the run.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0

    def check(self, step: int, metrics: dict[str, float], rows: str) -> None:
        """Counts one step.

        Raises:
          Stop: there were too many in a row.
        """
        if metrics["is_finite"]:
            self._count = 0
            return
        self._count += 1
        line = (
            f"step {step} has the loss {metrics['loss']:g} and a gradient of norm {metrics['grad_norm']:g}, and "
            f"changed nothing; its batch: {rows}"
        )
        if self._count == self._most:
            raise Stop(
                Exit.NOT_FINITE,
                f"{line}; that makes {self._most} in a row (--max-bad-steps), and the newest checkpoint is from before",
            )
        say(f"warning   {line}")
