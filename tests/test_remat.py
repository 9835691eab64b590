"""Rematerialisation: the same gradients, and exactly the work and the bytes that the rule says, in both backends."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from typing import Any

import numpy as np
import pytest

from shared.config.schema import Config
from shared.errors import UserError
from shared.models import model_spec
from shared.models.spec import ModelSpec
from shared.policies.remat import (
    NAMES,
    RematPolicy,
    block_flops,
    block_names,
    kept_bytes,
    recomputed_flops,
    remat_policy,
)
from tests import backends
from tests.recipes import GPT2, LLAMA, random_batch, recipe

LAYERS = 5
MODELS = {"llama": LLAMA | {"num_hidden_layers": LAYERS}, "gpt2": GPT2 | {"num_hidden_layers": LAYERS}}
SETTINGS: dict[str, Any] = {
    "full": "full",
    "every 2": {"every": 2},
    "matmuls": "matmuls",
    "alternate": "alternate",
    "q v": {"names": ["q", "v"]},
    "context up": {"names": ["context", "up"]},
    "nothing by name": {"names": []},
    "budget": {"budget": "250 KiB"},
}
families = pytest.mark.parametrize("family", MODELS)
settings = pytest.mark.parametrize("setting", SETTINGS)
# Blocks that are not recomputed keep what autodiff likes, so a rule says nothing of their bytes.
of_all_blocks = pytest.mark.parametrize("setting", [name for name in SETTINGS if name != "every 2"])


def config_of(family: str, setting: str | None, layers: str = "unroll", **sections: Any) -> Config:
    execution = {"attention": "reference", "jax": {"layers": layers}}
    remat = "none" if setting is None else SETTINGS[setting]
    return recipe(
        **{"model": MODELS[family], "execution": execution, "remat": remat, "precision": "float64"} | sections
    )


def policy_of(config: Config, fused_attention: bool = False) -> tuple[ModelSpec, RematPolicy]:
    spec = model_spec(config.model)
    return spec, remat_policy(config, spec, config.batch.global_batch, fused_attention)


# ---------------------------------------------------------------------------------------------------------- gradients


@functools.cache
def gradients(name: str, family: str, setting: str | None, layers: str, offloaded: tuple[str, ...] = ()) -> Any:
    config = config_of(family, setting, layers, offload={"activations": list(offloaded)})
    with backends.make(name, config) as backend:
        return backends.loss_and_gradients(backend, random_batch(config, ragged=True, segments=True))[1]


@families
@settings
def test_remat_does_not_change_a_bit_of_the_gradient_in_torch(family: str, setting: str) -> None:
    kept, recomputed = (gradients("torch", family, chosen, "unroll") for chosen in (None, setting))
    assert all(np.array_equal(kept[name], recomputed[name]) for name in kept)


@families
@settings
def test_remat_does_not_change_a_bit_of_the_gradient_in_jax(family: str, setting: str) -> None:
    """Operation by operation: a compiler may fuse a recomputed sum in another order."""
    import jax

    found = []
    for chosen in (None, setting):
        # Unfused, as the rule has them apart when a part of a group is kept.
        config = config_of(family, chosen, batch={"global_batch": 2, "sequence_length": 8})
        with backends.make("jax", config) as backend:
            rows, state = backend.place(random_batch(config)), backend.create_state()
            with jax.disable_jit(), pytest.MonkeyPatch.context() as patch:
                patch.setattr(RematPolicy, "fuses", lambda self, group: False)
                found.append(backend.gradients(state.parameters, rows)[1])
    assert all(np.array_equal(found[0][slot], found[1][slot]) for slot in found[0])


@families
@settings
@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_compiled_remat_has_the_gradient_of_none_in_jax(family: str, setting: str, layers: str) -> None:
    kept, recomputed = (gradients("jax", family, chosen, layers) for chosen in (None, setting))
    # Other fusions reorder sums in float64.
    assert max(np.max(np.abs(kept[name] - recomputed[name])) / np.max(np.abs(kept[name])) for name in kept) < 1e-13


# --------------------------------------------------------------------------------------------------------------- work


@families
@settings
@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_jax_runs_again_exactly_the_products_that_the_rule_names(family: str, setting: str, layers: str) -> None:
    import jax

    flops = {}
    for chosen in (None, setting):
        config = config_of(family, chosen, layers)
        with backends.make("jax", config) as backend:
            state, rows = backend.create_state(), backend.place(random_batch(config))
            flops[chosen] = product_flops(jax.make_jaxpr(backend.gradients)(state.parameters, rows).jaxpr)
    assert flops[setting] - flops[None] == expected_recomputation(config_of(family, setting), fused_attention=False)


@families
@settings
@pytest.mark.parametrize("attention", ["reference", "fused"])
def test_torch_runs_again_exactly_the_products_that_the_rule_names(family: str, setting: str, attention: str) -> None:
    flops = {}
    for chosen in (None, setting):
        config = config_of(family, chosen, execution={"attention": attention})
        with backends.make("torch", config) as backend:
            state, rows = backend.create_state(), backend.place(random_batch(config))
            with torch_products() as counted:
                backend.gradients(state.model, rows)
            flops[chosen] = counted[0]
    assert flops[setting] - flops[None] == expected_recomputation(config_of(family, setting), attention == "fused")


def test_full_remat_runs_all_but_the_last_product_of_a_block_again() -> None:
    spec = model_spec(recipe(model=LLAMA).model)
    down = 2 * LLAMA["hidden_size"] * LLAMA["intermediate_size"]
    assert recomputed_flops(spec, 16, (), fused_attention=False) == block_flops(spec, 16) - down
    # What is kept of the products leaves the scores; a fused kernel leaves nothing.
    scores = 2 * 16 * LLAMA["num_attention_heads"] * LLAMA["head_dim"]
    assert recomputed_flops(spec, 16, NAMES, fused_attention=False) == scores
    assert recomputed_flops(spec, 16, NAMES, fused_attention=True) == 0


def expected_recomputation(config: Config, fused_attention: bool) -> int:
    spec, policy = policy_of(config)
    length = config.batch.sequence_length
    one = recomputed_flops(spec, length, policy.kept | policy.offloaded, fused_attention)
    num_recomputed = sum(policy.recomputes(layer) for layer in range(LAYERS))
    return config.batch.global_batch * length * num_recomputed * one


def product_flops(jaxpr: Any) -> int:
    """2 m n k of every matrix product of a traced program; the body of a loop counts once for each turn."""
    total = 0
    for equation in jaxpr.eqns:
        turns = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[axis] for axis in contracted)
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += turns * product_flops(inner)
    return total


def torch_products() -> Any:
    """A context that adds up 2 m n k of every product, and 2 products of a fused attention's forward kernel."""
    import contextlib

    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.flops = [0]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            name = func.overloadpacket.__name__
            if name in ("mm", "bmm", "addmm"):
                left = args[1] if name == "addmm" else args[0]
                self.flops[0] += 2 * out.numel() * left.shape[-1]
            elif name == "_scaled_dot_product_flash_attention_for_cpu":
                query, key = args[0], args[1]
                self.flops[0] += 2 * 2 * query.numel() * key.shape[-2]
            return out

    @contextlib.contextmanager
    def counting() -> Any:
        with Counter() as counter:
            yield counter.flops

    return counting()


# -------------------------------------------------------------------------------------------------------------- bytes


@families
@of_all_blocks
def test_torch_keeps_exactly_the_bytes_that_the_rule_names(family: str, setting: str) -> None:
    """Beside the blocks' inputs and named tensors, between the passes: what the layers around them keep."""
    config = config_of(family, setting, execution={"attention": "fused"})
    held = bytes_held_by_torch(config)
    spec, policy = policy_of(config, fused_attention=True)
    difference = held - bytes_held_by_torch(config_of(family, "full", execution={"attention": "fused"}))
    positions = config.batch.global_batch * config.batch.sequence_length * LAYERS
    inputs = positions * kept_bytes(spec, (), 8, True)
    expected = positions * kept_bytes(spec, policy.kept, 8, True) - inputs
    assert difference == expected
    assert inputs < held - expected < inputs + positions // LAYERS * 8 * (8 * spec.hidden_size + 4 * spec.vocab_size)


@families
@of_all_blocks
@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_jax_keeps_exactly_the_bytes_that_the_rule_names(family: str, setting: str, layers: str) -> None:
    config = config_of(family, setting, layers)
    spec, policy = policy_of(config)
    difference = bytes_held_by_jax(config) - bytes_held_by_jax(config_of(family, "full", layers))
    positions = config.batch.global_batch * config.batch.sequence_length * LAYERS
    assert difference == positions * (kept_bytes(spec, policy.kept, 8, False) - kept_bytes(spec, (), 8, False))


def bytes_held_by_torch(config: Config) -> int:
    """Bytes of the tensors that were made in the forward pass and live until the backward pass."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    storages: dict[int, tuple[Any, int]] = {}

    class Tracker(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    storages[storage._cdata] = weakref.ref(storage), storage.nbytes()
            return out

    with backends.make("torch", config) as backend:
        state, rows = backend.create_state(), backend.place(random_batch(config))
        with Tracker():
            loss = backend._loss_sum(state.model, rows)
        held = sum(nbytes for alive, nbytes in storages.values() if alive() is not None)
        assert loss.requires_grad
    return held


def bytes_held_by_jax(config: Config) -> int:
    """Bytes of what the forward pass hands to the backward pass."""
    import jax

    with backends.make("jax", config) as backend:
        state, rows = backend.create_state(), backend.place(random_batch(config))
        pulled_back = jax.eval_shape(lambda p: jax.vjp(lambda p: backend.loss_sum(p, rows), p)[1], state.parameters)
        # Parameters are handed over too; those that come and go with a setting are biases, of other sizes.
        positions = rows.tokens.size
        leaves = jax.tree.leaves(pulled_back)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if leaf.size % positions == 0)


# ------------------------------------------------------------------------------------------------------------- budget


@families
@pytest.mark.parametrize("fused", [False, True], ids=["reference", "fused"])
def test_a_budget_is_never_exceeded_and_buys_the_most_work(family: str, fused: bool) -> None:
    spec = model_spec(recipe(model=MODELS[family]).model)
    positions = 8 * 16 * LAYERS
    names = [name for name in block_names(spec) if name != "down"]
    subsets = [set(s) for n in range(len(names) + 1) for s in itertools.combinations(names, n)]
    least, most = (positions * kept_bytes(spec, chosen, 4, fused) for chosen in ((), names))
    for budget in range(least, most + 1, 2999):
        kept = remat_policy(recipe(model=MODELS[family], remat={"budget": budget}), spec, 8, fused).kept
        fitting = [s for s in subsets if positions * kept_bytes(spec, s, 4, fused) <= budget]
        assert set(kept) in fitting
        work = [recomputed_flops(spec, 16, s, fused) for s in (kept, *fitting)]
        assert work[0] == min(work)


@pytest.mark.parametrize("budget", [130_000, 250_000, 400_000])
def test_the_bytes_that_torch_keeps_are_within_the_budget(budget: int) -> None:
    """Measured, beside what the layers around the blocks keep, with the attention that a run would have."""
    execution = {"execution": {"attention": "fused"}}
    around = bytes_held_by_torch(config_of("llama", "full", **execution)) - 8 * 16 * LAYERS * 8 * LLAMA["hidden_size"]
    assert bytes_held_by_torch(config_of("llama", None, remat={"budget": budget}, **execution)) - around <= budget


def test_a_budget_below_the_blocks_inputs_is_refused_with_the_least_that_is_enough() -> None:
    config = recipe(remat={"budget": 1000})
    with pytest.raises(UserError, match=r"remat\.budget \(1,000 bytes\).*nearest valid: 24576") as error:
        policy_of(config)
    assert str(error.value).count("\n") == 0
    policy_of(recipe(remat={"budget": 24576}))


# ------------------------------------------------------------------------------------------------------------ offload


@families
@pytest.mark.parametrize("setting", ["full", "matmuls", "every 2"])
@pytest.mark.parametrize("name", backends.BACKENDS)
def test_tensors_that_wait_in_host_memory_leave_the_gradient_as_it_is(name: str, family: str, setting: str) -> None:
    kept, moved = (gradients(name, family, setting, "scan", where) for where in ((), ("k", "up", "context")))
    if name == "torch":
        assert all(np.array_equal(kept[key], moved[key]) for key in kept)
    else:  # copies are exact; what is fused around them reorders sums
        assert max(np.max(np.abs(kept[key] - moved[key])) / np.max(np.abs(kept[key])) for key in kept) < 1e-13


def test_jax_moves_the_named_tensors_to_host_memory_and_no_others() -> None:
    import jax

    config = config_of("llama", "full", "scan", offload={"activations": ["up", "q"]})
    with backends.make("jax", config) as backend:
        state, rows = backend.create_state(), backend.place(random_batch(config))
        program = str(jax.make_jaxpr(backend.gradients)(state.parameters, rows))
    widths = sorted(int(line.split("]")[0].split(",")[-1]) for line in moved_to_host(program))
    assert widths == [LLAMA["num_attention_heads"] * LLAMA["head_dim"], LLAMA["intermediate_size"]]


def moved_to_host(program: str) -> list[str]:
    """The shapes, as far as their closing bracket, of what a program copies into host memory."""
    import re

    return re.findall(r"f64<host>\[([\d,]+\])[^\n]* = device_put", program)


def test_torch_copies_the_named_tensors_to_the_host_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU both memories are one: what is tested is which tensors make the way."""
    from torchtrain import offload, remat

    shapes = []

    class Noted(offload.HostCopy):
        def __init__(self, tensor: Any):
            super().__init__(tensor)
            shapes.append(tensor.shape[-1])

    monkeypatch.setattr(remat, "HostCopy", Noted)
    config = config_of("llama", "full", offload={"activations": ["up", "q"]})
    with backends.make("torch", config) as backend:
        backends.loss_and_gradients(backend, random_batch(config))
    assert shapes == [LLAMA["num_attention_heads"] * LLAMA["head_dim"], LLAMA["intermediate_size"]] * LAYERS


def test_nothing_is_offloaded_that_the_backward_pass_does_not_read() -> None:
    config = recipe(offload={"activations": ["q"]})
    with pytest.raises(UserError, match=r"offload\.activations.*nearest valid: remat=matmuls"):
        policy_of(config)


def test_compiled_blocks_refuse_a_remat_by_name() -> None:
    from torchtrain.backend import TorchBackend

    config = recipe(remat="matmuls", execution={"torch": {"compile": True}})
    with pytest.raises(UserError, match=r"execution\.torch\.compile=true.*nearest valid: remat=full"):
        TorchBackend(config)
