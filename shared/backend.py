"""What the trainer needs of a framework: the protocol that ``jaxtrain.backend`` and ``torchtrain.backend`` fulfil."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from shared.batch import Batch
from shared.config.schema import Config
from shared.models.spec import Parameter
from shared.policies.observed import Operation

T = TypeVar("T", covariant=True)

State = Any
"""The backend's own: parameters, optimiser state, average, loss scale, number of completed updates."""


@dataclass(frozen=True)
class DeviceReport:
    """The accelerator a run happens on."""

    kind: str
    """What the device calls itself, such as ``TPU v5 lite`` or ``NVIDIA A100-SXM4-80GB``."""
    target: str
    """Its name in ``targets``, such as ``v5e-1``, ``a100-80`` or ``cpu``."""
    count: int
    memory_bytes: int | None
    """Memory of one device, or None where it does not say."""
    versions: dict[str, str]
    """Versions of the framework's packages."""


@dataclass(frozen=True)
class StepMetrics:
    """What one training step reports, in host memory."""

    loss: float
    """Mean over all valid tokens of the global batch, nats."""
    grad_norm: float
    """Global norm, unscaled, before clipping."""
    learning_rate: float
    """The rate this update used, or would have used."""
    tokens: int
    """Valid target tokens."""
    num_updates: int
    """Completed updates, this one included; less than the number of steps once an update was skipped."""
    skipped: bool
    """Whether this update was left out because a gradient was not finite."""
    loss_scale: float | None
    """The scale this step's gradients were multiplied by; None without loss scaling."""


@dataclass(frozen=True)
class Sums:
    """What one evaluation batch adds: never a mean, so that batches can be added."""

    loss: float
    tokens: int


class Pending(Protocol[T]):
    """A result that is still on the device; reading it waits for the device."""

    def read(self) -> T: ...


class StateSource(Protocol):
    """A state as canonical arrays, whatever holds them: a checkpoint of either backend, an export, the first draws."""

    @property
    def roles(self) -> Collection[str]:
        """Of ``parameters``, ``average``, ``first_moment``, ``second_moment``, ``momentum``: those that it has."""

    @property
    def num_updates(self) -> int:
        """Completed updates."""

    @property
    def loss_scale(self) -> tuple[float, int] | None:
        """The scale and how many good updates in a row it has seen; None without loss scaling."""

    def dtype(self, role: str) -> str:
        """Number format of a role's arrays, as safetensors calls it: ``F32``, ``BF16``."""

    def read(self, role: str, parameter: Parameter) -> np.ndarray:
        """The array of a role that belongs to a parameter, in canonical shape; bfloat16 comes as float32."""


class Backend(Protocol):
    """One framework, set up for one run."""

    name: str
    """``jax`` or ``torch``."""
    config: Config
    """The run's config, with the microbatch found where it was ``auto``."""
    process: int
    """Number of this process among those that train the run together; only 0 records."""
    asynchronous: bool
    """Whether ``train_step`` returns before the device is done, so that results are better read one step late."""

    def agreed(self, wish: bool) -> bool:
        """Whether any process of the run has the wish; all are told the same."""

    def gathered(self, text: str) -> list[str]:
        """What every process of the run says, in their order; all are told."""

    def describe(self) -> DeviceReport:
        """The devices this run uses."""

    def create_state(self, source: StateSource | None = None) -> State:
        """The state that a source describes; by default the first draws of :mod:`shared.initialization`. Moments that
        it lacks are zero, and an average starts at the parameters."""

    def train_step(self, state: State, batch: Batch) -> tuple[State, Pending[StepMetrics]]:
        """Dispatch one update and return at once. The given state is used up: donated or updated in place."""

    def eval_step(self, state: State, batch: Batch) -> Pending[Sums]:
        """Dispatch the loss of one batch, under the averaged parameters where the recipe keeps an average."""

    def save(self, state: State, directory: Path) -> Callable[[], None]:
        """Start to write the state in the backend's own format into a new directory; return when the state may change
        again. What is returned waits until all is written, and raises what went wrong. Every process takes part."""

    def restore(self, directory: Path) -> State:
        """Read what ``save`` wrote."""

    def export_arrays(self, state: State) -> Iterator[tuple[str, np.ndarray]]:
        """(canonical name, array) of every parameter, one at a time, in host memory."""

    def trace(self, state: State, batch: Batch) -> Iterator[tuple[str, np.ndarray]]:
        """(name, array) of what a step on this batch computes, up to the gradients; see :mod:`shared.trace`. The state
        is left as it is."""

    def observe(self) -> Counter[Operation]:
        """The operations of one training step and their formats, and how often each comes."""


class Decoder(Protocol):
    """A trained model that continues one text, and remembers the keys and values of what it has read."""

    def extend(self, tokens: np.ndarray) -> np.ndarray:
        """Read further tokens (integers [T]); returns the logits of the one that follows, float64 [V]."""


class Framework(Protocol):
    """A backend's package before anything heavy is imported: ``--help`` and wrong configs answer without it."""

    name: str
    """``jax`` or ``torch``."""

    def detect_target(self) -> str:
        """The name in ``targets`` of the accelerator here."""

    def backend(self, config: Config) -> Backend:
        """The backend, set up for that run."""

    def decoder(self, config: Config, source: StateSource, role: str, length: int) -> Decoder:
        """The model with the weights of that role, ready to read texts of up to ``length`` tokens."""

    def stored_state(self, directory: Path) -> StateSource:
        """What the backend's ``save`` wrote into the directory, to be read array by array, on any machine."""
