"""Checkpoints of Hugging Face's libraries in a local folder: ``config.json`` and safetensors.

:mod:`shared.huggingface.settings` translates the model's settings, :mod:`shared.huggingface.pretrained` reads and
writes the weights. Names and layouts need no translation: they are the canonical ones.
"""

from shared.huggingface.pretrained import Pretrained, write_pretrained
from shared.huggingface.settings import model_section, read_settings

__all__ = ["Pretrained", "model_section", "read_settings", "write_pretrained"]
