"""Several processes of PyTorch that train together, kept alive for many requests of a test."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from shared.batch import Batch

Answer = tuple[float, dict[str, np.ndarray], list[tuple[str, int]]]
"""(mean loss, gradient by canonical name, (dtype, elements) of each all-reduce)."""

PATIENCE = 120
"""Seconds for an answer, after which the processes are taken to hang."""


class Processes:
    """A process group with gloo; every process answers each request."""

    def __init__(self, connections: list[Connection]):
        self._connections = connections

    def loss_and_gradients(self, config: dict[str, Any], batch: Batch) -> list[Answer]:
        """What each process finds at the initial weights for its share of the batch, of which all get the sums."""
        for connection in self._connections:
            connection.send((config, batch))
        answers = []
        for connection in self._connections:
            assert connection.poll(PATIENCE), "a process does not answer"
            answer = connection.recv()
            assert not isinstance(answer, str), answer
            answers.append(answer)
        return answers


@contextlib.contextmanager
def processes(count: int) -> Iterator[Processes]:
    """That many processes, which end with the context, however it ends."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(count)]
        store = str(Path(folder) / "store")
        started = [
            context.Process(target=_serve, args=(rank, count, store, pipes[rank][1]), daemon=True)
            for rank in range(count)
        ]
        for process in started:
            process.start()
        try:
            yield Processes([ours for ours, _ in pipes])
        finally:
            for ours, _ in pipes:
                with contextlib.suppress(OSError):
                    ours.send(None)
            for process in started:
                process.join(10)
                process.kill()


def _serve(rank: int, count: int, store: str, connection: Connection) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    from shared.config.schema import Config
    from tests.backends import loss_and_gradients
    from torchtrain.backend import TorchBackend

    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=patience)
    calls: list[tuple[str, int]] = []
    plain = dist.all_reduce

    def counted(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        calls.append((str(tensor.dtype).removeprefix("torch."), tensor.numel()))
        return plain(tensor, *arguments, **options)

    dist.all_reduce = counted
    made: dict[str, TorchBackend] = {}
    while (request := connection.recv()) is not None:
        config, batch = request
        try:
            key = json.dumps(config, sort_keys=True)
            backend = made.setdefault(key, TorchBackend(Config.model_validate(config)))
            calls.clear()
            loss, gradients = loss_and_gradients(backend, batch)
            connection.send((loss, gradients, list(calls)))
        except Exception as error:
            connection.send(repr(error))
    dist.destroy_process_group()
