"""Data-parallel replicas: the gradient of one device, by exactly the collectives that were asked for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shared.batch import Batch
from shared.config.schema import Config
from shared.errors import UserError
from shared.policies.accumulation import largest_microbatch, with_microbatch
from tests import backends
from tests.recipes import LLAMA, random_batch, recipe
from tests.torch_replicas import Processes, processes

SPLITS = [
    # replicas, microbatch, sync
    (2, 4, "last"),
    (2, 1, "last"),
    (2, 2, "every"),
    (4, 1, "every"),
    (4, 2, "last"),
]
splits = pytest.mark.parametrize(("replicas", "microbatch", "sync"), SPLITS)
# Sums in another order; relative to the norm of the whole gradient.
LIMITS = {"float64": 1e-13, "float32": 1e-6}


def config_of(replicas: int, microbatch: int, sync: str, precision: Any = "float64", **sections: Any) -> Config:
    accumulation = {"microbatch": microbatch, "sync": sync}
    return recipe(**{"parallel": {"data": replicas}, "accumulation": accumulation, "precision": precision} | sections)


def ragged(config: Config) -> Batch:
    """Half of the replicas have no valid token at all."""
    batch = random_batch(config, ragged=True)
    mask = batch.mask.copy()
    mask[: config.batch.global_batch // 2] = False
    return Batch(batch.tokens, np.where(mask, batch.targets, 0), mask)


def error(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Norm of the difference of two gradients over the norm of the second."""
    square = sum(float(np.sum((found[key].astype(np.float64) - expected[key]) ** 2)) for key in expected)
    return float(np.sqrt(square / sum(float(np.sum(value.astype(np.float64) ** 2)) for value in expected.values())))


def of_one_device(name: str, precision: Any, model: dict[str, Any]) -> tuple[float, dict[str, np.ndarray]]:
    config = recipe(precision=precision, model=model)
    with backends.make(name, config) as backend:
        return backends.loss_and_gradients(backend, ragged(config))


@pytest.fixture(scope="module")
def torch_processes() -> Iterator[Callable[[int], Processes]]:
    import contextlib

    with contextlib.ExitStack() as stack:
        groups: dict[int, Processes] = {}

        def group(count: int) -> Processes:
            if count not in groups:
                groups[count] = stack.enter_context(processes(count))
            return groups[count]

        yield group


# ---------------------------------------------------------------------------------------------------------- gradients


@splits
@pytest.mark.parametrize("precision", LIMITS)
def test_jax_has_the_gradient_of_one_device(replicas: int, microbatch: int, sync: str, precision: str) -> None:
    expected_loss, expected = of_one_device("jax", precision, LLAMA)
    config = config_of(replicas, microbatch, sync, precision)
    with backends.make("jax", config) as backend:
        loss, found = backends.loss_and_gradients(backend, ragged(config))
    assert loss == pytest.approx(expected_loss, rel=LIMITS[precision])
    assert error(found, expected) < LIMITS[precision]


@splits
@pytest.mark.parametrize("precision", LIMITS)
def test_torch_has_the_gradient_of_one_device(
    torch_processes: Callable[[int], Processes], replicas: int, microbatch: int, sync: str, precision: str
) -> None:
    expected_loss, expected = of_one_device("torch", precision, LLAMA)
    config = config_of(replicas, microbatch, sync, precision)
    for loss, found, _ in torch_processes(replicas).loss_and_gradients(config.model_dump(), ragged(config)):
        assert loss == pytest.approx(expected_loss, rel=LIMITS[precision])
        assert error(found, expected) < LIMITS[precision]


def test_replicas_drop_the_elements_that_one_device_drops() -> None:
    """Dropout knows rows by their number in the global batch."""
    import jax
    import jax.numpy as jnp

    gradients = []
    for replicas in (1, 2):
        config = config_of(replicas, 2, "last", model=LLAMA | {"dropout": 0.3})
        with backends.make("jax", config) as backend:
            state, rows = backend.create_state(), backend.place(ragged(config))
            _, found = jax.jit(backend.gradients)(state.parameters, rows, None, jnp.int32(3))
            gradients.append({slot: np.asarray(value) for slot, value in found.items()})
    assert error(gradients[1], gradients[0]) < 1e-13


# -------------------------------------------------------------------------------------------------------- collectives


def all_reduces(config: Config) -> Counter[str]:
    """Executed all-reduces of one gradient, by dtype, from the compiled program: those in a loop's body count once a
    turn. Scalars (the loss, token counts) are left out."""
    import jax

    with backends.make("jax", config) as backend:
        state, rows = backend.create_state(), backend.place(ragged(config))
        text = jax.jit(backend.gradients).lower(state.parameters, rows).compile().as_text()
    computations = dict(re.findall(r"^%?([\w.-]+) [^\n]*\{\n(.*?)^\}", text, flags=re.DOTALL | re.MULTILINE))
    computations["ENTRY"] = re.search(r"^ENTRY[^\n]*\n(.*?)^\}", text, flags=re.DOTALL | re.MULTILINE)[1]  # type: ignore[index]

    def count(name: str, times: int) -> Counter[str]:
        found: Counter[str] = Counter()
        for line in computations[name].splitlines():
            if match := re.search(r"= (.*) all-reduce(?:-start)?\(", line):
                for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", match[1]):
                    found[dtype] += times if shape else 0
            if loop := re.search(r" while\(.*body=%?([\w.-]+)", line):
                turns = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
                assert turns, "a loop whose turns are not known"
                found += count(loop[1], times * int(turns[1]))
        return found

    return count("ENTRY", 1)


def test_jax_reduces_once_after_the_last_microbatch_or_after_every_one() -> None:
    num_slots = 12  # as the blocks are stacked: three around them, nine in them
    layers = {"execution": {"jax": {"layers": "scan"}}}
    once = all_reduces(config_of(2, 4, "last", "float32", **layers))
    assert once == {"f32": num_slots}
    assert all_reduces(config_of(2, 1, "last", "float32", **layers)) == once
    assert all_reduces(config_of(2, 1, "every", "float32", **layers)) == {"f32": 4 * num_slots}
    assert all_reduces(config_of(1, 1, "last", "float32", **layers)) == {}


def test_torch_reduces_once_after_the_last_microbatch_or_after_every_one(
    torch_processes: Callable[[int], Processes],
) -> None:
    def calls(microbatch: int, sync: str, precision: Any = "float32") -> Counter[str]:
        config = config_of(2, microbatch, sync, precision)
        (_, _, found), _ = torch_processes(2).loss_and_gradients(config.model_dump(), ragged(config))
        return Counter(dtype for dtype, elements in found if elements > 1)

    # One bucket holds all of so small a model.
    assert calls(4, "last") == calls(1, "last") == {"float32": 1}
    assert calls(1, "every") == {"float32": 4}
    assert calls(1, "last", {"preset": "float32", "reduce": "bfloat16"}) == {"bfloat16": 1}


def test_torch_sums_every_gradient_once_when_they_fill_several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from torchtrain import parallel

    travelled: list[int] = []

    class Twins(parallel.Replicas):
        """Two replicas with the same gradients."""

        def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
            travelled.append(tensor.nbytes)
            return tensor.mul_(2)

    monkeypatch.setattr(parallel, "BUCKET_BYTES", 40)
    shapes = [(3,), (2, 4), (5, 5), (), (1,), (6,), (7,)]  # one is larger than a bucket
    before = [torch.randn(shape) for shape in shapes]
    after = [gradient.clone() for gradient in before]
    Twins(count=2).sum_gradients_(after, torch.float32)
    assert all(torch.equal(found, 2 * gradient) for found, gradient in zip(after, before, strict=True))
    assert travelled == [12, 32, 100, 32, 28]


def test_gradients_travel_in_the_format_of_the_policy_in_jax() -> None:
    """In the traced program: a CPU's compiler raises half-precision sums to float32."""
    import jax

    config = config_of(2, 2, "last", {"preset": "float32", "reduce": "bfloat16"})
    with backends.make("jax", config) as backend:
        state, rows = backend.create_state(), backend.place(ragged(config))
        text = str(jax.make_jaxpr(backend.gradients)(state.parameters, rows))
        _, coarse = backends.loss_and_gradients(backend, ragged(config))
    formats = Counter(re.findall(r":(\w+)\[\d[\d,]*\] = psum", text))
    assert set(formats) == {"bf16"}
    _, exact = of_one_device("jax", "float32", LLAMA)
    assert 1e-4 < error(coarse, exact) < 1e-2, "rounded once to eight bits"


# ------------------------------------------------------------------------------------------------- the microbatch found


@pytest.mark.parametrize("rows", [1, 6, 7, 48])
def test_the_largest_divisor_that_fits_is_found_with_few_trials(rows: int) -> None:
    divisors = [size for size in range(1, rows + 1) if rows % size == 0]
    for largest in divisors:
        trials: list[int] = []

        def fits(size: int, trials: list[int] = trials, largest: int = largest) -> bool:
            trials.append(size)
            return size <= largest

        assert largest_microbatch(rows, fits) == largest
        assert len(trials) <= 1 + len(divisors).bit_length() and trials[0] == rows
    with pytest.raises(UserError, match=r"not even one sequence fits.*remat=full"):
        largest_microbatch(rows, lambda size: False)


def test_jax_finds_the_microbatch_ahead_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxtrain import accumulation
    from jaxtrain.backend import JaxBackend

    needed = {size: JaxBackend(recipe(accumulation={"microbatch": size})).compiled_bytes() for size in (1, 2, 4, 8)}
    assert needed[1] < needed[8], "a smaller microbatch takes less memory"
    monkeypatch.setattr(accumulation, "memory_bytes", lambda device: (needed[2] + needed[4]) // 2)
    backend = JaxBackend(recipe(accumulation={"microbatch": "auto"}))
    assert backend.config.accumulation.microbatch == 2 and backend.num_microbatches == 4


def test_a_microbatch_whose_blocks_outgrow_the_remat_budget_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxtrain import accumulation
    from jaxtrain.backend import JaxBackend

    monkeypatch.setattr(accumulation, "memory_bytes", lambda device: 2**40)
    inputs_of_a_row = 16 * 24 * 4 * 2  # positions, width, float32, blocks
    auto = {"microbatch": "auto"}
    found = JaxBackend(recipe(accumulation=auto, remat={"budget": 3 * inputs_of_a_row}))
    assert found.config.accumulation.microbatch == 2
    with pytest.raises(UserError, match=rf"remat\.budget .* for 1 rows; nearest valid: {inputs_of_a_row}"):
        JaxBackend(recipe(accumulation=auto, remat={"budget": inputs_of_a_row - 1}))


def test_torch_finds_the_microbatch_by_trying() -> None:
    import torch

    from torchtrain.accumulation import fits

    tried = []

    class Tried:
        """A backend on a device that holds two rows."""

        def __init__(self, config: Config):
            self.microbatch = config.accumulation.microbatch
            tried.append(self.microbatch)

        def create_state(self) -> None:
            return None

        def train_step(self, state: None, batch: Batch) -> Any:
            assert batch.mask.all() and batch.num_rows == 8
            if self.microbatch > 2:  # type: ignore[operator]
                raise torch.cuda.OutOfMemoryError("out of memory")
            return state, self

        def read(self) -> None: ...

    config = recipe(accumulation={"microbatch": "auto"})
    found = with_microbatch(config, lambda sized: fits(sized, torch.device("cuda"), Tried))
    assert found.accumulation.microbatch == 2 and tried[0] == 8 and 4 in tried


@pytest.mark.parametrize("name", backends.BACKENDS)
def test_a_cpu_cannot_find_the_microbatch_and_says_so(name: str) -> None:
    config = recipe(accumulation={"microbatch": "auto"})
    with pytest.raises(UserError, match=r"accumulation\.microbatch=auto.*state a number"), backends.make(name, config):
        pass


# ------------------------------------------------------------------------------------------------------------ refusals


def test_more_replicas_than_there_are_are_refused() -> None:
    from jaxtrain.backend import JaxBackend
    from torchtrain.backend import TorchBackend

    config = recipe(parallel={"data": 8})
    with pytest.raises(UserError, match=r"parallel\.data \(8\): JAX sees 4 device.*nearest valid: 4"):
        JaxBackend(config)
    with pytest.raises(UserError, match=r"parallel\.data \(8\) needs as many processes.*nproc-per-node 8"):
        TorchBackend(config)
