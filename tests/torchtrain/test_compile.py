"""``execution.torch.compile`` changes the speed and not the result."""

from __future__ import annotations

import pytest

from shared.errors import UserError
from tests import backends
from tests.recipes import random_batch, recipe


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full"])
def test_compiled_blocks_train_as_the_others_do(remat: str) -> None:
    import torch

    losses, graphs = {}, {}
    for compile in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        config = recipe(execution={"torch": {"compile": compile}}, remat=remat)
        batches = [random_batch(config, seed=seed, ragged=True) for seed in range(3)]
        with backends.make("torch", config) as backend:
            state, metrics = backends.steps(backend, batches)
            evaluated = backend.eval_step(state, batches[0]).read().loss
        losses[compile] = [*(step.loss for step in metrics), *(step.grad_norm for step in metrics), evaluated]
        graphs[compile] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs[False] == 0 and graphs[True] >= 1, "the setting must reach the compiler"
    # float32; fused kernels sum in another order.
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)


def test_compiling_for_a_cpu_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    config = recipe(execution={"torch": {"compile": True}})
    with pytest.raises(UserError, match=r"execution\.torch\.compile"), backends.make("torch", config):
        pass
