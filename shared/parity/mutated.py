"""Run one backend with a mutant's patch applied in memory: ``python -m shared.parity.mutated NAME jaxtrain ...``.

The patch replaces a piece of one module's source while that module is imported. Nothing is written, and the product
has no switch for it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType, ModuleType

from shared.parity.mutants import MUTANTS, Mutant


class _PatchedLoader(importlib.machinery.SourceFileLoader):
    """Compiles a module from its source with the patch applied; never reads or writes cached bytecode."""

    mutant: Mutant

    def get_code(self, fullname: str) -> CodeType:
        source = self.mutant.patched(self.get_data(self.path).decode())
        return compile(source, self.path, "exec", dont_inherit=True)


class Patch(importlib.abc.MetaPathFinder):
    """Puts a mutant's module in the place of the original when it is imported."""

    def __init__(self, mutant: Mutant):
        self.mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.mutant.module:
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.origin is not None
        loader = _PatchedLoader(fullname, spec.origin)
        loader.mutant = self.mutant
        return importlib.util.spec_from_file_location(fullname, spec.origin, loader=loader)


def main(argv: Sequence[str]) -> None:
    """Patch, then become the command."""
    name, package, *arguments = argv
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    assert mutant.module not in sys.modules, f"{mutant.module} is imported too early to be patched"
    sys.meta_path.insert(0, Patch(mutant))
    sys.argv = [package, *arguments]
    runpy.run_module(package, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
