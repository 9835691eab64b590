"""The command line of ``python -m jaxtrain.export`` and ``python -m torchtrain.export``.

A checkpoint is read tensor by tensor from where it lies: neither an accelerator nor memory for the model is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shared.arguments import Parser, exit_status

if TYPE_CHECKING:
    from shared.backend import Framework


def main(argv: Sequence[str], framework: Framework) -> int:
    """Run the command; returns the exit status."""
    return exit_status(lambda: _export(_parse(argv, framework), framework))


def _parse(argv: Sequence[str], framework: Framework) -> argparse.Namespace:
    package = f"{framework.name}train"
    parser = Parser(
        prog=f"python -m {package}.export",
        description="Write the state of a run under names that both backends, and Hugging Face's libraries, know.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help=f"run directory of {package}")
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint to export (default: the newest)")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="new folder to write")
    parser.add_argument(
        "--format",
        choices=["state", "huggingface"],
        default="state",
        help="state: everything, to be continued by either backend with --init-from (default); huggingface: the "
        "weights, for transformers",
    )
    parser.add_argument(
        "--weights",
        choices=["parameters", "average"],
        help="which weights --format huggingface writes (default: the average where the recipe keeps one, as "
        "evaluations do)",
    )
    return parser.parse_args(argv)


def _export(arguments: argparse.Namespace, framework: Framework) -> int:
    from shared.errors import UserError
    from shared.handover import write_handover
    from shared.huggingface import write_pretrained
    from shared.stored_run import evaluated_role, open_stored_run

    if arguments.weights and arguments.format == "state":
        raise UserError("--weights belongs to --format huggingface; a state holds both")
    run = open_stored_run(arguments.run, arguments.step, framework)
    state, spec = run.state(framework), run.spec
    if arguments.format == "state":
        write_handover(arguments.to, state, spec, run.checkpoint.manifest)
        what, how = ", ".join(state.roles), f"continue it with --init-from {arguments.to}"
    else:
        role = arguments.weights or evaluated_role(state)
        if role not in state.roles:
            raise UserError(f"--weights {role}: the recipe keeps no average; nearest valid: --weights parameters")
        write_pretrained(arguments.to, run.config, spec, state, role)
        what, how = role, f"load it with transformers.AutoModelForCausalLM.from_pretrained({str(arguments.to)!r})"
    size = sum(path.stat().st_size for path in arguments.to.iterdir())
    print(f"{arguments.to}: step {run.checkpoint.step} of {arguments.run}: {what}; {size / 2**20:,.1f} MiB; {how}")
    return 0
