"""Command lines whose complaints are one line on standard error, with exit status 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from shared.errors import UserError


class Parser(argparse.ArgumentParser):
    """A parser that raises UserError instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def exit_status(command: Callable[[], int]) -> int:
    """What the command returns, or 2 after one line for the user when something that they gave is wrong."""
    try:
        return command()
    except UserError as error:
        # Names of files and keys come from the user and may hold anything; a line stays a line.
        line = "".join(c if c.isprintable() else " " for c in " ".join(str(error).split()))
        print(f"error: {line}", file=sys.stderr)
        return 2
