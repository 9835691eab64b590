"""The PyTorch backend: one device a process, state updated in place."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shared.backend import DeviceReport, StateSource, StepMetrics, Sums
from shared.batch import Batch
from shared.config.schema import Config
from shared.errors import UserError
from shared.initialization import FirstDraws
from shared.models import model_spec
from shared.policies.accumulation import num_microbatches, with_microbatch
from shared.policies.observed import Operation
from shared.policies.precision import precision_policy
from shared.policies.remat import remat_policy
from shared.schedule import learning_rates
from torchtrain import checkpoint, devices, loss_scale, offload, optimizer
from torchtrain.accumulation import accumulate, fits, microbatches
from torchtrain.attention import choose_attention, fused_attention
from torchtrain.batch import DeviceBatch, to_device
from torchtrain.dropout import Dropout
from torchtrain.loss import cross_entropy_sum
from torchtrain.models.transformer import Execution, Transformer
from torchtrain.observed import observe
from torchtrain.parallel import Replicas
from torchtrain.precision import dtypes
from torchtrain.state import TrainState, flat, scalars, tensors
from torchtrain.trace import trace
from torchtrain.weights import export_parameters, import_parameters


@dataclass(frozen=True)
class PendingMetrics:
    """Metrics of a dispatched step."""

    values: dict[str, torch.Tensor]

    def read(self) -> StepMetrics:
        values: dict[str, Any] = {name: value.item() for name, value in self.values.items()}
        return StepMetrics(**{"loss_scale": None, **values})


@dataclass(frozen=True)
class PendingSums:
    """Sums of a dispatched evaluation batch."""

    loss: torch.Tensor
    tokens: torch.Tensor

    def read(self) -> Sums:
        return Sums(self.loss.item(), int(self.tokens.item()))


class TorchBackend:
    """See :class:`shared.backend.Backend`."""

    name = "torch"

    def __init__(self, config: Config, replicas: Replicas | None = None):
        """``replicas``: this process's place among them; default: what ``torch.distributed`` says."""
        self.replicas = replicas or Replicas.of(config.parallel)
        self.process = self.replicas.index
        by_itself = replace(self.replicas, sending=False)
        config = with_microbatch(
            config,
            lambda sized: fits(
                sized, devices.device(), lambda tried: TorchBackend(tried, by_itself), self.replicas.any
            ),
        )
        self.config = config
        self.policy = precision_policy(config.precision)
        self.dtypes = dtypes(self.policy)
        self.spec = model_spec(config.model)
        self.device = devices.device()
        self.asynchronous = self.device.type != "cpu"
        devices.require_precision(self.policy, self.device)
        offload.require(config)
        share = config.batch.global_batch // self.replicas.count
        self.num_microbatches = num_microbatches(share, config.accumulation.microbatch)
        attention = choose_attention(config.execution.attention, self.dtypes.islands)
        self.remat = remat_policy(config, self.spec, share // self.num_microbatches, attention is fused_attention)
        if config.execution.torch.compile:
            devices.require_compiler(self.device)
            if self.remat.kept or self.remat.offloaded:
                raise UserError(
                    "execution.torch.compile=true hides a block's tensors from a remat that keeps some by name; "
                    "nearest valid: remat=full, or leave compile false"
                )
        self.execution = Execution(
            dtypes=self.dtypes,
            attention=attention,
            remat=self.remat,
            compile=config.execution.torch.compile,
            seed=config.seed,
        )
        self.rates = torch.tensor(learning_rates(config.schedule), dtype=self.dtypes.accumulate, device=self.device)

    def describe(self) -> DeviceReport:
        return devices.describe(self.replicas.count)

    def agreed(self, wish: bool) -> bool:
        return self.replicas.any(wish)

    def gathered(self, text: str) -> list[str]:
        return self.replicas.gathered(text)

    # ------------------------------------------------------------------------------------------------------- state

    @torch.no_grad()
    def create_state(self, source: StateSource | None = None) -> TrainState:
        if source is None:
            source = FirstDraws(self.config.seed)
        state = self._empty_state()
        found = tensors(state)
        for role in source.roles:
            import_parameters(self.spec, functools.partial(source.read, role), found[role])
        if state.average is not None and "average" not in source.roles:
            for name, tensor in state.average.items():
                tensor.copy_(found["parameters"][name])
        state.num_updates.fill_(source.num_updates)
        if state.loss_scale is not None and source.loss_scale is not None:
            scale, good_updates = source.loss_scale
            state.loss_scale.scale.fill_(scale)
            state.loss_scale.good_updates.fill_(good_updates)
        state.optimizer.set_step(state.num_updates)
        return state

    def _empty_state(self) -> TrainState:
        with self.device:
            model = Transformer(self.spec, self.execution, self.config.batch.sequence_length)
        rate = torch.zeros((), dtype=self.dtypes.accumulate, device=self.device)
        average = None
        if self.config.optimizer.ema_decay is not None:
            average = {name: torch.zeros_like(p, requires_grad=False) for name, p in model.named_parameters()}
        return TrainState(
            model=model,
            optimizer=optimizer.Optimizer(
                self.config.optimizer, self.spec, model, rate, self.dtypes, self.config.offload.optimizer == "host"
            ),
            average=average,
            rate=rate,
            num_updates=torch.zeros((), dtype=torch.int64, device=self.device),
            loss_scale=loss_scale.initial(self.policy.loss_scale, self.device),
        )

    def save(self, state: TrainState, directory: Path) -> Callable[[], None]:
        return checkpoint.save(flat(tensors(state)) | scalars(state), directory, self.replicas.group)

    def restore(self, directory: Path) -> TrainState:
        state = self._empty_state()
        checkpoint.restore(flat(tensors(state)) | scalars(state), directory)
        state.optimizer.set_step(state.num_updates)
        return state

    def export_arrays(self, state: TrainState) -> Iterator[tuple[str, np.ndarray]]:
        return export_parameters(self.spec, dict(state.model.named_parameters()))

    def trace(self, state: TrainState, batch: Batch) -> Iterator[tuple[str, np.ndarray]]:
        return trace(self, state, batch)

    def observe(self) -> Counter[Operation]:
        return observe(self)

    # -------------------------------------------------------------------------------------------------------- step

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, PendingMetrics]:
        rows = self.place(batch)
        scale = None if state.loss_scale is None else state.loss_scale.scale
        tokens = self.replicas.sum_(rows.mask.sum())
        loss, found = self.gradients(state.model, rows, scale, state.num_updates, tokens)
        gradients = list(found.values())
        if scale is not None:
            loss = loss / scale
            torch._foreach_div_(gradients, scale)
        norm = optimizer.global_norm(gradients)
        finite = norm.isfinite()
        # Not self.rates[index]: indexing by a 0-d tensor reads it on the host, which waits for the device.
        index = state.num_updates.clamp(max=len(self.rates) - 1)
        state.rate.copy_(self.rates.index_select(0, index.view(1)).view(()))
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": state.rate.clone(),
            "tokens": tokens,
            "num_updates": state.num_updates + finite,
            "skipped": ~finite,
        }

        optimizer.clip(gradients, norm, self.config.optimizer.clip_norm)
        state.optimizer.step(found, finite)
        state.model.zero_grad()
        state.num_updates += finite
        decay = self.config.optimizer.ema_decay
        if state.average is not None and decay is not None:
            averages = state.average.values()
            optimizer.update_average(averages, state.parameters(), decay, finite, self.dtypes.accumulate)
        loss_scale.update(state.loss_scale, finite, self.policy.loss_scale)
        return state, PendingMetrics(metrics if scale is None else {**metrics, "loss_scale": scale})

    @torch.no_grad()
    def eval_step(self, state: TrainState, batch: Batch) -> PendingSums:
        rows = self.place(batch)
        own: Mapping[str, torch.Tensor] = state.average or dict(state.model.named_parameters())

        def model(*inputs: Any, **options: Any) -> torch.Tensor:
            output: torch.Tensor = torch.func.functional_call(state.model, dict(own), inputs, options)
            return output

        losses = [self._loss_sum(model, part) for part in microbatches(rows, self.num_microbatches)]
        return PendingSums(self.replicas.sum_(torch.stack(losses).sum()), self.replicas.sum_(rows.mask.sum()))

    def place(self, batch: Batch) -> DeviceBatch:
        """This replica's rows of a global batch, on its device."""
        share = batch.share(self.replicas.index, self.replicas.count)
        first = self.replicas.index * share.num_rows
        return to_device(share, self.device, numbered=self.spec.dropout > 0, first_row=first)

    def place_all(self, batch: Batch) -> DeviceBatch:
        """All rows of a global batch, on this replica's device."""
        return to_device(batch, self.device, numbered=self.spec.dropout > 0)

    def dropout(self, batch: DeviceBatch, update: torch.Tensor | None) -> Dropout | None:
        """Dropout after that many completed updates; None where there is none, as in an evaluation."""
        if update is None or batch.rows is None:
            return None
        return Dropout(update, batch.rows, self.spec.dropout, self.dtypes.islands)

    def _loss_sum(self, model: Any, batch: DeviceBatch, update: torch.Tensor | None = None) -> torch.Tensor:
        inputs = batch.tokens, batch.segments, batch.positions, self.dropout(batch, update)
        if (chunk := self.config.execution.vocab_chunk) is not None:
            return model(*inputs, chunked_loss=(batch.targets, batch.mask, chunk))
        logits_BTV = model(*inputs)
        return cross_entropy_sum(logits_BTV, batch.targets, batch.mask, self.dtypes.islands)

    def gradients(
        self,
        model: Transformer,
        batch: DeviceBatch,
        scale: torch.Tensor | None = None,
        update: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[torch.nn.Parameter, torch.Tensor]]:
        """(mean loss over the global batch's valid tokens, its gradients), each multiplied by ``scale``; with dropout
        for ``update``. Gradients in the parameters' dtype are their ``.grad``. ``tokens``: the number of those tokens,
        where it is known."""
        if tokens is None:
            tokens = self.replicas.sum_(batch.mask.sum())
        weight = 1.0 / tokens.clamp(min=1).to(self.dtypes.accumulate)
        if scale is not None:
            weight = weight * scale.to(weight.dtype)

        def share(microbatch: DeviceBatch) -> torch.Tensor:
            return self._loss_sum(model, microbatch, update) * weight

        def over_replicas(gradients: Iterable[torch.Tensor]) -> None:
            self.replicas.sum_gradients_(gradients, self.dtypes.reduce)

        parameters, dtype, sync = list(model.parameters()), self.dtypes.accumulate, self.config.accumulation.sync
        loss, gradients = accumulate(share, batch, self.num_microbatches, parameters, dtype, over_replicas, sync)
        return self.replicas.sum_(loss), gradients
