"""Mutants: each rule of docs/semantics.md broken on purpose in one backend, as a replacement of a few words of source.

They are how the ladder is tested. A patch lives in the memory of one child process (:mod:`shared.parity.mutated`); a
mutant that no rung catches is a rung that is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Mutant:
    """One mistake that somebody could make."""

    name: str
    rule: str
    """The row of docs/semantics.md that it breaks, by the name of its trap."""
    backend: Literal["jax", "torch"]
    """Where it is broken; the other stays sound."""
    module: str
    old: str
    """A piece of the module's source that occurs once."""
    new: str

    def patched(self, source: str) -> str:
        """The module's source with the mistake in it."""
        assert source.count(self.old) == 1, f"{self.name}: {self.old!r} occurs {source.count(self.old)} times"
        return source.replace(self.old, self.new)


MUTANTS = (
    # ----------------------------------------------------------------------------------------------------- optimiser
    Mutant(
        "decay that the framework chose",
        "Defaults",
        "torch",
        "torchtrain.optimizer",
        "config.weight_decay if parameter.decayed else 0.0",
        "0.01 if parameter.decayed else 0.0",
    ),
    Mutant(
        "epsilon inside the root",
        "Form of the update",
        "jax",
        "jaxtrain.optimizer",
        "optax.scale_by_adam(beta1, beta2, config.eps)",
        "optax.scale_by_adam(beta1, beta2, eps=0.0, eps_root=config.eps)",
    ),
    Mutant(
        "decay coupled to the gradient",
        "Form of the update",
        "jax",
        "jaxtrain.optimizer",
        "optax.chain(optax.scale_by_adam(beta1, beta2, config.eps), decay)",
        "optax.chain(decay, optax.scale_by_adam(beta1, beta2, config.eps))",
    ),
    Mutant(
        "decay after momentum",
        "Form of the update",
        "jax",
        "jaxtrain.optimizer",
        "optax.chain(decay, optax.trace(config.momentum, config.nesterov))",
        "optax.chain(optax.trace(config.momentum, config.nesterov), decay)",
    ),
    Mutant(
        "momentum without Nesterov",
        "Form of the update",
        "torch",
        "torchtrain.optimizer",
        "momentum=momentum, nesterov=nesterov",
        "momentum=momentum, nesterov=False",
    ),
    Mutant(
        "bias correction in float32",
        "Bias correction",
        "jax",
        "jaxtrain.optimizer",
        "(np.asarray(beta, dtype) for beta in (config.beta1, config.beta2))",
        "(np.asarray(beta, np.float32) for beta in (config.beta1, config.beta2))",
    ),
    Mutant(
        "norms decay too",
        "What decays",
        "torch",
        "shared.models.spec",
        "return len(self.shape) >= 2",
        "return True",
    ),
    Mutant(
        "clipping without 1e-6",
        "Clipping",
        "torch",
        "torchtrain.optimizer",
        "(norm + CLIP_EPSILON)",
        "norm",
    ),
    Mutant(
        "clipping each tensor by itself",
        "Clipping",
        "jax",
        "jaxtrain.optimizer",
        "lambda gradient: gradient * factor.astype(gradient.dtype)",
        "lambda gradient: gradient * jnp.minimum(1.0, clip_norm / (global_norm([gradient]) + CLIP_EPSILON))",
    ),
    Mutant(
        "norm logged after clipping",
        "Clipping",
        "jax",
        "jaxtrain.backend",
        '"grad_norm": norm',
        '"grad_norm": optimizer.global_norm(gradients)',
    ),
    Mutant(
        "norm taken in bfloat16",
        "The norm's own precision",
        "torch",
        "torchtrain.optimizer",
        "torch._foreach_norm(list(gradients))",
        "torch._foreach_norm([gradient.bfloat16() for gradient in gradients])",
    ),
    Mutant(
        "warm-up a step late",
        "Schedules",
        "torch",
        "shared.schedule",
        "peak * (k[:warmup] + 1.0)",
        "peak * k[:warmup]",
    ),
    Mutant(
        "rate of the next update",
        "Schedules",
        "jax",
        "jaxtrain.backend",
        "rates[jnp.minimum(state.num_updates, len(rates) - 1)]",
        "rates[jnp.minimum(state.num_updates + 1, len(rates) - 1)]",
    ),
    Mutant(
        "rates rounded to float32",
        "Schedules",
        "torch",
        "torchtrain.backend",
        "torch.tensor(learning_rates(config.schedule), dtype=self.dtypes.accumulate, device=self.device)",
        "torch.tensor(learning_rates(config.schedule), dtype=torch.float32, device=self.device)",
    ),
    Mutant(
        "average that starts at zero",
        "Average of the parameters",
        "torch",
        "torchtrain.backend",
        "tensor.copy_(state.model.get_parameter(name).detach())",
        "tensor.zero_()",
    ),
    Mutant(
        "average that follows too fast",
        "Average of the parameters",
        "jax",
        "jaxtrain.optimizer",
        "(a.astype(p.dtype) * decay + p * (1.0 - decay))",
        "(a.astype(p.dtype) * (1.0 - decay) + p * decay)",
    ),
    Mutant(
        "evaluation of the parameters, not their average",
        "Average of the parameters",
        "jax",
        "jaxtrain.backend",
        "state.parameters if state.average is None else state.average",
        "state.parameters",
    ),
    # -------------------------------------------------------------------------------------------- loss, accumulation
    Mutant(
        "mean of microbatch means",
        "Mean of means",
        "torch",
        "torchtrain.backend",
        "self._loss_sum(model, microbatch, update) * weight",
        "self._loss_sum(model, microbatch, update) / microbatch.mask.sum().clamp(min=1) / self.num_microbatches",
    ),
    Mutant(
        "accumulators in bfloat16",
        "Accumulators",
        "jax",
        "jaxtrain.accumulation",
        "a + b.astype(dtype)",
        "a + b.astype(jnp.bfloat16).astype(dtype)",
    ),
    Mutant(
        "microbatches in blocks",
        "Rows of a microbatch",
        "jax",
        "jaxtrain.accumulation",
        "jnp.swapaxes(x.reshape(-1, count, *x.shape[1:]), 0, 1)",
        "x.reshape(count, -1, *x.shape[1:])",
    ),
    Mutant(
        "padding counts in the loss",
        "Labels as markers",
        "jax",
        "jaxtrain.loss",
        "jnp.sum(jnp.where(mask_BT, loss_BT, 0))",
        "jnp.sum(loss_BT)",
    ),
    Mutant(
        "loss from logits in half precision",
        "Cross entropy in half precision",
        "torch",
        "torchtrain.loss",
        "logits_BTV.to(dtype).flatten(0, 1)",
        "logits_BTV.flatten(0, 1)",
    ),
    Mutant(
        "mean of evaluation batches",
        "Evaluation",
        "jax",
        "shared.trainer",
        "sum(part.loss for part in sums) / tokens",
        "sum(part.loss / part.tokens for part in sums) / len(sums)",
    ),
    Mutant(
        "last evaluation batch counted twice",
        "Evaluation",
        "torch",
        "shared.data.dataset",
        "    batch.mask[num_rows:] = False\n",
        "",
    ),
    # -------------------------------------------------------------------------------------------------- loss scaling
    Mutant(
        "scale that grows a step late",
        "Scales",
        "jax",
        "jaxtrain.loss_scale",
        "good >= rule.growth_interval",
        "good > rule.growth_interval",
    ),
    Mutant(
        "scale that falls twice",
        "Scales",
        "torch",
        "torchtrain.loss_scale",
        "state.scale * rule.backoff",
        "state.scale * rule.backoff**2",
    ),
    Mutant(
        "gradients that stay scaled",
        "Order",
        "torch",
        "torchtrain.backend",
        "torch._foreach_div_(gradients, scale)",
        "pass",
    ),
    Mutant(
        "a skipped step advances the schedule",
        "A skipped step",
        "torch",
        "torchtrain.backend",
        "state.num_updates += finite",
        "state.num_updates += 1",
    ),
    # -------------------------------------------------------------------------------------------------------- layers
    Mutant(
        "epsilon outside the root of a norm",
        "Epsilon of a norm",
        "jax",
        "jaxtrain.models.transformer",
        "jax.lax.rsqrt(jnp.mean(jnp.square(y_BTC), axis=-1, keepdims=True) + self.spec.norm_eps)",
        "1 / (jnp.sqrt(jnp.mean(jnp.square(y_BTC), axis=-1, keepdims=True)) + self.spec.norm_eps)",
    ),
    Mutant(
        "the framework's own epsilon of a norm",
        "Epsilon of a norm",
        "torch",
        "torchtrain.models.transformer",
        "F.rms_norm(x_BTC, shape, scale, self.eps)",
        "F.rms_norm(x_BTC, shape, scale, 1e-5)",
    ),
    Mutant(
        "variance of a sample",
        "Variance of a norm",
        "jax",
        "jaxtrain.models.transformer",
        "jnp.mean(jnp.square(y_BTC), axis=-1, keepdims=True)",
        "jnp.sum(jnp.square(y_BTC), axis=-1, keepdims=True) / (y_BTC.shape[-1] - 1)",
    ),
    Mutant(
        "GELU by erf",
        "GELU",
        "torch",
        "torchtrain.models.transformer",
        "approximate=self.gelu",
        'approximate="none"',
    ),
    Mutant(
        "keys before queries in c_attn",
        "Layouts",
        "torch",
        "shared.models.gpt2",
        'for short in "qkv"',
        'for short in "kqv"',
    ),
    Mutant(
        "rotation of neighbouring elements",
        "Rotary angles",
        "torch",
        "torchtrain.models.transformer",
        "first, second = x_BTHD.to(cos.dtype).chunk(2, dim=-1)",
        "first, second = x_BTHD.to(cos.dtype)[..., ::2], x_BTHD.to(cos.dtype)[..., 1::2]",
    ),
    Mutant(
        "rotary table in bfloat16",
        "Rotary angles",
        "jax",
        "jaxtrain.models.transformer",
        "(jnp.asarray(table, dtype) for table in rope_table(",
        "(jnp.asarray(table, jnp.bfloat16).astype(dtype) for table in rope_table(",
    ),
    Mutant(
        "scores scaled by the hidden size",
        "Attention kernels",
        "jax",
        "jaxtrain.attention",
        "k_BKTD, islands) * D**-0.5",
        "k_BKTD, islands) * (H * D) ** -0.5",
    ),
    Mutant(
        "query heads share keys in turn",
        "Attention kernels",
        "torch",
        "torchtrain.attention",
        "    attend = functools.partial(\n",
        "    k_BKTD, v_BKTD = (x.repeat(1, q_BHTD.shape[1] // x.shape[1], 1, 1) for x in (k_BKTD, v_BKTD))\n"
        "    attend = functools.partial(\n",
    ),
    Mutant(
        "documents of a row see each other",
        "Packed documents",
        "jax",
        "jaxtrain.attention",
        "visible_BTS & (segments_BT[:, :, None] == segments_BT[:, None, :])",
        "visible_BTS | (segments_BT[:, :, None] < 0)",
    ),
    Mutant(
        "positions that run on over documents",
        "Packed documents",
        "torch",
        "torchtrain.models.transformer",
        "self.positions[:T] if positions_BT is None else F.embedding(positions_BT, self.positions)",
        "self.positions[:T]",
    ),
    Mutant(
        "tokens that see what follows",
        "Packed documents",
        "torch",
        "torchtrain.attention",
        "return same_BTT.tril()",
        "return same_BTT",
    ),
    # ---------------------------------------------------------------------------------------------- randomness, data
    Mutant(
        "deviation of a truncated normal",
        "Initialisers",
        "torch",
        "shared.initialization",
        "draws *= parameter.std",
        "draws *= 0.88 * parameter.std",
    ),
    Mutant(
        "one key for all parameters",
        "Order of drawing",
        "jax",
        "shared.initialization",
        'f"{seed}:{parameter.name}"',
        'f"{seed}"',
    ),
    Mutant(
        "rows in another order",
        "Samplers",
        "torch",
        "shared.data.order",
        'f"row order: seed {seed}, epoch {epoch}"',
        'f"row order: seed {seed + 1}, epoch {epoch}"',
    ),
    Mutant(
        "a split by length",
        "Split",
        "jax",
        "shared.data.preparation",
        "hashlib.blake2b(text, digest_size=32)",
        "hashlib.blake2b(str(len(text)).encode(), digest_size=32)",
    ),
    Mutant(
        "a resumed run reads from the start",
        "Resuming",
        "jax",
        "shared.data.loader",
        "self._data.batch(step, self._process",
        "self._data.batch(step - self._steps.start, self._process",
    ),
    # ----------------------------------------------------------------------------------------------------- precision
    Mutant(
        "products of default precision",
        "float32 that is not, in JAX",
        "jax",
        "jaxtrain.precision",
        '"highest"',
        '"default"',
    ),
    Mutant(
        "TF32 allowed",
        "float32 that is not, in torch",
        "torch",
        "torchtrain.precision",
        '{"exact": "highest"',
        '{"exact": "high"',
    ),
    Mutant(
        "softmax in the compute dtype",
        "Islands",
        "jax",
        "jaxtrain.attention",
        "functools.partial(reference_attention, islands=islands)",
        "functools.partial(reference_attention, islands=compute)",
    ),
    Mutant(
        "norms in the compute dtype",
        "Islands",
        "jax",
        "jaxtrain.models.transformer",
        "        dtype = self.run.dtypes.islands\n        y_BTC = x_BTC.astype(dtype)",
        "        dtype = self.run.dtypes.compute\n        y_BTC = x_BTC.astype(dtype)",
    ),
    Mutant(
        "float64 that stays float32",
        "float64 in JAX",
        "jax",
        "jaxtrain.precision",
        'jax.config.update("jax_enable_x64", True)',
        "pass",
    ),
    # ----------------------------------------------------------------------------------------------------- reporting
    Mutant(
        "padding counted as tokens",
        "Reading a loss",
        "jax",
        "jaxtrain.backend",
        '"tokens": jnp.sum(batch.mask)',
        '"tokens": jnp.int32(batch.mask.size)',
    ),
)
