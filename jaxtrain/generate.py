"""``python -m jaxtrain.generate``."""

from __future__ import annotations

import sys

from jaxtrain.framework import Jax
from shared.generate import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Jax()))
