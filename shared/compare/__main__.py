"""``python -m shared.compare D1 D2``; exit status 0: the same run, 1: not the same run, 2: the input is wrong."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from shared.arguments import Parser, exit_status
from shared.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return exit_status(lambda: _compare(_parser().parse_args(argv)))


def _compare(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from shared.compare.comparison import compare_runs
    from shared.compare.report import report
    from shared.compare.runs import load_run
    from shared.compare.table import print_table
    from shared.compare.verdict import reasons
    from shared.run_directory import replace_file
    from shared.strict_json import dumps

    if len(arguments.runs) != 2:
        raise UserError(f"compare takes two run directories, {len(arguments.runs)} given")
    first, second = map(load_run, arguments.runs)
    comparison = compare_runs(first, second, arguments.limit)
    if arguments.json:
        replace_file(arguments.json, dumps(report(comparison), indent=2) + "\n")
    if arguments.picture:
        from shared.compare.picture import draw

        draw(comparison, arguments.picture)
    console = Console()
    # Without a terminal rich assumes 80 columns, and would fold hashes for no one.
    print_table(comparison, console if console.is_terminal else Console(width=120))
    return 1 if reasons(comparison) else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m shared.compare",
        description="Are two runs the same run, and which is faster? Needs nothing but their directories.",
        epilog="Exit status: 0 the same run, 1 not the same run, 2 wrong input.",
    )
    parser.add_argument("runs", nargs="+", metavar="D", help="run directory; two of them")
    parser.add_argument("--json", type=Path, metavar="F", help="write the comparison as JSON, for other programs")
    parser.add_argument("--picture", type=Path, metavar="F.png", help="draw both loss curves (needs matplotlib)")
    parser.add_argument(
        "--limit",
        type=_positive,
        metavar="X",
        help="how far the losses may differ over the first 300 steps (default: by precision; on average 1e-4 in "
        "float32 and 2e-2 in bfloat16 and float16, at most 1e-12 of the loss in float64)",
    )
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
