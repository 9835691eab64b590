"""The data pipeline: documents to tokens to rows to batches.

sources -> tokenizers -> preparation -> cache -> rows, in the order of order -> dataset -> loader
"""

from shared.data.dataset import Data, open_data
from shared.data.loader import Loader

__all__ = ["Data", "Loader", "open_data"]
