"""What really ran, held against the precision policy: formats are checked, not believed.

A backend lists the operations of one training step with the formats of their operands. Three kinds matter. *Products*
of matrices must have operands no coarser than the compute role, and float32 ones the exactness that the matmul role
asks for. *Islands* (exponentials, logarithms, roots, normalisations, sums) must be no coarser than the islands role,
and the *update* (the gradients' norm and the optimiser) no coarser than the accumulate role. One sum is excused: the
gradient of a vector (a bias) over rows and positions, which has the compute dtype of what it sums. Finer than asked is
told, and is no mistake: a CPU has few half-precision products and raises the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shared.policies.precision import PrecisionPolicy

Kind = Literal["product", "island", "vector gradient", "sum over replicas", "update"]

_BITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
"""Bits after the point: what decides rounding."""

_EXACTNESS = {"exact": 2, "tf32": 1, "bfloat16": 0}


@dataclass(frozen=True, order=True)
class Operation:
    """One kind of operation, and how often a step has it."""

    kind: Kind
    name: str
    """As the framework calls it."""
    operands: str
    """Format of the coarsest floating-point operand."""
    result: str
    exactness: str
    """Of a float32 product: ``exact``, ``tf32`` or ``bfloat16``; empty where it does not matter."""
    source: str
    """``traced``: the program that was asked for; ``compiled``: what the compiler made of it; ``ran``: as it ran."""


def asked(operation: Operation, policy: PrecisionPolicy) -> str:
    """The format that the policy wants for the operands of this operation."""
    match operation.kind:
        case "product" | "vector gradient":
            return policy.compute
        case "sum over replicas":
            return policy.reduce
        case "update":
            return policy.accumulate
        case _:
            return policy.islands


def judge(operation: Operation, policy: PrecisionPolicy) -> Literal["as asked", "finer", "coarser"]:
    """How the operation's formats compare with the policy's."""
    wanted, found = _BITS[asked(operation, policy)], _BITS[operation.operands]
    if found < wanted:
        return "coarser"
    if operation.exactness and operation.operands == "float32":
        exactness, least = _EXACTNESS[operation.exactness], _EXACTNESS[policy.matmul]
        if policy.compute == "float32" and exactness < least:
            return "coarser"
    return "finer" if found > wanted else "as asked"
