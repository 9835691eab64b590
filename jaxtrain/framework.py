"""What the commands of this package need of it before anything heavy is imported."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from shared.errors import UserError

if TYPE_CHECKING:
    from shared.backend import Backend, Decoder, StateSource
    from shared.config.schema import Config


class Jax:
    """See :class:`shared.backend.Framework`."""

    name = "jax"

    def detect_target(self) -> str:
        self._import()
        from jaxtrain import devices

        return devices.detect_target()

    def backend(self, config: Config) -> Backend:
        self._import()
        from jaxtrain.backend import JaxBackend

        return JaxBackend(config)

    def decoder(self, config: Config, source: StateSource, role: str, length: int) -> Decoder:
        self._import()
        from jaxtrain.decoder import CachedDecoder

        return CachedDecoder(config, source, role, length)

    def stored_state(self, directory: Path) -> StateSource:
        self._import()
        from jaxtrain.checkpoint import StoredState

        return StoredState(directory)

    def _import(self) -> None:
        from jaxtrain.devices import prefer_existing_platform

        prefer_existing_platform()
        try:
            for package in ("jax", "flax", "optax", "orbax.checkpoint"):
                importlib.import_module(package)
        except ImportError as error:
            raise UserError(f"python -m jaxtrain needs {error.name}: pip install 'jaxtrain[jax]'") from None
