"""``--explain precision``: the policy role by role, and what one training step of this backend really does."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import TYPE_CHECKING

from shared.policies.observed import Operation, asked, judge
from shared.policies.precision import PrecisionPolicy, precision_policy

if TYPE_CHECKING:
    from shared.backend import Backend
    from shared.config.schema import Config


def explain_precision(config: Config, backend: Backend) -> int:
    """Print both tables; returns the exit status: 1 when an operation is coarser than the policy says."""
    from rich.console import Console

    policy = precision_policy(config.precision)
    observed = backend.observe()
    console = Console(quiet=backend.process != 0)
    if not console.is_terminal:
        console.width = 120
    console.print(_roles(config, policy))
    console.print(_operations(observed, policy))
    coarser = sum(judge(operation, policy) == "coarser" for operation in observed)
    console.print(f"{coarser} operations are coarser than the policy says." if coarser else "As the policy says.")
    return 1 if coarser else 0


def _roles(config: Config, policy: PrecisionPolicy) -> object:
    from rich import box
    from rich.table import Table

    table = Table("role", "format", "from", box=box.SIMPLE_HEAD, pad_edge=False)
    for field in fields(policy):
        value = getattr(policy, field.name)
        if field.name == "loss_scale":
            value = (
                "none" if value is None else f"from {value.initial:g}, x{value.growth:g} after {value.growth_interval}"
            )
        stated = getattr(config.precision, field.name) is not None
        table.add_row(field.name, str(value), "stated" if stated else f"preset {config.precision.preset}")
    return table


def _operations(observed: Counter[Operation], policy: PrecisionPolicy) -> object:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("operation", "kind", "operands", "result", "asked", "seen"):
        table.add_column(name)
    table.add_column("times", justify="right")
    table.add_column("verdict")
    for operation, count in sorted(observed.items()):
        verdict = judge(operation, policy)
        operands = f"{operation.operands} {operation.exactness}".rstrip()
        cells = (operation.name, operation.kind, operands, operation.result, asked(operation, policy), operation.source)
        table.add_row(*cells, str(count), verdict, style="red" if verdict == "coarser" else "")
    return table
