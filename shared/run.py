"""One run from its resolved config to its end: the run directory, what identifies the run, and the last line."""

from __future__ import annotations

import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shared.backend import Backend, Framework
from shared.checkpoint import Checkpoints
from shared.config.load import Resolved
from shared.config.recipe import recipe_hash, recipe_of
from shared.config.schema import Config
from shared.data import Data, open_data
from shared.errors import UserError
from shared.initialization import weights_fingerprint
from shared.interrupt import Interrupt
from shared.models import model_spec
from shared.recorder import Recorder, Unrecorded
from shared.run_directory import RunDirectory
from shared.schedule import learning_rates, table_fingerprint
from shared.step_log import Diverged
from shared.trainer import Outcome, Trainer


def train_run(
    resolved: Resolved,
    framework: Framework,
    path: Path,
    command: list[str],
    stop_at_step: int | None,
    traced: list[int],
    quiet: bool,
) -> int:
    """Train; returns the exit status."""
    config = resolved.config
    directory = RunDirectory(path)
    checkpoints = Checkpoints(directory.checkpoints, config.checkpoint.keep)
    total = config.schedule.steps
    if stop_at_step is not None and stop_at_step < 1:
        raise UserError(f"--stop-at-step must be at least 1, not {stop_at_step}")
    facts = {"backend": framework.name, "recipe_hash": recipe_hash(config), "recipe": recipe_of(config)}
    _require_same_run(directory, checkpoints, facts)
    latest = checkpoints.latest()
    done, last = latest.step if latest else 0, min(total, stop_at_step or total)
    if done >= last:
        print(f"{path} is already trained to step {done} of {total}; nothing to do")
        return 0
    for step in traced:
        if not done < step <= last:
            raise UserError(f"--trace {step}: this run goes from step {done + 1} to {last}; choose one of them")

    spec = model_spec(config.model)
    data = open_data(config)
    backend = framework.backend(config)
    config = backend.config
    traces = {step: directory.traces / f"{step}.npz" for step in traced}
    if backend.process != 0:
        return _follow(config, backend, data, checkpoints, facts, traces, last)
    with directory, Interrupt() as interrupt:
        device = backend.describe()
        fingerprints = {
            "recipe": facts["recipe_hash"],
            "data": data.fingerprint,
            "initial_weights": weights_fingerprint(spec, config.seed),
            "learning_rates": table_fingerprint(learning_rates(config.schedule)),
        }
        directory.write_run(
            {
                **facts,
                "config": config.model_dump(mode="json"),
                "target": resolved.target,
                "fingerprints": fingerprints,
                "device": {name: value for name, value in asdict(device).items() if name != "versions"},
                "versions": {"python": sys.version.split()[0], **device.versions},
                "command": command,
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
                "num_parameters": spec.num_parameters,
                "summary": None,
            }
        )
        directory.truncate_after(done)
        with Recorder(directory, last, config.logging.tensorboard, quiet, start_step=done) as recorder:
            trainer = Trainer(
                config=config,
                backend=backend,
                data=data,
                recorder=recorder,
                checkpoints=checkpoints,
                facts={**facts, "fingerprints": fingerprints},
                interrupt=interrupt,
                traces=traces,
            )
            state, first = trainer.start()
            recorder.note(
                f"{path}: {spec.num_parameters:,} parameters, {config.precision.preset}, on {device.kind}; recipe "
                f"{fingerprints['recipe']}, step {first} to {last}"
            )
            if resolved.config.accumulation.microbatch == "auto":
                recorder.note(f"accumulation.microbatch: {config.accumulation.microbatch} is the largest that fits")
            try:
                outcome = trainer.train(state, first, last)
            except Diverged as error:
                newest = checkpoints.latest()
                recorder.note(f"stopped: {error}. Newest checkpoint: {f'step {newest.step}' if newest else 'none'}.")
                return 1
            directory.write_summary(outcome.summary())
            recorder.note(_last_line(outcome, path, total))
    return 0


def _follow(
    config: Config,
    backend: Backend,
    data: Data,
    checkpoints: Checkpoints,
    facts: dict[str, Any],
    traces: dict[int, Path],
    last: int,
) -> int:
    """Train along as one of several processes, of which the first records and saves; returns the exit status."""
    with Interrupt() as interrupt:
        trainer = Trainer(config, backend, data, Unrecorded(), checkpoints, facts, interrupt, traces)
        state, first = trainer.start()
        try:
            trainer.train(state, first, last)
        except Diverged:
            return 1
    return 0


def _last_line(outcome: Outcome, path: Path, total: int) -> str:
    if outcome.step < total:
        why = f"stopped by {outcome.interrupted}" if outcome.interrupted else "stopped as asked"
        return f"{why} after step {outcome.step} of {total}, saved in {path}; run the same command to go on"
    held_out = f", held-out {outcome.held_out['held_out_nats_per_byte']:.3f} nats/byte" if outcome.held_out else ""
    speed = f", {outcome.tokens_per_s:,.0f} tokens/s" if outcome.tokens_per_s else ""
    return f"done: step {outcome.step}, loss {outcome.loss:.4f}{held_out}{speed}, {outcome.seconds:.0f} s; see {path}"


def _require_same_run(directory: RunDirectory, checkpoints: Checkpoints, facts: dict[str, Any]) -> None:
    """Refuse to go on with another backend's or another recipe's run."""
    latest = checkpoints.latest()
    found = latest.manifest if latest else directory.read_run() if directory.exists() else None
    if found is None:
        return
    if found["backend"] != facts["backend"]:
        raise UserError(
            f"{directory.path} holds a run of {found['backend']}train, and this is {facts['backend']}train; "
            "choose another --run-dir"
        )
    if latest and found["recipe_hash"] != facts["recipe_hash"]:
        changed = first_difference(found["recipe"], facts["recipe"])
        raise UserError(
            f"{directory.path} holds a run of another recipe ({changed}); choose another --run-dir, or the old value"
        )


def first_difference(old: Any, new: Any, path: str = "") -> str:
    """Where two recipes part first, as ``batch.global_batch was 16, is 32``."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                return first_difference(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    return f"{path} was {old}, is {new}"
