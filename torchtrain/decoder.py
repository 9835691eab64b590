"""A decoder with a cache of keys and values in PyTorch: a transformer whose attention remembers."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch

from shared.backend import StateSource
from shared.config.schema import Config
from shared.models import model_spec
from shared.policies.precision import precision_policy
from shared.policies.remat import RematPolicy
from torchtrain import devices
from torchtrain.attention import Attention, choose_attention
from torchtrain.models.transformer import Execution, Transformer
from torchtrain.precision import dtypes
from torchtrain.weights import import_parameters


class CachedAttention:
    """Attention of one layer after the other, over the keys and values of all that was read before."""

    def __init__(self, attention: Attention, layers: int, empty: Callable[[], torch.Tensor]):
        """``empty`` makes room for a layer's keys or values, [1, S, K, D]."""
        self._attention = attention
        self._caches = [(empty(), empty()) for _ in range(layers)]
        self._layer, self._start = 0, 0

    def __call__(
        self, q_BTHD: torch.Tensor, k_BTKD: torch.Tensor, v_BTKD: torch.Tensor, _: torch.Tensor | None
    ) -> torch.Tensor:
        end = self._start + q_BTHD.shape[1]
        keys, values = self._caches[self._layer]
        keys[:, self._start : end], values[:, self._start : end] = k_BTKD, v_BTKD
        positions = torch.arange(end, device=keys.device)
        visible_BTS = (positions <= positions[self._start :, None])[None]
        self._layer += 1
        if self._layer == len(self._caches):
            self._layer, self._start = 0, end
        return self._attention(q_BTHD, keys[:, :end], values[:, :end], visible_BTS)


class CachedDecoder:
    """See :class:`shared.backend.Decoder`."""

    def __init__(self, config: Config, source: StateSource, role: str, length: int):
        spec, self._device = model_spec(config.model), devices.device()
        policy = precision_policy(config.precision)
        devices.require_precision(policy, self._device)
        formats = dtypes(policy)
        shape = (1, length, spec.num_kv_heads, spec.head_dim)
        empty = functools.partial(torch.zeros, shape, dtype=formats.compute, device=self._device)
        attention = choose_attention(config.execution.attention, formats.islands)
        cached = CachedAttention(attention, spec.num_layers, empty)
        execution = Execution(formats, cached, RematPolicy(None), compile=False, seed=config.seed)
        with self._device:
            self._model = Transformer(spec, execution, length)
        import_parameters(spec, functools.partial(source.read, role), dict(self._model.named_parameters()))
        self._start = 0

    @torch.no_grad()
    def extend(self, tokens: np.ndarray) -> np.ndarray:
        tokens_BT = torch.from_numpy(np.asarray(tokens, np.int64))[None].to(self._device)
        end = self._start + len(tokens)
        positions_BT = torch.arange(self._start, end, device=self._device)[None]
        self._start = end
        hidden_BTC = self._model.hidden(tokens_BT, positions_BT=positions_BT)
        logits_V = self._model.logits(hidden_BTC[:, -1:])[0, 0]
        return logits_V.double().cpu().numpy()
