"""A training step never asks the device for a number: on a GPU that would stop the pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from tests import backends
from tests.recipes import ADAMW, LLAMA, SGD, random_batch, recipe


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("optimizer", [ADAMW | {"ema_decay": 0.9}, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize(
    ("dropout", "vocab_chunk"), [(0.0, None), (0.3, 10)], ids=["plain", "dropout and a loss in chunks"]
)
def test_a_step_reads_nothing_back(
    precision: str, optimizer: dict[str, Any], dropout: float, vocab_chunk: int | None
) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        """``item()``, ``bool()`` and indexing by a 0-d tensor all end in this operation."""

        reads = 0

        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            self.reads += function.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero")
            return function(*arguments, **(keywords or {}))

    sections = {"model": LLAMA | {"dropout": dropout}, "execution": {"vocab_chunk": vocab_chunk}}
    config = recipe(precision=precision, optimizer=optimizer, accumulation={"microbatch": 2}, **sections)
    batch = random_batch(config, segments=True)
    with backends.make("torch", config) as backend:
        state = backend.create_state()
        with Recorder() as recorder:
            state, pending = backend.train_step(state, batch)
            assert recorder.reads == 0
            pending.read()
        assert recorder.reads > 0, "reading the metrics is what waits"
