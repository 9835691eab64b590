"""What a run begins with: the first draws, the state of another run, or weights from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shared.backend import StateSource
from shared.config.schema import Config
from shared.errors import UserError
from shared.handover import HandOver
from shared.huggingface import Pretrained
from shared.initialization import FirstDraws, weights_fingerprint
from shared.manifest import MANIFEST
from shared.models import ModelSpec
from shared.run_directory import RunDirectory


@dataclass(frozen=True)
class Origin:
    """What a run's first state is made of."""

    step: int = 0
    """Steps it has seen."""
    source: StateSource | None = None
    """None for the first draws."""
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    """``initial_weights``, and ``data`` where the run began elsewhere."""
    path: str | None = None
    """Where the state came from; None for the first draws."""
    described: str | None = None
    """A line about it for the person who watches."""


def origin_of(path: Path | None, config: Config, spec: ModelSpec) -> Origin:
    """The origin that ``--init-from`` names, or the first draws. Raises UserError for what does not fit the recipe."""
    if path is None:
        draws = FirstDraws(config.seed)
        return Origin(fingerprints={"initial_weights": _fingerprint(spec, draws)})
    if (path / MANIFEST).exists():
        return _continued(path, config, spec)
    if (path / "config.json").exists():
        weights = Pretrained(path, config.model, spec)
        described = f"began with the weights in {path}"
        return Origin(0, weights, {"initial_weights": _fingerprint(spec, weights)}, str(path), described)
    if RunDirectory(path).exists():
        package = f"{RunDirectory(path).read_run()['backend']}train"
        raise UserError(
            f"--init-from {path}: is a run; export its state first: python -m {package}.export {path} --to DIR"
        )
    raise UserError(
        f"--init-from {path}: neither an export ({MANIFEST}) nor a Hugging Face checkpoint (config.json) is there"
    )


def _continued(path: Path, config: Config, spec: ModelSpec) -> Origin:
    state = HandOver(path, config, spec)
    backend = state.manifest["backend"]
    described = f"goes on from step {state.step} of {backend}train, in {path}"
    return Origin(state.step, state, state.manifest["fingerprints"], str(path), described)


def _fingerprint(spec: ModelSpec, source: StateSource) -> str:
    return weights_fingerprint(spec, lambda parameter: source.read("parameters", parameter))


def require_same_origin(directory: RunDirectory, path: Path | None) -> None:
    """Refuse to begin a run again, before its first checkpoint, with other weights than it began with."""
    if not directory.exists():
        return
    before = directory.read_run().get("init_from")
    if before != (None if path is None else str(path)):
        given = "without --init-from" if before is None else f"with --init-from {before}"
        raise UserError(f"{directory.path} holds a run that began {given}; do the same, or choose another --run-dir")
