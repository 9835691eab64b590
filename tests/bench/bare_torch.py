"""A Llama training loop written by hand in PyTorch, as someone would who needs only this one model: the yardstick.

No config, no policies, no recording. It computes what ``configs/demo.yaml`` asks for: float32, AdamW, clipping, a
learning-rate table.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from shared.batch import Batch
from shared.config.schema import Config


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Block(nn.Module):
    def __init__(self, m: Any):
        super().__init__()
        C, F_ = m.hidden_size, m.intermediate_size
        self.H, self.K = m.num_attention_heads, m.num_key_value_heads
        self.D = C // self.H
        self.norm1, self.norm2 = nn.RMSNorm(C, m.rms_norm_eps), nn.RMSNorm(C, m.rms_norm_eps)
        self.q, self.o = nn.Linear(C, C, bias=False), nn.Linear(C, C, bias=False)
        self.k, self.v = (nn.Linear(C, self.K * self.D, bias=False) for _ in range(2))
        self.gate, self.up, self.down = nn.Linear(C, F_, False), nn.Linear(C, F_, False), nn.Linear(F_, C, False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        h = self.norm1(x)
        q = rotate(self.q(h).view(B, T, self.H, self.D).transpose(1, 2), cos, sin)
        k = rotate(self.k(h).view(B, T, self.K, self.D).transpose(1, 2), cos, sin)
        v = self.v(h).view(B, T, self.K, self.D).transpose(1, 2)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).reshape(B, T, C))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, m: Any, length: int):
        super().__init__()
        self.embedding = nn.Embedding(m.vocab_size, m.hidden_size)
        self.layers = nn.ModuleList(Block(m) for _ in range(m.num_hidden_layers))
        self.norm = nn.RMSNorm(m.hidden_size, m.rms_norm_eps)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=m.initializer_range)
        D = m.hidden_size // m.num_attention_heads
        angles = torch.arange(length)[:, None] * m.rope_theta ** (-torch.arange(0, D, 2) / D)
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.linear(self.norm(x), self.embedding.weight)


class BareTorch:
    """The loop, ready to be timed."""

    def __init__(self, config: Config, rates: np.ndarray):
        o = config.optimizer
        assert o.name == "adamw" and o.clip_norm is not None
        self.rates, self.clip_norm, self.updates = rates, o.clip_norm, 0
        self.model = Llama(config.model, config.batch.sequence_length)
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.model.parameters() if p.ndim > 1], "weight_decay": o.weight_decay},
            {"params": [p for p in self.model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(o.beta1, o.beta2), eps=o.eps, fused=True)

    def run(self, batches: list[Batch]) -> float:
        """Seconds for all batches but the first."""
        for index, batch in enumerate(batches):
            tokens, targets = (torch.from_numpy(x).long() for x in (batch.tokens, batch.targets))
            for group in self.optimizer.param_groups:
                group["lr"] = self.rates[self.updates]
            loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.updates += 1
            if index == 0:
                start = time.perf_counter()
        return time.perf_counter() - start
