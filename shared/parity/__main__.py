"""``python -m shared.parity``: climb the ladder with a recipe, or let the mutants try it.

Exit status: 0 when every rung held (and every mutant was caught), 1 when one did not, 2 when the input is wrong.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.arguments import Parser, exit_status
from shared.errors import UserError, nearest

if TYPE_CHECKING:
    from shared.parity.rungs import Rung, Verdict


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line. Raises UserError when it cannot be read."""
    parser = Parser(
        prog="python -m shared.parity",
        description="Do both backends train this recipe as one run? Both frameworks must be installed, or --against "
        "given.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="the recipe")
    parser.add_argument("--against", type=Path, metavar="DIR", help="hold runs made here to this one from elsewhere")
    parser.add_argument("--mutants", action="store_true", help="break each rule on purpose; the ladder must notice")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="only this rung, or this mutant")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="updates of the long rungs (default 300)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.add_argument("--work", type=Path, metavar="DIR", help="where runs are kept (default: runs/parity-CONFIG)")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings that replace the config's")
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    return exit_status(lambda: _run(parse(argv)))


def _run(arguments: argparse.Namespace) -> int:
    if arguments.config is None and not arguments.mutants:
        raise UserError("--config FILE is needed to climb the ladder, or --mutants to test it")
    if arguments.steps < 2:
        raise UserError(f"--steps must be at least 2, not {arguments.steps}")
    name = arguments.config.stem if arguments.config else "mutants"
    work = arguments.work or Path("runs") / f"parity-{name}"
    result: dict[str, Any] = {}
    if arguments.config is not None:
        result["rungs"] = _climb(arguments, work / "ladder")
    if arguments.mutants:
        from shared.parity.hunt import hunt

        result["mutants"] = hunt(work / "mutants", [] if arguments.config else arguments.only)
    ok = all(rung["ok"] for rung in result.get("rungs", ())) and all(m["caught"] for m in result.get("mutants", ()))
    if arguments.json is not None:
        from shared.run_directory import replace_file
        from shared.strict_json import dumps

        replace_file(arguments.json, dumps(result | {"ok": ok}, indent=2) + "\n")
    return 0 if ok else 1


def _climb(arguments: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    from shared.config.load import load_config
    from shared.parity import against, ladder
    from shared.parity.bisect import bisect
    from shared.parity.jobs import BACKENDS, Runner
    from shared.parity.view import LadderView

    config = load_config(arguments.config, arguments.overrides).config
    length = ladder.Length(full=arguments.steps)
    if arguments.against is not None:
        rungs = against.rungs(arguments.config, config, arguments.overrides, arguments.against)
    else:
        rungs = ladder.ladder(arguments.config, config, arguments.overrides, length)
    names = [rung.name for rung in rungs]
    for name in arguments.only:
        if name not in names:
            raise UserError(f"--only {name}: no such rung; {nearest(name, names)}")
    rungs = [rung for rung in rungs if not arguments.only or rung.name in arguments.only]
    shutil.rmtree(work, ignore_errors=True)
    # Both backends run side by side: threads that wait for a core by spinning would take it from the other.
    runner = Runner(work, threads=max(1, (os.cpu_count() or 2) // len(BACKENDS)))
    found: list[tuple[Rung, Verdict]] = []
    results: dict[str, Any] = {}
    with LadderView(rungs, runner) as view:
        for rung, verdict in ladder.climb(rungs, runner, results, view.started):
            view.judged(rung, verdict)
            found.append((rung, verdict))
    for rung, verdict in found:
        if not verdict.ok and verdict.tensor != "run" and (culprit := bisect(rung, results, runner)):
            print(f"{rung.name}: {culprit}")
    failed = [rung.name for rung, verdict in found if not verdict.ok]
    print(
        f"Not the same run: {', '.join(failed)}; the runs are in {work}"
        if failed
        else f"Same run: all {len(found)} rungs hold"
    )
    return [
        {
            "name": rung.name,
            "measured": v.measured,
            "limit": v.limit,
            "ok": v.ok,
            "detail": v.detail,
            "tensor": v.tensor,
        }
        for rung, v in found
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
