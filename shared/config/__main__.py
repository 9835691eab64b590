"""Check a config, or write its schema: ``python -m shared.config --help``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from shared.arguments import Parser, exit_status
from shared.config.document import complaint


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 done, 2 the user's input is wrong (one line on stderr)."""
    return exit_status(lambda: _run(argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m shared.config", description="Check a config, or write the schema of configs.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", metavar="FILE", help="check a config and print the hash of its recipe")
    what.add_argument("--schema", nargs="?", const="-", metavar="FILE", help="write the JSON Schema that editors read")
    what.add_argument("--reference", nargs="?", const="-", metavar="FILE", help="write docs/configuration.md")
    parser.add_argument("--target", help="with --check: apply this entry of the config's targets")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="with --check: overrides of the config")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.check is not None:
        return _check(arguments.check, arguments.overrides, arguments.target)
    if arguments.overrides or arguments.target is not None:
        parser.error("overrides and --target go with --check")
    from shared.config.reference import json_schema_text, reference_text

    if arguments.schema is not None:
        return _write(json_schema_text(), arguments.schema)
    return _write(reference_text(), arguments.reference)


def _check(path: str, overrides: Sequence[str], target: str | None) -> int:
    from shared.config.load import load_config
    from shared.config.recipe import recipe_hash

    print(f"ok, recipe {recipe_hash(load_config(path, overrides, target).config)}")
    return 0


def _write(text: str, path: str) -> int:
    if path == "-":
        sys.stdout.write(text)
        return 0
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise complaint(path, f"cannot be written: {getattr(error, 'strerror', None) or error}") from None
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
