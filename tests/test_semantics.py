"""Rules of docs/semantics.md that no other test holds: what the two frameworks would each do otherwise."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.batch import Batch
from shared.config.schema import LossScale
from shared.schedule import learning_rates
from tests import backends, test_attention
from tests.recipes import ADAMW, GPT2, LLAMA, SGD, random_batch, recipe
from tests.shared.test_trainer import FakeBackend, trainer
from tests.test_updates import parameters_after, poisoned

BOTH = pytest.mark.parametrize("name", backends.BACKENDS)


# ---------------------------------------------------------------------------------------------------------- optimiser


@BOTH
def test_a_tied_table_is_decayed_once_and_a_vector_never(name: str) -> None:
    """Without a valid token the gradient is zero, so all that an update does is decay."""
    config = recipe(model=GPT2, precision="float64", optimizer=ADAMW | {"weight_decay": 0.5})
    before = parameters_after(name, config, [])[0]
    after, _, (metrics,) = parameters_after(name, config, [without_targets(random_batch(config))])
    shrunk = 1 - config.schedule.learning_rate * config.optimizer.weight_decay
    assert before.keys() == after.keys() and "transformer.wte.weight" in before and "lm_head.weight" not in before
    for key, value in before.items():
        # One multiplication in float64, written in two ways.
        np.testing.assert_allclose(after[key], value * shrunk if value.ndim > 1 else value, rtol=1e-14, err_msg=key)
    assert metrics.grad_norm == 0.0


@BOTH
def test_an_update_beyond_the_table_uses_its_last_rate(name: str) -> None:
    schedule = {"name": "wsd", "steps": 2, "learning_rate": 1e-2, "warmup_steps": 0}
    config = recipe(precision="float64", schedule=schedule | {"decay_steps": 2, "final_learning_rate": 1e-3})
    first, last = learning_rates(config.schedule)
    _, _, metrics = parameters_after(name, config, [random_batch(config)] * 4)
    assert [step.learning_rate for step in metrics] == [first, last, last, last] and first != last


@BOTH
def test_the_norm_of_a_bfloat16_run_is_taken_in_float32(name: str) -> None:
    config = recipe(precision="bfloat16", optimizer=SGD)
    batch = random_batch(config)
    with backends.make(name, config) as backend:
        _, gradients = backends.loss_and_gradients(backend, batch)
        _, (metrics,) = backends.steps(backend, [batch])
    exact = math.sqrt(sum(float(np.sum(np.square(value, dtype=np.float64))) for value in gradients.values()))
    # float32 sums err by 1e-6 or so; a bfloat16 norm by up to 4e-3.
    assert metrics.grad_norm == pytest.approx(exact, rel=2e-5)


# ----------------------------------------------------------------------------------------------- loss and accumulation


@BOTH
def test_a_bfloat16_run_adds_its_microbatches_in_float32(name: str) -> None:
    """A sum that had been rounded to bfloat16 would have 16 zero bits at its end."""
    config = recipe(precision="bfloat16", accumulation={"microbatch": 1})
    with backends.make(name, config) as backend:
        _, gradients = backends.loss_and_gradients(backend, random_batch(config))
    for key in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"):
        assert gradients[key].dtype == np.float32
        # One sum in 16 is representable by chance, more where the parts are alike.
        assert np.mean(gradients[key].view(np.uint32) & 0xFFFF == 0) < 0.5, key


@BOTH
@pytest.mark.parametrize("microbatch", [None, 2])
def test_an_evaluation_batch_adds_its_loss_sum_and_its_token_count(name: str, microbatch: int | None) -> None:
    config = recipe(accumulation={"microbatch": microbatch})
    batch = random_batch(config, ragged=True)
    with backends.make(name, config) as backend:
        logits = backends.logits(backend, batch).astype(np.float64)
        found = backend.eval_step(backend.create_state(), batch).read()
    assert found.tokens == batch.mask.sum()
    # float32 sums over about a hundred tokens.
    assert found.loss == pytest.approx(cross_entropy(logits, batch), rel=1e-5)


@BOTH
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_batch_without_a_valid_token_is_a_step_like_any_other(name: str, precision: str) -> None:
    config = recipe(precision=precision, optimizer=ADAMW | {"weight_decay": 0.0})
    before = parameters_after(name, config, [])[0]
    after, _, (metrics,) = parameters_after(name, config, [without_targets(random_batch(config))])
    assert (metrics.loss, metrics.grad_norm, metrics.tokens) == (0.0, 0.0, 0)
    assert metrics.num_updates == 1 and not metrics.skipped
    assert all(np.array_equal(after[key], before[key]) for key in before)


# ---------------------------------------------------------------------------------------- gradients that are not finite


@BOTH
@pytest.mark.parametrize("optimizer", [ADAMW, SGD, SGD | {"nesterov": True}], ids=["adamw", "sgd", "nesterov"])
@pytest.mark.parametrize("skipped", [0, 2])
def test_a_skipped_update_leaves_no_trace(name: str, optimizer: dict[str, Any], skipped: int) -> None:
    """No rate, moment, bias correction or average moves: the run goes on as if the step had not been."""
    schedule = {"name": "cosine", "steps": 8, "learning_rate": 1e-2, "warmup_steps": 3, "final_learning_rate": 0.0}
    config = recipe(optimizer=optimizer | {"ema_decay": 0.5}, schedule=schedule, accumulation={"microbatch": 2})
    batches = [random_batch(config, seed=seed) for seed in range(4)]
    expected, straight, metrics = parameters_after(name, config, batches)
    with backends.make(name, config) as backend:
        state, trace = backend.create_state(), []
        for step, batch in enumerate(batches):
            if step == skipped:
                healthy = head_weight(backend, state)
                state, pending = backend.train_step(poisoned(backend, state), batch)
                assert pending.read().skipped
                state = poisoned(backend, state, healthy)
            state, pending = backend.train_step(state, batch)
            trace.append(pending.read())
        found = {key: value.copy() for key, value in backend.export_arrays(state)}
    assert trace == metrics
    assert all(np.array_equal(found[key], expected[key]) for key in expected)
    for own, other in zip(averages(name, state), averages(name, straight), strict=True):
        assert np.array_equal(own, other)


@BOTH
def test_gradients_are_unscaled_once_and_then_clipped(name: str) -> None:
    """Plain SGD moves by rate x clip_norm when it clips, whatever the loss scale."""
    optimizer = {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0, "clip_norm": 0.05}
    exact = recipe(optimizer=optimizer)
    config = recipe(optimizer=optimizer, precision="float16", accumulation={"microbatch": 2})
    batch = random_batch(exact)
    _, _, (reference,) = parameters_after("torch", exact, [batch])
    before = parameters_after(name, config, [])[0]
    after, _, (metrics,) = parameters_after(name, config, [batch])
    assert not metrics.skipped and metrics.loss_scale == LossScale().initial and reference.grad_norm > 0.1
    # float16 rounds to 5e-4, and errors of many elements average out.
    assert metrics.grad_norm == pytest.approx(reference.grad_norm, rel=1e-2)
    assert metrics.loss == pytest.approx(reference.loss, rel=1e-2)
    moved = math.sqrt(sum(float(np.sum((after[key] - before[key]).astype(np.float64) ** 2)) for key in before))
    # The differences of float32 weights keep four digits of so small a step.
    assert moved == pytest.approx(config.schedule.learning_rate * 0.05, rel=1e-3)


def test_loss_scaling_is_that_of_pytorchs_grad_scaler() -> None:
    import torch

    scaler, rule = torch.amp.GradScaler("cpu"), LossScale()
    theirs = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    assert (rule.growth, rule.backoff, rule.growth_interval) == theirs
    assert rule.initial == scaler._init_scale


@BOTH
def test_the_scale_moves_as_pytorchs_own_kernel_moves_it(name: str) -> None:
    import torch

    rule = LossScale(initial=2.0**10, growth_interval=3)
    finite = np.random.default_rng(0).random(200) < 0.8
    scale, tracker = torch.tensor(rule.initial), torch.tensor(0, dtype=torch.int32)
    ours = scales(name, rule, finite)
    for step, good in enumerate(finite):
        overflow = torch.tensor(0.0 if good else 1.0)
        torch._amp_update_scale_(scale, tracker, overflow, rule.growth, rule.backoff, rule.growth_interval)
        assert ours[step] == scale.item(), f"step {step}"
    assert len(set(ours)) > 5


# -------------------------------------------------------------------------------------------------------------- layers


@BOTH
def test_rotary_angles_are_exact_at_far_positions_in_a_bfloat16_run(name: str) -> None:
    """Angles in bfloat16 would err by up to 4 radians at position 2,047."""
    length, size, theta = 2048, LLAMA["head_dim"], LLAMA["rope_theta"]
    config = recipe(precision="bfloat16", batch={"global_batch": 1, "sequence_length": length})
    with backends.make(name, config) as backend:
        if name == "jax":
            from jaxtrain.models.transformer import Rotation

            rotation = Rotation.of(backend.spec, length, None, backend.dtypes.islands)
            assert rotation is not None
            cos, sin = np.asarray(rotation.cos_BTD[0]), np.asarray(rotation.sin_BTD[0])
        else:
            model = backend.create_state().model
            cos, sin = model.cos.numpy(), model.sin.numpy()
    assert cos.dtype == sin.dtype == np.float32
    for position in (1, 777, 2047):
        angles = [position * theta ** (-2 * i / size) for i in range(size // 2)]
        # Half a unit in the last place of float32.
        np.testing.assert_allclose(cos[position], [math.cos(a) for a in angles], atol=6e-8, rtol=0)
        np.testing.assert_allclose(sin[position], [math.sin(a) for a in angles], atol=6e-8, rtol=0)


@pytest.mark.parametrize(
    "implementation",
    [
        test_attention.jax_reference,
        test_attention.jax_splash,
        test_attention.torch_reference,
        test_attention.torch_fused,
    ],
)
def test_a_document_of_one_token_sees_itself(implementation: Callable[..., np.ndarray]) -> None:
    """So no row of the scores is masked as a whole, where the frameworks would give the mean of v, or 0, or NaN."""
    q, k, v = test_attention.inputs()
    alone = np.arange(q.shape[1], dtype=np.int32)[None].repeat(len(q), axis=0)
    found = implementation(q, k, v, alone)
    assert np.array_equal(found, v.repeat(q.shape[2] // v.shape[2], axis=2))


# ----------------------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_softmax_norms_and_loss_are_float32_islands_in_jax(precision: str) -> None:
    config = recipe(model=GPT2, precision=precision)  # Llama's SiLU has an exponential of its own
    with backends.make("jax", config) as backend:
        lowered = backend.step.lower(backend.create_state(), backend.place(random_batch(config)), backend.rates)
    text = lowered.as_text()
    for island in ("rsqrt", "exponential", "log"):
        found = set(re.findall(rf"stablehlo\.{island} .*tensor<(?:\d+x)*(\w+)>", text))
        assert found == {"f32"}, f"{island}: {found}"


def test_softmax_is_a_float32_island_in_torchs_reference_attention() -> None:
    import torch

    from torchtrain.attention import reference_attention

    rng = np.random.default_rng(0)
    q, k, v = (torch.tensor(20 * rng.standard_normal((1, 64, 2, 8)), dtype=torch.bfloat16) for _ in range(3))
    found = reference_attention(q, k, v, None, islands=torch.float32)
    exact = reference_attention(q.double(), k.double(), v.double(), None, islands=torch.float64)
    assert found.dtype == torch.bfloat16
    # Scores reach the hundreds, where bfloat16 steps by 2: a softmax of rounded scores is wrong in its first digit.
    assert ((found.double() - exact).norm() / exact.norm()).item() < 2**-7


def test_torchs_silent_shortcuts_are_switched_off() -> None:
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    torch.set_float32_matmul_precision("medium")
    cudnn.allow_tf32 = True
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = True
    with backends.make("torch", recipe()):
        assert torch.get_float32_matmul_precision() == "highest" and not matmul.allow_tf32 and not cudnn.allow_tf32
        assert not matmul.allow_bf16_reduced_precision_reduction
        assert not matmul.allow_fp16_reduced_precision_reduction


def test_jax_takes_up_float64_even_after_work_in_float32() -> None:
    with backends.make("jax", recipe()) as backend:
        backends.steps(backend, [random_batch(recipe())])
    config = recipe(precision="float64")
    with backends.make("jax", config) as backend:
        state, (metrics,) = backends.steps(backend, [random_batch(config)])
        assert {str(value.dtype) for value in state.parameters.values()} == {"float64"}
    assert metrics.learning_rate == config.schedule.learning_rate, "a rate rounded to float32 would differ"


# ---------------------------------------------------------------------------------------------------- reported numbers


def test_start_up_is_reported_apart(tmp_path: Path) -> None:
    run = trainer(tmp_path, FakeBackend(asynchronous=True), logging={"every": 1})
    outcome = run.train(*run.start(), 10)
    first, *others = run.recorder.records
    assert outcome.startup_seconds == pytest.approx(first["seconds"], abs=1e-3)
    assert first["tokens_per_s"] is None and all(record["tokens_per_s"] for record in others)
    assert outcome.summary()["startup_seconds"] == outcome.startup_seconds


# ------------------------------------------------------------------------------------------------------------- by hand


def without_targets(batch: Batch) -> Batch:
    return dataclasses.replace(batch, targets=np.zeros_like(batch.targets), mask=np.zeros_like(batch.mask))


def cross_entropy(logits: np.ndarray, batch: Batch) -> float:
    """Sum over the valid tokens, in float64."""
    largest = logits.max(axis=-1, keepdims=True)
    log_sum = np.log(np.exp(logits - largest).sum(axis=-1)) + largest[..., 0]
    chosen = np.take_along_axis(logits, batch.targets[..., None], axis=-1)[..., 0]
    return float((log_sum - chosen)[batch.mask].sum())


def head_weight(backend: Any, state: Any) -> float:
    """The weight that :func:`tests.test_updates.poisoned` sets."""
    if backend.name == "torch":
        return state.model.head.weight[0, 0].item()
    return float(state.parameters["head.kernel"][0, 0])


def averages(name: str, state: Any) -> list[np.ndarray]:
    return [np.asarray(value.detach() if name == "torch" else value) for value in state.average.values()]


def scales(name: str, rule: LossScale, finite: np.ndarray) -> list[float]:
    """The loss scale after each step."""
    found = []
    if name == "jax":
        import jax
        import jax.numpy as jnp

        from jaxtrain import loss_scale

        advance = jax.jit(lambda state, good: loss_scale.updated(state, good, rule))
        state = loss_scale.initial(rule)
        for good in finite:
            state = advance(state, jnp.bool(good))
            found.append(float(state.scale))
        return found
    import torch

    from torchtrain import loss_scale as torch_loss_scale

    torch_state = torch_loss_scale.initial(rule, torch.device("cpu"))
    for good in finite:
        torch_loss_scale.update(torch_state, torch.tensor(bool(good)), rule)
        found.append(torch_state.scale.item())
    return found
