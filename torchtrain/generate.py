"""``python -m torchtrain.generate``."""

from __future__ import annotations

import sys

from shared.generate import main
from torchtrain.framework import Torch

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Torch()))
