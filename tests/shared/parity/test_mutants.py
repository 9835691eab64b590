"""Mutants are patches that fit, one for each rule that a run can break."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shared.parity.hunt import small_ladder
from shared.parity.ladder import jobs_of
from shared.parity.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[3]

# Rules without a mutant: what they speak of cannot happen in a run that starts, changes no number, or is a matter of
# what is told afterwards. Tests alone hold them; docs/semantics.md names these.
WITHOUT = {
    "Beyond the schedule",
    "No valid token",
    "Ids that are too large",
    "A first step that is skipped",
    "Without loss scaling",
    "A row that sees nothing",
    "What remat costs",
    "Shares of a batch",
    "autocast",
    "Islands that leak",
    "What a device cannot do",
    "What really ran",
    "Half precision hides mistakes",
    "Speed",
    "Loss of a token",
    "NaN in a file",
    "Curves that look alike",
    "Another mesh",
    "The other framework",
    "Norms and embeddings of Gemma, norms of Qwen3",
}


def rules() -> set[str]:
    text = (ROOT / "docs" / "semantics.md").read_text()
    return {name.rstrip(".") for name in re.findall(r"^\| \*\*([^*]+)\*\*", text, flags=re.MULTILINE)}


def test_every_rule_has_a_mutant_or_a_reason() -> None:
    broken = {mutant.rule for mutant in MUTANTS}
    assert broken <= rules(), broken - rules()
    assert broken | WITHOUT == rules() and not broken & WITHOUT


def test_there_are_enough_mutants_with_names_of_their_own_in_both_backends() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names)) >= 30
    for backend in ("jax", "torch"):
        assert sum(mutant.backend == backend for mutant in MUTANTS) > len(MUTANTS) / 3


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_patch_fits_its_module_and_compiles(mutant: Mutant) -> None:
    spec = importlib.util.find_spec(mutant.module)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    assert mutant.patched(source) != source
    compile(mutant.patched(source), spec.origin, "exec")
    assert mutant.module.startswith((f"{mutant.backend}train.", "shared."))


def test_a_patch_lives_in_one_process_only(tmp_path: Path) -> None:
    """The help of a patched command names no mutant, and the file on disk stays what it is."""
    mutant = next(mutant for mutant in MUTANTS if mutant.module == "shared.schedule")
    origin = Path(importlib.import_module(mutant.module).__file__ or "")
    before = origin.read_bytes()
    code = (
        "import sys; from shared.parity.mutated import Patch; from shared.parity.mutants import MUTANTS;"
        f"sys.meta_path.insert(0, Patch(next(m for m in MUTANTS if m.name == {mutant.name!r})));"
        "import shared.schedule, inspect; from shared.config.schema import ConstantSchedule;"
        "s = ConstantSchedule(name='constant', steps=4, learning_rate=1.0, warmup_steps=2);"
        "print(*shared.schedule.learning_rates(s))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["0.0", "0.5", "1.0", "1.0"], done.stderr
    assert origin.read_bytes() == before


def test_the_small_ladder_has_every_kind_of_rung(tmp_path: Path) -> None:
    rungs = small_ladder(tmp_path)
    assert {rung.name for rung in rungs} >= {
        "fingerprints", "float64 step", "float64", "loss scale", "dtypes", "execution", "replicas", "resumed",
    }  # fmt: skip
    assert all(job.config.is_file() for job in jobs_of(rungs))
