"""Rules of the update that both backends follow, whatever library carries them out.

- Clipping: the norm is over all parameters at once, in float32 or better, after unscaling; gradients are multiplied by
  min(1, clip_norm / (norm + 1e-6)). The norm that is logged is the one before clipping.
- Weight decay reaches the parameters that :attr:`shared.models.spec.Parameter.decayed` marks.
- AdamW: p <- p - lr * (m_hat / (sqrt(v_hat) + eps) + weight_decay * p).
- SGD: g <- g + weight_decay * p; buf <- momentum * buf + g; p <- p - lr * buf (nesterov: g + momentum * buf).
- EMA: average <- decay * average + (1 - decay) * p after each update; it starts as the initial parameters.
- A skipped update (see :mod:`shared.policies.precision`) changes none of this state.
"""

CLIP_EPSILON = 1e-6
"""Added to the norm before dividing, as ``torch.nn.utils.clip_grad_norm_`` does; optax does not."""
