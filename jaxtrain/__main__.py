"""``python -m jaxtrain``."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from shared.command import main
from shared.errors import UserError

if TYPE_CHECKING:
    from shared.backend import Backend
    from shared.config.schema import Config


class Jax:
    """See :class:`shared.command.Framework`."""

    name = "jax"

    def detect_target(self) -> str:
        self._import()
        from jaxtrain import devices

        return devices.detect_target()

    def backend(self, config: Config) -> Backend:
        self._import()
        from jaxtrain.backend import JaxBackend

        return JaxBackend(config)

    def _import(self) -> None:
        from jaxtrain.devices import prefer_existing_platform

        prefer_existing_platform()
        try:
            for package in ("jax", "flax", "optax", "orbax.checkpoint"):
                importlib.import_module(package)
        except ImportError as error:
            raise UserError(f"python -m jaxtrain needs {error.name}: pip install 'jaxtrain[jax]'") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Jax()))
