"""What the commands of this package need of it before anything heavy is imported."""

from __future__ import annotations

import atexit
import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from shared.errors import UserError

if TYPE_CHECKING:
    from shared.backend import Backend, Decoder, StateSource
    from shared.config.schema import Config


class Torch:
    """See :class:`shared.backend.Framework`."""

    name = "torch"

    def detect_target(self) -> str:
        self._import()
        from torchtrain import devices

        return devices.detect_target()

    def backend(self, config: Config) -> Backend:
        self._import()
        from torchtrain import parallel
        from torchtrain.backend import TorchBackend

        parallel.join()
        atexit.register(parallel.leave)
        return TorchBackend(config)

    def decoder(self, config: Config, source: StateSource, role: str, length: int) -> Decoder:
        self._import()
        from torchtrain.decoder import CachedDecoder

        return CachedDecoder(config, source, role, length)

    def stored_state(self, directory: Path) -> StateSource:
        self._import()
        from torchtrain.checkpoint import StoredState

        return StoredState(directory)

    def _import(self) -> None:
        try:
            importlib.import_module("torch")
        except ImportError as error:
            raise UserError(f"python -m torchtrain needs {error.name}: pip install 'jaxtrain[torch]'") from None
