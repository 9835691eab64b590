"""The operations of JAX's training step, and their formats: see :mod:`shared.policies.observed`.

They are read twice. The traced program says what was asked for, operation by operation; the compiled one says what the
compiler made of products and sums: a CPU's raises half precision to float32, and fuses the rest beyond recognition.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from shared.policies.observed import Kind, Operation

if TYPE_CHECKING:
    from jaxtrain.backend import JaxBackend

ISLANDS = {"exp", "exp2", "log", "log1p", "rsqrt", "reduce_sum", "reduce_max", "cumsum", "cumlogsumexp"}
UPDATES = {"sqrt"}
"""The gradients' norm and AdamW's; a layer's norm takes the reciprocal root."""
OVER_REPLICAS = {"psum", "psum2", "psum_invariant"}

_HLO_FORMATS = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}
_INSTRUCTION = re.compile(r"%?([\w.-]+) = (\w+)\[[\d,]*\]\S* ([\w-]+)\((.*)")


def observe(backend: JaxBackend) -> Counter[Operation]:
    """Every product and island of the step that this run takes, traced and compiled."""
    inputs = backend.abstract_inputs()
    found = Counter(_traced(jax.make_jaxpr(backend.update)(*inputs).jaxpr))
    found.update(_compiled(backend.step.lower(*inputs).compile().as_text() or ""))
    return found


def _traced(jaxpr: Any) -> Iterator[Operation]:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        operands = [x.aval for x in equation.invars if jnp.issubdtype(getattr(x.aval, "dtype", int), jnp.floating)]
        if operands and (name == "dot_general" or name in ISLANDS | UPDATES | OVER_REPLICAS):
            coarsest = str(min((x.dtype for x in operands), key=lambda dtype: jnp.finfo(dtype).nmant))
            result = equation.outvars[0].aval
            kind: Kind = "product" if name == "dot_general" else "island"
            if name in OVER_REPLICAS:
                kind = "sum over replicas"
            elif name in UPDATES:
                kind = "update"
            elif name == "reduce_sum" and result.ndim == 1 and operands[0].ndim >= 3:
                kind = "vector gradient"
            exactness = _exactness(equation.params["precision"]) if kind == "product" and coarsest == "float32" else ""
            yield Operation(kind, name, coarsest, str(result.dtype), exactness, "traced")
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _traced(inner)


def _exactness(precision: Any) -> str:
    chosen = precision[0] if isinstance(precision, tuple) else precision
    if chosen == jax.lax.Precision.HIGHEST:
        return "exact"
    return "tf32" if chosen == jax.lax.Precision.HIGH or "TF32" in str(chosen) else "bfloat16"


def _compiled(text: str) -> Iterator[Operation]:
    formats: dict[str, str] = {}
    instructions = []
    for match in map(_INSTRUCTION.search, text.splitlines()):
        if match:
            name, result, operation, arguments = match.groups()
            formats[name] = result
            instructions.append((result, operation, arguments))
    for result, operation, arguments in instructions:
        kind: Kind | None = None
        if operation in ("dot", "convolution") or (operation == "custom-call" and "matmul" in arguments):
            kind = "product"
        elif operation.startswith("all-reduce"):
            kind = "sum over replicas"
        if kind is None or result not in _HLO_FORMATS:
            continue
        names = re.findall(r"%([\w.-]+)", arguments.split("), ")[0])
        operands = [_HLO_FORMATS[formats[name]] for name in names if formats.get(name) in _HLO_FORMATS]
        if operands:
            coarsest = min(operands, key=lambda name: jnp.finfo(name).nmant)
            # How exact a float32 product is was asked for in the trace; a CPU's program no longer says.
            yield Operation(kind, operation, coarsest, _HLO_FORMATS[result], "", "compiled")
