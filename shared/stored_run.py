"""A run that was trained before, as its directory tells: what it was and one of its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.backend import Framework, StateSource
from shared.checkpoint import Checkpoint, Checkpoints
from shared.config.schema import Accumulation, Config, Execution, Offload, Parallel, Remat
from shared.errors import UserError
from shared.models import ModelSpec, model_spec
from shared.run_directory import RunDirectory


@dataclass(frozen=True)
class StoredRun:
    """A run, and the checkpoint of it that was asked for."""

    path: Path
    config: Config
    """As it was trained, but for one device and without what only a training step needs."""
    checkpoint: Checkpoint

    @property
    def spec(self) -> ModelSpec:
        return model_spec(self.config.model)

    def state(self, framework: Framework) -> StateSource:
        """The state in the checkpoint."""
        return framework.stored_state(self.checkpoint.directory)


def evaluated_role(state: StateSource) -> str:
    """The weights that evaluations use: the average where the recipe keeps one."""
    return "average" if "average" in state.roles else "parameters"


def open_stored_run(path: Path, step: int | None, framework: Framework) -> StoredRun:
    """The run in a directory, with the checkpoint of that step or the newest, found whole in every byte.

    Raises UserError where there is none, and for a run of the other backend.
    """
    directory = RunDirectory(path)
    run = directory.read_run()
    if run["backend"] != framework.name:
        raise UserError(
            f"{path} holds a run of {run['backend']}train, and this is {framework.name}train; use the same command of "
            f"{run['backend']}train"
        )
    config = Config.model_validate(run["config"])
    anywhere = {
        "accumulation": Accumulation(),
        "parallel": Parallel(),
        "offload": Offload(),
        "execution": Execution(),
        "remat": Remat(policy="none"),
    }
    checkpoint = Checkpoints(directory.checkpoints, config.checkpoint).at(step)
    return StoredRun(path, config.model_copy(update=anywhere), checkpoint)
