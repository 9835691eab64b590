"""One run from its resolved config to its end: the run directory, what identifies the run, and the last line."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shared.agreement import require_agreement, statement
from shared.backend import Backend, Framework
from shared.checkpoint import Checkpoint, Checkpoints
from shared.config.load import Resolved
from shared.config.recipe import first_difference, recipe_hash, recipe_of
from shared.data import open_data
from shared.errors import UserError
from shared.interrupt import Interrupt
from shared.models import model_spec
from shared.nonfinite import Diverged
from shared.origin import Origin, origin_of, require_same_origin
from shared.recorder import Recorder, Unrecorded
from shared.run_directory import RunDirectory
from shared.schedule import learning_rates, table_fingerprint
from shared.trainer import Outcome, Trainer


def train_run(
    resolved: Resolved,
    framework: Framework,
    path: Path,
    command: list[str],
    stop_at_step: int | None,
    traced: list[int],
    init_from: Path | None,
    quiet: bool,
) -> int:
    """Train; returns the exit status."""
    config = resolved.config
    directory = RunDirectory(path)
    total = config.schedule.steps
    if stop_at_step is not None and stop_at_step < 1:
        raise UserError(f"--stop-at-step must be at least 1, not {stop_at_step}")
    facts: dict[str, Any] = {
        "backend": framework.name,
        "recipe_hash": recipe_hash(config),
        "recipe": recipe_of(config),
    }
    latest = Checkpoints(directory.checkpoints, config.checkpoint).latest()
    _require_same_run(directory, latest, facts)
    spec = model_spec(config.model)
    if latest is None:
        require_same_origin(directory, init_from)
        origin = origin_of(init_from, config, spec)
        done, begun, facts["init_from"] = origin.step, origin.fingerprints, origin.path
    else:
        origin = Origin()
        done, begun, facts["init_from"] = latest.step, latest.manifest["fingerprints"], latest.manifest["init_from"]
    last = min(total, stop_at_step or total)
    if done >= last:
        print(f"{path} is already trained to step {done} of {total}; nothing to do")
        return 0
    for step in traced:
        if not done < step <= last:
            raise UserError(f"--trace {step}: this run goes from step {done + 1} to {last}; choose one of them")

    data = open_data(config)
    if begun.get("data", data.fingerprint) != data.fingerprint:
        raise UserError(
            f"data: the documents or their tokens (fingerprint {data.fingerprint}) are not those that the run began "
            f"with ({begun['data']}); give it the same files"
        )
    facts["fingerprints"] = {
        "recipe": facts["recipe_hash"],
        "data": data.fingerprint,
        "initial_weights": begun["initial_weights"],
        "learning_rates": table_fingerprint(learning_rates(config.schedule)),
    }
    backend = framework.backend(config)
    versions = {"Python": sys.version.split()[0], **backend.describe().versions}
    require_agreement(backend.gathered(statement(facts["fingerprints"], done, versions)))
    config = backend.config
    leading = backend.process == 0
    with contextlib.ExitStack() as stack:
        if leading:
            stack.enter_context(directory)
        interrupt = stack.enter_context(Interrupt())
        recorder: Recorder | Unrecorded = Unrecorded()
        if leading:
            directory.truncate_after(done)
            recorder = Recorder(directory, last, config.logging.tensorboard, quiet, start_step=done)
            stack.enter_context(recorder)
        trainer = Trainer(
            config=config,
            backend=backend,
            data=data,
            recorder=recorder,
            checkpoints=Checkpoints(directory.checkpoints, config.checkpoint, leading),
            facts=facts,
            interrupt=interrupt,
            traces={step: directory.traces / f"{step}.npz" for step in traced},
            origin=origin,
        )
        state, first = trainer.start()
        if first < done:
            recorder.rewind(first)
        if leading:
            _describe(directory, resolved, backend, facts, command)
        device = backend.describe().kind
        recorder.note(
            f"{path}: {spec.num_parameters:,} parameters, {config.precision.preset}, on {device}; recipe "
            f"{facts['recipe_hash']}, step {first} to {last}"
        )
        if first == origin.step and origin.described:
            recorder.note(origin.described)
        if resolved.config.accumulation.microbatch == "auto":
            recorder.note(f"accumulation.microbatch: {config.accumulation.microbatch} is the largest that fits")
        try:
            outcome = trainer.train(state, first, last)
        except Diverged as error:
            newest = trainer.checkpoints.latest()
            recorder.note(f"stopped: {error}. Newest checkpoint: {f'step {newest.step}' if newest else 'none'}.")
            return 1
        if leading:
            directory.write_summary(outcome.summary())
        recorder.note(_last_line(outcome, path, total))
    return 0


def _describe(
    directory: RunDirectory, resolved: Resolved, backend: Backend, facts: dict[str, Any], command: list[str]
) -> None:
    """Write ``run.json``."""
    config, device = backend.config, backend.describe()
    directory.write_run(
        {
            **facts,
            "config": config.model_dump(mode="json"),
            "target": resolved.target,
            "device": {name: value for name, value in asdict(device).items() if name != "versions"},
            "versions": {"python": sys.version.split()[0], **device.versions},
            "command": command,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "num_parameters": model_spec(config.model).num_parameters,
            "summary": None,
        }
    )


def _last_line(outcome: Outcome, path: Path, total: int) -> str:
    if outcome.step < total:
        why = f"stopped by {outcome.interrupted}" if outcome.interrupted else "stopped as asked"
        return f"{why} after step {outcome.step} of {total}, saved in {path}; run the same command to go on"
    held_out = f", held-out {outcome.held_out['held_out_nats_per_byte']:.3f} nats/byte" if outcome.held_out else ""
    speed = f", {outcome.tokens_per_s:,.0f} tokens/s" if outcome.tokens_per_s else ""
    return f"done: step {outcome.step}, loss {outcome.loss:.4f}{held_out}{speed}, {outcome.seconds:.0f} s; see {path}"


def _require_same_run(directory: RunDirectory, latest: Checkpoint | None, facts: dict[str, Any]) -> None:
    """Refuse to go on with another backend's or another recipe's run."""
    found = latest.manifest if latest else directory.read_run() if directory.exists() else None
    if found is None:
        return
    if found["backend"] != facts["backend"]:
        other = f"{found['backend']}train"
        raise UserError(
            f"{directory.path} holds a run of {other}, and this is {facts['backend']}train; choose another --run-dir; "
            f"to go on from there, export its state with python -m {other}.export and give that to --init-from"
        )
    if latest and found["recipe_hash"] != facts["recipe_hash"]:
        changed = first_difference(found["recipe"], facts["recipe"])
        raise UserError(
            f"{directory.path} holds a run of another recipe ({changed}); choose another --run-dir, or the old value"
        )
