"""The command line of both backends: ``python -m jaxtrain`` and ``python -m torchtrain``.

Exit status: 0 when the run ended or was interrupted and saved; 1 when it diverged; 2 when something that the user gave
is wrong, with one line on standard error that says what.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shared.arguments import Parser, exit_status

if TYPE_CHECKING:
    from shared.backend import Framework


def parse(argv: Sequence[str], framework: Framework) -> argparse.Namespace:
    """The command line. Raises UserError when it cannot be read."""
    package = f"{framework.name}train"
    parser = Parser(
        prog=f"python -m {package}",
        description=f"Train a recipe with {framework.name}. Running the same command again goes on where it stopped.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the recipe, a YAML file")
    parser.add_argument("--target", metavar="NAME", help="entry of the config's targets to apply (default: detected)")
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help=f"where the run is kept (default: runs/CONFIG-{framework.name})"
    )
    parser.add_argument(
        "--stop-at-step", type=int, metavar="N", help="save and stop after step N, as an interrupt would"
    )
    parser.add_argument(
        "--init-from",
        type=Path,
        metavar="DIR",
        help="begin with what is there: a state that jaxtrain.export or torchtrain.export wrote, which is continued, "
        "or the weights of a Hugging Face checkpoint",
    )
    parser.add_argument(
        "--trace",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="write every named tensor of step N to traces/N.npz in the run directory; may be given again",
    )
    parser.add_argument(
        "--explain",
        choices=["precision"],
        help="print the number format of every role, and of every operation of a step, instead of training",
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing while training")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key.path=value",
        help="settings that replace the config's, such as batch.global_batch=8",
    )
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str], framework: Framework) -> int:
    """Run the command; returns the exit status."""
    return exit_status(lambda: _train(parse(argv, framework), list(argv), framework))


def _train(arguments: argparse.Namespace, argv: list[str], framework: Framework) -> int:
    from shared.config.load import load_config
    from shared.run import train_run

    resolved = load_config(arguments.config, arguments.overrides, arguments.target, framework.detect_target)
    if arguments.explain:
        from shared.explain import explain_precision

        return explain_precision(resolved.config, framework.backend(resolved.config))
    directory = arguments.run_dir or Path("runs") / f"{Path(arguments.config).stem}-{framework.name}"
    command = ["python", "-m", f"{framework.name}train", *argv]
    return train_run(
        resolved,
        framework,
        directory,
        command,
        stop_at_step=arguments.stop_at_step,
        traced=arguments.trace,
        init_from=arguments.init_from,
        quiet=arguments.quiet,
    )
