"""Causal attention in PyTorch behind one interface: a plain reference, and the fused kernels behind SDPA.

Shapes: B rows, T positions, H query heads, K key and value heads (H a multiple of K), D elements a head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F

from torchtrain.tensors import named

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(q_BTHD, k_BTKD, v_BTKD, visible_BTT or None) -> context_BTHD."""


def choose_attention(wanted: Literal["auto", "reference", "fused"], islands: torch.dtype) -> Attention:
    """The implementation to use; the fused one runs on every device."""
    if wanted == "reference":
        return functools.partial(reference_attention, islands=islands)
    return fused_attention


def visibility(segments_BT: torch.Tensor | None) -> torch.Tensor | None:
    """bool [B, T, T]: which position (row) sees which (column); None when causality is all there is."""
    if segments_BT is None:
        return None
    same_BTT = segments_BT[:, :, None] == segments_BT[:, None, :]
    return same_BTT.tril()


def reference_attention(
    q_BTHD: torch.Tensor,
    k_BTKD: torch.Tensor,
    v_BTKD: torch.Tensor,
    visible_BTT: torch.Tensor | None,
    *,
    islands: torch.dtype,
) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v with scores and softmax in the islands' dtype (Vaswani et al. 2017, eq. 1).

    PyTorch has no product of half-precision operands that returns unrounded float32 sums, so q and k are raised first:
    the only product in this backend that is not in the compute dtype, with the numbers that JAX's has.
    """
    B, T, H, D = q_BTHD.shape
    K = k_BTKD.shape[2]
    q_BTKGD = q_BTHD.view(B, T, K, H // K, D).to(islands)
    scores_BKGTS = torch.einsum("btkgd,bskd->bkgts", q_BTKGD, k_BTKD.to(islands)) * D**-0.5
    if visible_BTT is None:
        visible_BTT = torch.ones(T, T, dtype=torch.bool, device=q_BTHD.device).tril()[None]
    scores_BKGTS = scores_BKGTS.masked_fill(~visible_BTT[:, None, None], torch.finfo(islands).min)
    weights_BKGTS = scores_BKGTS.softmax(dim=-1).to(v_BTKD.dtype)
    product = functools.partial(torch.einsum, "bkgts,bskd->btkgd")
    return named("context", product, weights_BKGTS, v_BTKD).reshape(B, T, H, D)


def fused_attention(
    q_BTHD: torch.Tensor, k_BTKD: torch.Tensor, v_BTKD: torch.Tensor, visible_BTT: torch.Tensor | None
) -> torch.Tensor:
    """``scaled_dot_product_attention``: whichever kernel of PyTorch's suits the device."""
    q_BHTD, k_BKTD, v_BKTD = (x.transpose(1, 2) for x in (q_BTHD, k_BTKD, v_BTKD))
    attend = functools.partial(
        F.scaled_dot_product_attention,
        attn_mask=None if visible_BTT is None else visible_BTT[:, None],
        is_causal=visible_BTT is None,
        enable_gqa=q_BHTD.shape[1] != k_BKTD.shape[1],
    )
    return named("context", attend, q_BHTD, k_BKTD, v_BKTD).transpose(1, 2)
