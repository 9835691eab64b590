"""The JAX backend: one jitted function an update, whose state is donated and whose shardings are explicit."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import checkpoint, loss_scale, offload, optimizer
from jaxtrain.accumulation import accumulate, fits, microbatches
from jaxtrain.attention import choose_attention, splash_attention
from jaxtrain.batch import DeviceBatch, abstract, to_device
from jaxtrain.devices import describe
from jaxtrain.dropout import Dropout
from jaxtrain.loss import chunked_cross_entropy_sum, cross_entropy_sum
from jaxtrain.models.transformer import Architecture, Execution
from jaxtrain.observed import observe
from jaxtrain.parallel import Placement
from jaxtrain.precision import dtypes, matmul_precision, require_precision
from jaxtrain.state import TrainState, arrays, state_of
from jaxtrain.trace import trace
from jaxtrain.weights import export_slots, import_slots, slot_shapes
from shared.backend import DeviceReport, StateSource, StepMetrics, Sums
from shared.batch import Batch
from shared.config.schema import Config
from shared.initialization import FirstDraws
from shared.models import model_spec
from shared.policies.accumulation import num_microbatches, with_microbatch
from shared.policies.observed import Operation
from shared.policies.precision import precision_policy
from shared.policies.remat import remat_policy
from shared.schedule import learning_rates


@dataclass(frozen=True)
class PendingMetrics:
    """Metrics of a dispatched step."""

    values: dict[str, jax.Array]

    def read(self) -> StepMetrics:
        values = {name: value.item() for name, value in jax.device_get(self.values).items()}
        return StepMetrics(**{"loss_scale": None, **values})


@dataclass(frozen=True)
class PendingSums:
    """Sums of a dispatched evaluation batch."""

    loss: jax.Array
    tokens: jax.Array

    def read(self) -> Sums:
        return Sums(float(self.loss), int(self.tokens))


class JaxBackend:
    """See :class:`shared.backend.Backend`."""

    name = "jax"
    asynchronous = True
    process = 0

    def __init__(self, config: Config, devices: Sequence[jax.Device] | None = None):
        config = with_microbatch(
            config, lambda sized: fits(sized, devices or jax.devices(), lambda tried: JaxBackend(tried, devices))
        )
        self.config = config
        self.policy = precision_policy(config.precision)
        self.dtypes = dtypes(self.policy)
        self.spec = model_spec(config.model)
        self.placement = Placement(config.parallel, devices)
        share = config.batch.global_batch // config.parallel.data
        self.num_microbatches = num_microbatches(share, config.accumulation.microbatch)
        device = self.placement.mesh.devices.flat[0]
        platform = device.platform
        require_precision(self.policy, device)
        layers = config.execution.jax.layers
        attention = choose_attention(
            config.execution.attention,
            platform,
            config.batch.sequence_length,
            self.dtypes.compute,
            self.dtypes.islands,
            self.policy.matmul,
        )
        self.execution = Execution(
            dtypes=self.dtypes,
            attention=attention,
            remat=remat_policy(
                config, self.spec, share // self.num_microbatches, fused_attention=attention is splash_attention
            ),
            seed=config.seed,
            scan_layers=platform != "cpu" if layers == "auto" else layers == "scan",
        )
        self.architecture = Architecture.of(self.spec, self.execution)
        self.transformation = optimizer.transformation(
            config.optimizer, self.spec, self.dtypes.accumulate, self.dtypes.optimizer_state
        )
        self.rates = np.asarray(learning_rates(config.schedule), self.dtypes.accumulate)
        offload.require(config, self.placement)
        self.state_shardings = offload.state_shardings(config, self.placement)
        everywhere, rows = self.placement.replicated, self.placement.rows
        self.step = jax.jit(
            self.update,
            donate_argnums=0,
            in_shardings=(self.state_shardings, rows, everywhere),
            out_shardings=(self.state_shardings, everywhere),
        )
        self.evaluate = jax.jit(
            self._loss_sums, in_shardings=(self.state_shardings.parameters, rows), out_shardings=everywhere
        )

    def describe(self) -> DeviceReport:
        return describe(self.placement.replicas)

    def agreed(self, wish: bool) -> bool:
        return wish

    def gathered(self, text: str) -> list[str]:
        return [text]

    # ------------------------------------------------------------------------------------------------------- state

    def create_state(self, source: StateSource | None = None) -> TrainState:
        if source is None:
            source = FirstDraws(self.config.seed)
        like = self.abstract_state()
        shapes = arrays(like)

        def slots(role: str) -> dict[str, jax.Array]:
            abstract = shapes[role]
            dtype = next(iter(abstract.values())).dtype
            found = import_slots(self.spec, functools.partial(source.read, role), dtype, self.placement.replicated)
            return {slot: jax.device_put(array, abstract[slot].sharding) for slot, array in found.items()}

        found = arrays(self._state_from(slots("parameters")))
        for role in set(source.roles) - {"parameters"}:
            del found[role]  # its zeros, before the numbers that take their place
            found[role] = slots(role)
        found["num_updates"] = jax.device_put(np.int32(source.num_updates), like.num_updates.sharding)
        if like.loss_scale is not None and source.loss_scale is not None:
            scale, good_updates = source.loss_scale
            values = {"scale": np.float32(scale), "good_updates": np.int32(good_updates)}
            found["loss_scale"] = jax.tree.map(
                lambda value, abstract: jax.device_put(value, abstract.sharding), values, shapes["loss_scale"]
            )
        return state_of(found, like)

    def _state_from(self, parameters: dict[str, jax.Array]) -> TrainState:
        """The state before the first update."""

        def complete(parameters: dict[str, jax.Array]) -> TrainState:
            return TrainState(
                parameters=parameters,
                optimizer=self.transformation.init(_cast(parameters, self.dtypes.accumulate)),
                average=jax.tree.map(jnp.copy, parameters) if self.config.optimizer.ema_decay is not None else None,
                num_updates=jnp.int32(0),
                loss_scale=loss_scale.initial(self.policy.loss_scale),
            )

        return jax.jit(complete, donate_argnums=0, out_shardings=self.state_shardings)(parameters)

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, without its numbers."""
        parameters = {
            slot: jax.ShapeDtypeStruct(shape, self.dtypes.parameters) for slot, shape in slot_shapes(self.spec).items()
        }
        state = jax.eval_shape(self._state_from, parameters)

        def placed(sharding: jax.sharding.Sharding, part: Any) -> Any:
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part)

        found: TrainState = jax.tree.map(placed, self.state_shardings, state)
        return found

    def save(self, state: TrainState, directory: Path) -> Callable[[], None]:
        return checkpoint.save(arrays(state), directory)

    def restore(self, directory: Path) -> TrainState:
        like = self.abstract_state()
        return state_of(checkpoint.restore(arrays(like), directory), like)

    def export_arrays(self, state: TrainState) -> Iterator[tuple[str, np.ndarray]]:
        return export_slots(self.spec, state.parameters)

    def trace(self, state: TrainState, batch: Batch) -> Iterator[tuple[str, np.ndarray]]:
        return trace(self, state, batch)

    def observe(self) -> Counter[Operation]:
        return observe(self)

    def abstract_inputs(self) -> tuple[TrainState, DeviceBatch, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of what a step takes."""
        batch = abstract(Batch.blank(self.config), self.placement.rows, numbered=self.spec.dropout > 0)
        rates = jax.ShapeDtypeStruct(self.rates.shape, self.rates.dtype, sharding=self.placement.replicated)
        return self.abstract_state(), batch, rates

    def compiled_bytes(self) -> int:
        """Device memory of one step, as its compiler says, without running it."""
        memory: Any = self.step.lower(*self.abstract_inputs()).compile().memory_analysis()
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        return int(held + memory.temp_size_in_bytes)

    # -------------------------------------------------------------------------------------------------------- step

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, PendingMetrics]:
        state, metrics = self.step(state, self.place(batch), self.rates)
        return state, PendingMetrics(metrics)

    def eval_step(self, state: TrainState, batch: Batch) -> PendingSums:
        parameters = state.parameters if state.average is None else state.average
        return PendingSums(*self.evaluate(parameters, self.place(batch)))

    def place(self, batch: Batch) -> DeviceBatch:
        """The batch on this run's devices, its rows spread as the mesh says."""
        return to_device(batch, self.placement.rows, numbered=self.spec.dropout > 0)

    def dropout(self, batch: DeviceBatch, update: jax.Array | None) -> Dropout | None:
        """Dropout after that many completed updates; None where there is none, as in an evaluation."""
        if update is None or batch.rows is None:
            return None
        return Dropout(update, batch.rows, self.spec.dropout, self.dtypes.islands)

    def loss_sum(
        self, parameters: dict[str, jax.Array], batch: DeviceBatch, update: jax.Array | None = None
    ) -> jax.Array:
        """Sum of the cross entropy over the rows' valid tokens, in the islands' dtype; with dropout for ``update``."""
        model = self.architecture.bind(parameters)
        inputs = batch.tokens, batch.segments, batch.positions, self.dropout(batch, update)
        if (chunk := self.config.execution.vocab_chunk) is not None:
            hidden_BTC, head_VC = model.hidden(*inputs), model.head_matrix()
            roles = self.dtypes.logits, self.dtypes.islands
            return chunked_cross_entropy_sum(hidden_BTC, head_VC, batch.targets, batch.mask, chunk, *roles)
        logits_BTV = model(*inputs)
        return cross_entropy_sum(logits_BTV, batch.targets, batch.mask, self.dtypes.islands)

    def gradients(
        self,
        parameters: dict[str, jax.Array],
        batch: DeviceBatch,
        scale: jax.Array | None = None,
        update: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(mean loss over the global batch's valid tokens, its gradients), each multiplied by ``scale``; with dropout
        for ``update``."""
        weight = 1.0 / jnp.maximum(jnp.sum(batch.mask), 1).astype(self.dtypes.accumulate)
        if scale is not None:
            weight = weight * scale.astype(weight.dtype)

        def of_rows(
            parameters: dict[str, jax.Array], weight: jax.Array, update: jax.Array | None, rows: DeviceBatch
        ) -> tuple[jax.Array, dict[str, jax.Array]]:
            def share(parameters: dict[str, jax.Array], microbatch: DeviceBatch) -> jax.Array:
                return self.loss_sum(parameters, microbatch, update) * weight

            return accumulate(
                jax.value_and_grad(share),
                parameters,
                rows,
                self.num_microbatches,
                self.dtypes.accumulate,
                over_replicas=lambda sums: self.placement.sum_gradients(sums, self.dtypes.reduce),
                sync=self.config.accumulation.sync,
            )

        with matmul_precision(self.policy):
            return self.placement.on_each_replica(of_rows)(parameters, weight, update, batch)

    def update(
        self, state: TrainState, batch: DeviceBatch, rates: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        state = offload.fetched(state, self.config, self.placement)
        scale = None if state.loss_scale is None else state.loss_scale.scale
        loss, gradients = self.gradients(state.parameters, batch, scale, state.num_updates)
        if scale is not None:
            loss, gradients = jax.tree.map(lambda x: x / scale, (loss, gradients))
        norm = optimizer.global_norm(gradients)
        finite = jnp.isfinite(norm)
        rate = rates[jnp.minimum(state.num_updates, len(rates) - 1)]

        gradients = optimizer.clipped(gradients, norm, self.config.optimizer.clip_norm)
        before = _cast(state.parameters, self.dtypes.accumulate)
        direction, moments = self.transformation.update(gradients, state.optimizer, before)
        parameters = jax.tree.map(lambda p, d: p - rate.astype(p.dtype) * d, before, direction)
        after = TrainState(
            parameters=_cast(parameters, self.dtypes.parameters),
            optimizer=moments,
            average=optimizer.averaged(state.average, parameters, self.config.optimizer.ema_decay),
            num_updates=state.num_updates + 1,
            loss_scale=state.loss_scale,
        )
        after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state)
        after = replace(after, loss_scale=loss_scale.updated(state.loss_scale, finite, self.policy.loss_scale))
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": rate,
            "tokens": jnp.sum(batch.mask),
            "num_updates": after.num_updates,
            "skipped": ~finite,
        }
        return after, metrics if scale is None else {**metrics, "loss_scale": scale}

    def _loss_sums(self, parameters: dict[str, jax.Array], batch: DeviceBatch) -> tuple[jax.Array, jax.Array]:
        parameters = offload.fetched_parameters(parameters, self.config, self.placement)

        def of_rows(parameters: dict[str, jax.Array], rows: DeviceBatch) -> jax.Array:
            parts = microbatches(rows, self.num_microbatches)
            losses = jax.lax.map(lambda microbatch: self.loss_sum(parameters, microbatch), parts)
            return self.placement.sum(jnp.sum(losses))

        with matmul_precision(self.policy):
            return self.placement.on_each_replica(of_rows)(parameters, batch), jnp.sum(batch.mask)


def _cast(tree: dict[str, jax.Array], dtype: Any) -> dict[str, jax.Array]:
    return {name: array.astype(dtype) for name, array in tree.items()}
