"""``python -m torchtrain``."""

from __future__ import annotations

import atexit
import importlib
import sys
from typing import TYPE_CHECKING

from shared.command import main
from shared.errors import UserError

if TYPE_CHECKING:
    from shared.backend import Backend
    from shared.config.schema import Config


class Torch:
    """See :class:`shared.command.Framework`."""

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

    def _import(self) -> None:
        try:
            importlib.import_module("torch")
        except ImportError as error:
            raise UserError(f"python -m torchtrain needs {error.name}: pip install 'jaxtrain[torch]'") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Torch()))
