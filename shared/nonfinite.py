"""What happens when a loss or a gradient is not finite: stop, skip, or rewind; see the section ``nonfinite``.

Whatever the policy, the step has already left its update out, and what it was trained on is written down: a person
can look at the rows, and train on them again.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.config.schema import Nonfinite
from shared.data import Data
from shared.recorder import Recorder, Unrecorded
from shared.step_log import Fault


class Diverged(Exception):
    """A loss or gradient is not finite, and the policy says to stop."""


class Rewind(Exception):
    """The steps since the newest checkpoint are to be trained again."""


class Faults:
    """The faults that one process has seen, and what follows from the next one."""

    def __init__(self, rule: Nonfinite, data: Data, recorder: Recorder | Unrecorded):
        self._rule, self._data, self._recorder = rule, data, recorder
        self._steps: list[int] = []

    def handle(self, faults: Sequence[Fault]) -> None:
        """Write the faults down and act on them. Raises Diverged or Rewind."""
        for fault in faults:
            self._handle(fault)

    def _handle(self, fault: Fault) -> None:
        metrics, policy = fault.metrics, self._rule.policy
        what = f"step {fault.step} is not finite: loss {metrics.loss:g}, gradient norm {metrics.grad_norm:g}"
        where = self._recorder.fault(
            {
                "step": fault.step,
                "loss": metrics.loss,
                "grad_norm": metrics.grad_norm,
                "loss_scale": metrics.loss_scale,
                "policy": policy,
                "batch": self._data.batch(fault.step - 1).fingerprint(),
                "rows": self._data.described_rows(fault.step - 1),
            }
        )
        what += f" (its rows are in {where})" if where else ""
        again = fault.step in self._steps
        self._steps.append(fault.step)
        if policy == "stop":
            raise Diverged(what)
        if len(self._steps) > self._rule.limit:
            raise Diverged(f"{what}; more than {self._rule.limit} of them (nonfinite.limit)")
        if policy == "skip":
            self._recorder.note(f"warning: {what}; its update is left out")
            return
        if again:
            raise Diverged(f"{what}, as before the run went back: the machine is not to blame")
        self._recorder.note(f"warning: {what}; going back to the newest checkpoint")
        raise Rewind
