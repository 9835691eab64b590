"""A training state that either backend continues: canonical names, in safetensors, with a manifest.

One file a role: ``parameters.safetensors``, ``average``, ``first_moment`` and ``second_moment`` (AdamW), ``momentum``
(SGD), each with one tensor for every canonical parameter; a tensor is written and read by itself, so that a model that
fills a host's memory can be moved. ``manifest.json`` has the rest of the state (completed steps and updates, the loss
scale) and what the run is: its recipe and fingerprints. The position in the data needs no more than the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shared.backend import StateSource
from shared.config.recipe import first_difference, recipe_hash, recipe_of
from shared.config.schema import Config
from shared.errors import UserError
from shared.manifest import Damaged, filling, read_manifest, seal, verify
from shared.models import ModelSpec, Parameter
from shared.tensor_file import Entry, TensorFile, write_tensors

KIND = "training state"


def write_handover(directory: Path, source: StateSource, spec: ModelSpec, facts: Mapping[str, Any]) -> None:
    """Write the state of a source, tensor by tensor. ``facts``: the manifest of the checkpoint that it comes from.

    Raises UserError where it cannot be written; nothing is left then.
    """
    with filling(directory) as draft:
        for role in source.roles:
            write_tensors(draft / f"{role}.safetensors", _entries(source, role, spec))
        scale, good_updates = source.loss_scale or (None, None)
        state = {
            "num_updates": source.num_updates,
            "loss_scale": scale,
            "good_updates": good_updates,
            "roles": list(source.roles),
        }
        known = ("backend", "step", "recipe", "recipe_hash", "fingerprints", "init_from")
        seal(draft, {"kind": KIND, **{name: facts[name] for name in known}, "state": state})


def _entries(source: StateSource, role: str, spec: ModelSpec) -> Iterator[Entry]:
    for parameter in spec.parameters:
        yield Entry(parameter.name, parameter.shape, source.dtype(role), partial(source.read, role, parameter))


class HandOver:
    """A state that :func:`write_handover` wrote; a :class:`shared.backend.StateSource`."""

    def __init__(self, directory: Path, config: Config, spec: ModelSpec):
        """Raises UserError for one that is damaged, or that belongs to another recipe."""
        try:
            self.manifest = read_manifest(directory)
            if self.manifest.get("kind") != KIND:
                run = directory.parent.parent
                package = f"{self.manifest['backend']}train"
                raise UserError(
                    f"{directory}: is a checkpoint of {package}; export it first: python -m {package}.export {run} "
                    f"--step {self.manifest['step']} --to DIR"
                )
            verify(directory, self.manifest)
        except Damaged as error:
            raise UserError(f"{directory}: damaged: {error}") from None
        if self.manifest["recipe_hash"] != recipe_hash(config):
            changed = first_difference(self.manifest["recipe"], recipe_of(config))
            raise UserError(
                f"{directory} holds the state of another recipe ({changed}); to begin another run with its weights, "
                "export it with --format huggingface"
            )
        state = self.manifest["state"]
        self.step: int = self.manifest["step"]
        self.roles: list[str] = state["roles"]
        self.num_updates: int = state["num_updates"]
        self.loss_scale = None if state["loss_scale"] is None else (state["loss_scale"], state["good_updates"])
        self._files = {role: TensorFile(directory / f"{role}.safetensors") for role in self.roles}
        for role, parameter in ((role, parameter) for role in self.roles for parameter in spec.parameters):
            assert self._files[role].shape(parameter.name) == parameter.shape, (role, parameter.name)

    def dtype(self, role: str) -> str:
        return self._files[role].dtype(self._files[role].names[0])

    def read(self, role: str, parameter: Parameter) -> np.ndarray:
        return self._files[role].read(parameter.name)
