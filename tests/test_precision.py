"""The dtypes that really run are the policy's, in both backends."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from shared.errors import UserError
from shared.policies.precision import precision_policy, refusal
from tests import backends
from tests.recipes import ADAMW, random_batch, recipe

COMPUTE = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}
PRESETS = pytest.mark.parametrize("precision", COMPUTE)


@PRESETS
def test_every_matrix_product_in_jax_has_the_compute_dtype_and_its_exactness(precision: str) -> None:
    """Without an explicit precision a float32 product would be one bfloat16 pass on a TPU and TF32 on an A100."""
    config = recipe(precision=precision)
    with backends.make("jax", config) as backend:
        state = backend.create_state()
        text = backend.step.lower(state, backend.place(random_batch(config)), backend.rates).as_text()
    products = re.findall(r"stablehlo\.dot_general.*", text)
    assert len(products) > 20
    for product in products:
        operands = re.search(r": \(tensor<(?:\d+x)*(\w+)>, tensor<(?:\d+x)*(\w+)>\)", product)
        assert operands is not None
        assert set(operands.groups()) == {COMPUTE[precision]}, product
        assert ("[HIGHEST, HIGHEST]" in product) == (precision in ("float32", "float64")), product


@PRESETS
def test_every_matrix_product_in_torch_has_the_compute_dtype_and_the_islands_theirs(precision: str) -> None:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[str, set[torch.dtype]] = {}

        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            dtypes = {x.dtype for x in arguments if isinstance(x, torch.Tensor) and x.is_floating_point()}
            self.seen.setdefault(function.overloadpacket.__name__, set()).update(dtypes)
            return function(*arguments, **(keywords or {}))

    config = recipe(precision=precision)
    with backends.make("torch", config) as backend, Recorder() as recorder:
        backend.train_step(backend.create_state(), random_batch(config))
    compute, islands = backend.dtypes.compute, backend.dtypes.islands
    products = {name: dtypes for name, dtypes in recorder.seen.items() if name in ("mm", "bmm", "addmm")}
    assert products and all(dtypes == {compute} for dtypes in products.values()), products
    assert recorder.seen["_log_softmax"] == {islands}
    assert recorder.seen["rsqrt"] == {islands}


@PRESETS
@pytest.mark.parametrize("name", backends.BACKENDS)
def test_parameters_moments_and_average_are_float32_or_better(name: str, precision: str) -> None:
    """A second moment in bfloat16 would stay where it is: 0.999 rounds to 1."""
    expected = "float64" if precision == "float64" else "float32"
    config = recipe(precision=precision, optimizer=ADAMW | {"ema_decay": 0.9})
    with backends.make(name, config) as backend:
        state, _ = backends.steps(backend, [random_batch(config)])
        if name == "jax":
            import jax

            leaves = [x for x in jax.tree.leaves((state.parameters, state.optimizer, state.average)) if x.ndim]
        else:
            moments = [m for moments in state.optimizer.moments.values() for m in moments.values() if m.ndim]
            assert len(moments) == 2 * len(state.parameters())
            leaves = [*state.parameters(), *moments, *state.average.values()]
        assert {str(leaf.dtype).removeprefix("torch.") for leaf in leaves} == {expected}


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_each_backends_rounding_error_is_at_most_three_times_the_others(precision: str) -> None:
    """Two half-precision gradients cannot agree better than their rounding; each is held to the float32 one."""
    config = recipe()
    batch = random_batch(config, ragged=True)
    with backends.make("torch", config) as backend:
        _, exact = backends.loss_and_gradients(backend, batch)
    errors = {}
    for name in backends.BACKENDS:
        with backends.make(name, recipe(precision=precision)) as backend:
            _, found = backends.loss_and_gradients(backend, batch)
        errors[name] = {key: np.linalg.norm(found[key] - exact[key]) / np.linalg.norm(exact[key]) for key in exact}
    typical = {name: float(np.median(list(error.values()))) for name, error in errors.items()}
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[precision]
    assert all(0.1 * unit < value < 10 * unit for value in typical.values()), typical
    assert max(typical.values()) <= 3 * min(typical.values()), typical


def test_float64_puts_jax_in_64_bits() -> None:
    config = recipe(precision="float64")
    with backends.make("jax", config) as backend:
        state, metrics = backends.steps(backend, [random_batch(config)])
        assert {str(value.dtype) for value in state.parameters.values()} == {"float64"}
        assert metrics[0].learning_rate == config.schedule.learning_rate, "a rate rounded to float32 would differ"


@pytest.mark.parametrize(
    ("precision", "platform", "capability", "message"),
    [
        ("tf32", "cpu", None, "precision.matmul (tf32): a CPU has no TensorFloat-32; nearest valid: precision=float32"),
        ("tf32", "tpu", None, "precision.matmul (tf32): a TPU has no"),
        ("tf32", "gpu", (7, 5), "precision.matmul (tf32): a GPU of compute capability 7.5 has no"),
        ("tf32", "gpu", (8, 0), None),
        ("float64", "tpu", None, "precision.parameters (float64): a TPU has no float64"),
        ("float64", "gpu", (7, 0), None),
        ("float16", "tpu", None, "precision.compute (float16): a TPU computes in bfloat16"),
        ("float16", "gpu", (7, 5), None),
        ("bfloat16", "gpu", (7, 5), "precision.compute (bfloat16): a GPU of compute capability 7.5 has no bfloat16; "
         "nearest valid: precision=float16"),
        ("bfloat16", "gpu", (8, 0), None),
        ("bfloat16", "tpu", None, None),
        ("bfloat16", "cpu", None, None),
        ({"preset": "float32", "matmul": "bfloat16"}, "cpu", None, "precision.matmul (bfloat16): a CPU has no such"),
        ({"preset": "float32", "matmul": "bfloat16"}, "tpu", None, None),
        ({"preset": "bfloat16", "matmul": "tf32"}, "gpu", (9, 0), "precision.matmul (tf32) says how products of"),
        ({"preset": "float64", "accumulate": "float32"}, "cpu", None, "precision.accumulate (float32) is coarser than"),
        ({"preset": "float32", "accumulate": "bfloat16"}, "cpu", None, "precision.accumulate (bfloat16) is coarser"),
        ({"preset": "float64", "islands": "float32"}, "cpu", None, "precision.islands (float32) is coarser than"),
        ({"preset": "float32", "logits": "bfloat16"}, "cpu", None, "precision.logits (bfloat16) is coarser than"),
        ({"preset": "bfloat16", "logits": "float32"}, "cpu", None, None),
        ({"preset": "float32", "parameters": "float64"}, "cpu", None, "precision.parameters (float64) is rounded to "
         "precision.accumulate (float32)"),
        ({"preset": "float32", "optimizer_state": "float64"}, "cpu", None, "precision.optimizer_state (float64) is"),
        ({"preset": "float32", "logits": "float64"}, "cpu", None, "precision.logits (float64) is rounded to "
         "precision.islands (float32)"),
        ({"preset": "float32", "logits": "float64", "islands": "float64"}, "cpu", None, None),
        ({"preset": "float32", "reduce": "float64"}, "cpu", None, None),
        ({"preset": "float32", "reduce": "float64"}, "tpu", None, "precision.reduce (float64): a TPU has no float64"),
    ],
)  # fmt: skip
def test_a_policy_that_a_device_cannot_honour_is_refused(
    precision: Any, platform: str, capability: tuple[int, int] | None, message: str | None
) -> None:
    found = refusal(precision_policy(recipe(precision=precision).precision), platform, capability)
    assert found is None if message is None else found is not None and found.startswith(message), found
    assert found is None or "nearest valid: " in found


@pytest.mark.parametrize("name", backends.BACKENDS)
def test_both_backends_refuse_at_once(name: str) -> None:
    with pytest.raises(UserError, match=r"precision\.matmul \(tf32\)"), backends.make(name, recipe(precision="tf32")):
        pass


class T4:
    """What JAX tells of a GPU."""

    platform, compute_capability = "gpu", "7.5"


def test_jax_reads_a_gpus_capability() -> None:
    from jaxtrain.precision import require_precision

    device: Any = T4()
    require_precision(precision_policy(recipe(precision="float16").precision), device)
    with pytest.raises(UserError, match=r"compute capability 7\.5 has no bfloat16"):
        require_precision(precision_policy(recipe(precision="bfloat16").precision), device)


def test_torch_refuses_bfloat16_products_of_float32_that_a_gpu_would_do_in_tf32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from torchtrain.devices import require_precision

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gpu = torch.device("cuda")
    require_precision(precision_policy(recipe(precision="tf32").precision), gpu)
    asked = recipe(precision={"preset": "float32", "matmul": "bfloat16"}).precision
    with pytest.raises(UserError, match=r"precision\.matmul \(bfloat16\).*nearest valid: matmul=tf32"):
        require_precision(precision_policy(asked), gpu)
