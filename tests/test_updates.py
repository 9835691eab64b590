"""The update: AdamW, SGD, clipping, decay, averaging and loss scaling, by hand in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shared.batch import Batch
from shared.config.schema import AdamW, Config, LossScale
from shared.initialization import initial_value
from shared.models import model_spec
from shared.schedule import learning_rates
from tests import backends
from tests.recipes import ADAMW, SGD, random_batch, recipe


def parameters_after(name: str, config: Config, batches: list[Batch]) -> tuple[dict[str, np.ndarray], Any, list[Any]]:
    with backends.make(name, config) as backend:
        state, metrics = backends.steps(backend, batches)
        return {k: v.copy() for k, v in backend.export_arrays(state)}, state, metrics


Rounding = Callable[[np.ndarray], np.ndarray]


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def gradient_at(config: Config, parameters: dict[str, np.ndarray], batch: Batch) -> dict[str, np.ndarray]:
    """Gradients from torch's autograd (held to those of transformers elsewhere)."""
    from torchtrain.weights import export_parameters, import_parameters

    with backends.make("torch", config) as backend:
        state = backend.create_state()
        import_parameters(backend.spec, lambda p: parameters[p.name], dict(state.model.named_parameters()))
        backend.gradients(state.model, backend.place(batch))
        found = {name: p.grad for name, p in state.model.named_parameters()}
        return {k: v.copy() for k, v in export_parameters(backend.spec, found)}


def by_hand(
    config: Config, batches: list[Batch], kept: Rounding = lambda x: x, stored: Rounding = lambda x: x
) -> tuple[dict[str, np.ndarray], list[float]]:
    """(parameters after the batches, gradient norms before clipping), as shared.optimizer states the rules; moments are
    rounded by ``kept``, parameters and so their gradients by ``stored``."""
    optimizer, spec = config.optimizer, model_spec(config.model)
    p = {x.name: stored(initial_value(x, config.seed).astype(np.float64)) for x in spec.parameters}
    decay = {x.name: optimizer.weight_decay if len(x.shape) > 1 else 0.0 for x in spec.parameters}
    m = {name: np.zeros_like(x) for name, x in p.items()}
    v = {name: np.zeros_like(x) for name, x in p.items()}
    norms = []
    for t, batch in enumerate(batches, start=1):
        rate = learning_rates(config.schedule)[t - 1]
        g = {name: stored(x) for name, x in gradient_at(config, p, batch).items()}
        norms.append(float(np.sqrt(sum(np.sum(x**2) for x in g.values()))))
        if optimizer.clip_norm is not None:
            g = {name: x * min(1.0, optimizer.clip_norm / (norms[-1] + 1e-6)) for name, x in g.items()}
        for name in p:
            if isinstance(optimizer, AdamW):
                m[name] = optimizer.beta1 * m[name] + (1 - optimizer.beta1) * g[name]
                v[name] = optimizer.beta2 * v[name] + (1 - optimizer.beta2) * g[name] ** 2
                m_hat, v_hat = m[name] / (1 - optimizer.beta1**t), v[name] / (1 - optimizer.beta2**t)
                p[name] = p[name] - rate * (m_hat / (np.sqrt(v_hat) + optimizer.eps) + decay[name] * p[name])
            else:
                d = g[name] + decay[name] * p[name]
                m[name] = optimizer.momentum * m[name] + d
                p[name] = p[name] - rate * (d + optimizer.momentum * m[name] if optimizer.nesterov else m[name])
            m[name], v[name], p[name] = kept(m[name]), kept(v[name]), stored(p[name])
    return p, norms


@pytest.mark.parametrize(
    "optimizer",
    [
        ADAMW,
        ADAMW | {"eps": 1e-2, "clip_norm": None, "beta2": 0.999},
        SGD,
        SGD | {"nesterov": True, "clip_norm": 0.05},
        SGD | {"momentum": 0.0, "clip_norm": None},
    ],
    ids=["adamw", "adamw-eps", "sgd", "nesterov", "sgd-plain"],
)
@pytest.mark.parametrize("name", backends.BACKENDS)
def test_three_updates_are_those_computed_by_hand(name: str, optimizer: dict[str, Any]) -> None:
    schedule = {"name": "cosine", "steps": 4, "learning_rate": 0.05, "warmup_steps": 2, "final_learning_rate": 0.01}
    config = recipe(precision="float64", optimizer=optimizer, schedule=schedule)
    batches = [random_batch(config, seed=seed, ragged=True) for seed in range(3)]
    expected, norms = by_hand(config, batches)
    found, _, metrics = parameters_after(name, config, batches)
    for key, value in expected.items():
        # float64: some rounding a step, but a beta or bias correction in float32 would show as 1e-7 or more.
        np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-13, err_msg=key)
    assert [x.grad_norm for x in metrics] == pytest.approx(norms, rel=1e-12)
    assert [x.learning_rate for x in metrics] == list(learning_rates(config.schedule)[:3])
    assert [x.num_updates for x in metrics] == [1, 2, 3]


@pytest.mark.parametrize("optimizer", [ADAMW, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("role", ["optimizer_state", "parameters"])
@pytest.mark.parametrize("name", backends.BACKENDS)
def test_what_is_kept_in_bfloat16_is_rounded_once_an_update(name: str, role: str, optimizer: dict[str, Any]) -> None:
    """Arithmetic in float64, storage in bfloat16: equal to the last bit, but where two roundings meet in the middle."""
    exact = recipe(precision="float64", optimizer=optimizer)
    config = recipe(precision={"preset": "float64", role: "bfloat16"}, optimizer=optimizer)
    batches = [random_batch(config, seed=seed) for seed in range(3)]
    rounded = {"optimizer_state": {"kept": to_bfloat16}, "parameters": {"stored": to_bfloat16}}[role]
    expected, _ = by_hand(exact, batches, **rounded)
    plain, _ = by_hand(exact, batches)
    found, _, _ = parameters_after(name, config, batches)
    for key, value in expected.items():
        # A sum of other order may round to the other neighbour: one part in 256 of a moment, or of a parameter.
        error = np.abs(np.asarray(found[key], np.float64) - value)
        # The rows of a table that is itself in bfloat16 are added up in bfloat16, token by token.
        assert np.mean(error < 1e-12) > (0.9 if "embed" in key else 0.97), key
    changed = [key for key in plain if np.max(np.abs(plain[key] - expected[key])) > 1e-6]
    assert len(changed) > len(plain) / 2, "and rounding matters"


@pytest.mark.parametrize("name", backends.BACKENDS)
def test_the_average_starts_at_the_parameters_and_follows_them(name: str) -> None:
    decay = 0.75
    config = recipe(precision="float64", optimizer=ADAMW | {"ema_decay": decay})
    batches = [random_batch(config, seed=seed) for seed in range(3)]
    trajectory = [parameters_after(name, config, batches[:n])[0] for n in range(4)]
    expected = trajectory[0]
    for after in trajectory[1:]:
        expected = {key: decay * expected[key] + (1 - decay) * after[key] for key in expected}
    with backends.make(name, config) as backend:
        state, _ = backends.steps(backend, batches)
        found = dict(average_arrays(backend, state))
        averaged = backend.eval_step(state, batches[0]).read().loss
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-14, err_msg=key)
    with backends.make(name, recipe(precision="float64")) as backend:
        state, _ = backends.steps(backend, batches)
        assert backend.eval_step(state, batches[0]).read().loss != averaged, "evaluation must use the average"


def average_arrays(backend: Any, state: Any) -> Any:
    if backend.name == "jax":
        from jaxtrain.weights import export_slots

        return export_slots(backend.spec, state.average)
    from torchtrain.weights import export_parameters

    return export_parameters(backend.spec, state.average)


@pytest.mark.parametrize("name", backends.BACKENDS)
def test_loss_scales_and_skips_follow_the_rule_and_change_nothing_else(name: str) -> None:
    """A scale that starts far too high overflows, is halved until it fits, grows again and overflows again."""
    rule = LossScale(initial=2.0**40, growth_interval=3)
    precision = {"preset": "float16", "loss_scale": rule.model_dump()}
    config = recipe(precision=precision, optimizer=ADAMW | {"ema_decay": 0.5})
    batch = random_batch(config)
    with backends.make(name, config) as backend:
        state, trace, before = backend.create_state(), [], None
        for _ in range(45):
            state, pending = backend.train_step(state, batch)
            metrics = pending.read()
            after = {k: v.copy() for k, v in backend.export_arrays(state)}
            after |= {f"average.{k}": v.copy() for k, v in average_arrays(backend, state)}
            if metrics.skipped and before is not None:
                assert all(np.array_equal(before[k], after[k]) for k in after), "a skipped step changes nothing"
            before = after
            trace.append(metrics)
    skipped = [metrics.skipped for metrics in trace]
    assert 5 < sum(skipped) < 40, "the pattern must hold both kinds of steps"
    assert any(skipped[first_good:] for first_good in [skipped.index(False)]), "and an overflow after good steps"

    scale, good, updates = rule.initial, 0, 0
    for step, metrics in enumerate(trace):
        assert metrics.loss_scale == scale, f"step {step}"
        if metrics.skipped:
            scale, good = scale * rule.backoff, 0
        else:
            updates, good = updates + 1, good + 1
            if good == rule.growth_interval:
                scale, good = scale * rule.growth, 0
        assert metrics.num_updates == updates


def test_both_backends_give_the_same_trace_of_scales_for_the_same_overflows() -> None:
    config = recipe(precision=SCALED, optimizer=ADAMW)
    overflows = {0, 1, 6, 11, 12}
    traces = {}
    for name in backends.BACKENDS:
        with backends.make(name, config) as backend:
            state, trace = backend.create_state(), []
            for step in range(16):
                value = np.inf if step in overflows else 0.1
                state, pending = backend.train_step(poisoned(backend, state, value), random_batch(config, seed=step))
                metrics = pending.read()
                trace.append((metrics.loss_scale, metrics.skipped, metrics.num_updates))
            traces[name] = trace
    assert [skipped for _, skipped, _ in traces["jax"]] == [step in overflows for step in range(16)]
    assert traces["jax"] == traces["torch"]
    scales = [scale for scale, _, _ in traces["jax"]]
    # Halved after steps 0 and 1, doubled after the good steps 2 to 4, halved after 6, and so on.
    assert scales[:8] == [2.0**10, 2.0**9, 2.0**8, 2.0**8, 2.0**8, 2.0**9, 2.0**9, 2.0**8]


SCALED = {"preset": "float16", "loss_scale": {"initial": 2.0**10, "growth_interval": 3}}


@pytest.mark.parametrize("name", backends.BACKENDS)
def test_a_resumed_run_goes_on_with_the_loss_scale_that_it_had(name: str, tmp_path: Path) -> None:
    config = recipe(precision=SCALED, optimizer=ADAMW)
    batches = [random_batch(config, seed=seed) for seed in range(9)]
    with backends.make(name, config) as backend:
        straight, resumed = backends.straight_and_resumed(backend, batches, 4, tmp_path)
    assert resumed == straight
    assert len({metrics.loss_scale for metrics in straight}) > 1, "the scale must move"


@pytest.mark.parametrize("name", backends.BACKENDS)
@pytest.mark.parametrize("precision_name", ["float32", "float64", "bfloat16"])
def test_a_gradient_that_is_not_finite_never_reaches_the_parameters(name: str, precision_name: str) -> None:
    """Without loss scaling too: the trainer then stops, with the state still good."""
    config = recipe(precision=precision_name, optimizer=SGD | {"clip_norm": None})
    batch = random_batch(config)
    with backends.make(name, config) as backend:
        state = poisoned(backend, backend.create_state())
        before = {k: v.copy() for k, v in backend.export_arrays(state)}
        state, pending = backend.train_step(state, batch)
        metrics = pending.read()
        assert metrics.skipped and metrics.num_updates == 0 and not np.isfinite(metrics.grad_norm)
        for key, value in backend.export_arrays(state):
            np.testing.assert_array_equal(value, before[key])


def poisoned(backend: Any, state: Any, value: float = np.inf) -> Any:
    """The state with one weight of the output head set."""
    if backend.name == "torch":
        state.model.head.weight.data[0, 0] = value
        return state
    import dataclasses

    kernel = state.parameters["head.kernel"].at[0, 0].set(value)
    return dataclasses.replace(state, parameters=state.parameters | {"head.kernel": kernel})
