"""Rematerialisation (activation checkpointing): trade compute for memory in the backward pass.

``none`` keeps every activation that the backward pass reads. ``full`` keeps only the input of each transformer block
and runs the block's forward pass again when its backward pass needs the rest (Chen et al. 2016, arXiv:1604.06174).
Between them lie settings that also keep some of a block's *named* tensors (Korthikanti et al. 2022, arXiv:2205.05198,
call it selective): what gives a kept tensor is not run again. All settings give the same gradients, bit for bit.

What a recomputed block keeps is its input and the kept tensors, [rows, length, width] each. What it runs again, in
products of a matrix: each of q, k, v, out, gate, up that is not kept; never ``down``, which only the next block reads,
so that naming it keeps nothing.
Attention's two products (scores, and scores times v) are one kernel where it is fused, run again unless ``context`` is
kept. Where they are plain products, the scores are always run again, since the softmax's gradient needs them, and the
second unless ``context`` is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from shared.config.schema import Config, Remat
from shared.errors import TooSmall, UserError
from shared.models.spec import ModelSpec

NAMES = ("q", "k", "v", "context", "out", "gate", "up", "down")
"""The tensors of a block that have names, in the order in which it computes them. q, k and v are named before their
rotation; ``context`` is what attention gives and ``out`` its projection."""

GROUPS = (("q", "k", "v"), ("gate", "up"))
"""Tensors that come from one input, so that a backend may compute each group as one product."""


@dataclass(frozen=True)
class RematPolicy:
    """What the blocks of a model do."""

    every: int | None
    """Blocks 0, every, 2 every, ... are recomputed; None: no block is."""
    kept: frozenset[str] = frozenset()
    """Names that a recomputed block keeps on the device."""
    offloaded: frozenset[str] = frozenset()
    """Names that a recomputed block keeps in host memory."""

    def recomputes(self, layer: int) -> bool:
        """Whether that block's forward pass runs again in its backward pass."""
        return self.every is not None and layer % self.every == 0

    def fuses(self, group: Iterable[str]) -> bool:
        """Whether a group of products may be one: when the backward pass needs all of it again, or none."""
        if self.every is None:
            return True
        saved = [name in self.kept | self.offloaded for name in group]
        return all(saved) or not any(saved)


def remat_policy(config: Config, spec: ModelSpec, rows: int, fused_attention: bool) -> RematPolicy:
    """The policy of a run whose device processes ``rows`` rows at once.

    Raises UserError when a budget cannot hold even the blocks' inputs, or when the backward pass would not read what is
    to wait in host memory.
    """
    remat, offloaded = config.remat, frozenset(config.offload.activations)
    if remat.policy == "none":
        if offloaded:
            raise UserError(
                "offload.activations: with remat 'none' the backward pass reads what is made of them, not themselves; "
                "nearest valid: remat=matmuls, which keeps the others on the device"
            )
        return RematPolicy(None)
    if "down" in offloaded:
        raise UserError(
            "offload.activations: the backward pass never reads 'down'; leave it out, or name 'gate' and 'up', "
            "of which it is made"
        )
    return RematPolicy(remat.every or 1, _kept(config, spec, rows, fused_attention) - offloaded - {"down"}, offloaded)


def _kept(config: Config, spec: ModelSpec, rows: int, fused_attention: bool) -> frozenset[str]:
    remat: Remat = config.remat
    names = block_names(spec)
    if remat.policy == "matmuls":
        return frozenset(names)
    if remat.policy == "alternate":
        return frozenset(names[::2])
    if remat.names is not None:
        return frozenset(remat.names)
    if remat.budget is not None:
        return _within(config, spec, rows, remat.budget, fused_attention)
    return frozenset()


def _within(config: Config, spec: ModelSpec, rows: int, budget: int, fused_attention: bool) -> frozenset[str]:
    """The names that leave least to recompute among those that fit; of equals, the fewest bytes."""
    from shared.policies.precision import precision_policy

    itemsize = {"float64": 8, "float32": 4}.get(precision_policy(config.precision).compute, 2)
    length = config.batch.sequence_length
    positions = rows * length * spec.num_layers

    def size(names: Iterable[str]) -> int:
        return positions * kept_bytes(spec, names, itemsize, fused_attention)

    if size(()) > budget:
        raise TooSmall(
            f"remat.budget ({budget:,} bytes): the inputs of the {spec.num_layers} blocks alone take {size(()):,} "
            f"bytes for {rows} rows; nearest valid: {size(())}, or a smaller accumulation.microbatch"
        )
    names = [name for name in block_names(spec) if name not in (*config.offload.activations, "down")]
    subsets = (s for n in range(len(names) + 1) for s in itertools.combinations(names, n) if size(s) <= budget)
    host = config.offload.activations
    return frozenset(
        min(subsets, key=lambda s: (recomputed_flops(spec, length, {*s, *host}, fused_attention), size(s), s))
    )


# --------------------------------------------------------------------------------------------------------- arithmetic


def block_names(spec: ModelSpec) -> tuple[str, ...]:
    """The names that this family's blocks have."""
    return tuple(name for name in NAMES if name != "gate" or spec.gated)


def width(spec: ModelSpec, name: str) -> int:
    """Elements of a named tensor at one position."""
    if name in ("q", "context"):
        return spec.num_heads * spec.head_dim
    if name in ("k", "v"):
        return spec.num_kv_heads * spec.head_dim
    return spec.hidden_size if name in ("out", "down") else spec.intermediate_size


def kept_bytes(spec: ModelSpec, names: Iterable[str], itemsize: int, fused_attention: bool) -> int:
    """Bytes that one recomputed block keeps for one position: its input and these tensors; and where attention is one
    kernel, beside ``context`` its log-sum-exp of each head, in float32 or better."""
    names = set(names)
    size = itemsize * (spec.hidden_size + sum(width(spec, name) for name in names if name != "down"))
    return size + (max(itemsize, 4) * spec.num_heads if fused_attention and "context" in names else 0)


def _product_flops(spec: ModelSpec, length: int) -> dict[str, int]:
    """Floating-point operations (2 m n k) of each product of a block, for one position; attention's are not halved for
    causality, as kernels compute whole blocks."""
    flops = {name: 2 * spec.hidden_size * width(spec, name) for name in block_names(spec) if name != "context"}
    flops |= {
        "out": 2 * spec.hidden_size * width(spec, "context"),
        "down": 2 * spec.hidden_size * spec.intermediate_size,
    }
    scores = 2 * length * width(spec, "context")
    return flops | {"scores": scores, "context": scores}


def block_flops(spec: ModelSpec, length: int) -> int:
    """Operations of a block's products in the forward pass, for one position."""
    return sum(_product_flops(spec, length).values())


def recomputed_flops(spec: ModelSpec, length: int, saved: Iterable[str], fused_attention: bool) -> int:
    """Operations of a block's products that its backward pass runs again, for one position, when ``saved`` are kept on
    the device or in host memory."""
    flops, saved = _product_flops(spec, length), set(saved)
    again = set(flops) - saved - {"down"}
    if fused_attention and "context" in saved:
        again -= {"scores"}
    return sum(flops[name] for name in again)
