"""Cross entropy in PyTorch, from all logits at once or from chunks of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def cross_entropy_sum(
    logits_BTV: torch.Tensor, targets_BT: torch.Tensor, mask_BT: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Sum over valid positions of -log softmax(logits)[target], in nats; the logits are raised to ``dtype`` first."""
    loss_N = F.cross_entropy(logits_BTV.to(dtype).flatten(0, 1), targets_BT.flatten(), reduction="none")
    return torch.where(mask_BT.flatten(), loss_N, 0.0).sum()


def chunked_cross_entropy_sum(
    hidden_BTC: torch.Tensor,
    head_VC: torch.Tensor,
    targets_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    chunk: int,
    logits: torch.dtype,
    islands: torch.dtype,
) -> torch.Tensor:
    """:func:`cross_entropy_sum` of the logits ``hidden head^T``, of which each position has no more than ``chunk`` at a
    time.

    The forward pass keeps a running log-sum-exp (Milakov & Gimelshein 2018, arXiv:1805.02867); the backward pass makes
    each chunk's logits again. ``logits`` and ``islands`` are the dtypes of those roles.
    """
    loss: torch.Tensor = _Chunked.apply(
        hidden_BTC.flatten(0, 1), head_VC, targets_BT.flatten(), mask_BT.flatten(), chunk, logits, islands
    )
    return loss


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        hidden_NC, head_VC, targets_N, mask_N, chunk, logits, islands = inputs
        logsumexp_N = hidden_NC.new_full(targets_N.shape, -torch.inf, dtype=islands)
        target_N = torch.zeros_like(logsumexp_N)
        for start in range(0, len(head_VC), chunk):
            logits_NK = head_product(hidden_NC, head_VC[start : start + chunk], logits).to(islands)
            logsumexp_N = torch.logaddexp(logsumexp_N, logits_NK.logsumexp(dim=-1))
            inside_N, column_N = _columns(targets_N, start, logits_NK.shape[1])
            target_N += torch.where(inside_N, logits_NK.gather(1, column_N[:, None])[:, 0], 0.0)
        ctx.save_for_backward(hidden_NC, head_VC, targets_N, mask_N, logsumexp_N)
        ctx.chunk, ctx.logits, ctx.islands = chunk, logits, islands
        return torch.where(mask_N, logsumexp_N - target_N, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hidden_NC, head_VC, targets_N, mask_N, logsumexp_N = ctx.saved_tensors
        weight_N1 = torch.where(mask_N, gradients[0], 0.0)[:, None]
        hidden_gradient_NC = torch.zeros_like(hidden_NC, dtype=ctx.islands)
        head_gradient_VC = torch.empty_like(head_VC)
        for start in range(0, len(head_VC), ctx.chunk):
            rows_KC = head_VC[start : start + ctx.chunk]
            logits_NK = head_product(hidden_NC, rows_KC, ctx.logits).to(ctx.islands)
            inside_N, column_N = _columns(targets_N, start, len(rows_KC))
            gradient_NK = logits_NK.sub_(logsumexp_N[:, None]).exp_()
            gradient_NK.scatter_add_(1, column_N[:, None], -inside_N[:, None].to(ctx.islands))
            gradient_NK = gradient_NK.mul_(weight_N1).to(hidden_NC.dtype)
            hidden_gradient_NC += gradient_NK @ rows_KC.to(hidden_NC.dtype)
            head_gradient_VC[start : start + ctx.chunk] = gradient_NK.T @ hidden_NC
        return hidden_gradient_NC.to(hidden_NC.dtype), head_gradient_VC, None, None, None, None, None


def _columns(targets_N: torch.Tensor, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(whether each target is in the chunk, its column there, 0 for the others)."""
    column_N = targets_N - start
    inside_N = (column_N >= 0) & (column_N < count)
    return inside_N, torch.where(inside_N, column_N, 0)


def head_product(hidden: torch.Tensor, head_VC: torch.Tensor, logits: torch.dtype) -> torch.Tensor:
    """hidden head^T with operands in the compute dtype, which comes out in ``logits``.

    PyTorch has no product that returns a wider dtype than its operands on every device, so where ``logits`` is wider
    they are raised first: the same numbers.
    """
    return F.linear(hidden.to(logits), head_VC.to(hidden.dtype).to(logits))
