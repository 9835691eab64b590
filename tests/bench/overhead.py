"""What the framework costs: tokens/s of each backend against a bare loop of the same model, in one alternating run.

    python tests/bench/overhead.py [--config FILE] [--rounds N] [--steps N]

The framework's side is the real trainer with its loader, recorder and TensorBoard events. JAX's yardstick is the
better of a scanned and an unrolled stack of layers. Each round times every contender on the same batches, in an order
that changes; the figure is the median of the rounds' ratios. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from shared.checkpoint import Checkpoints
from shared.config.load import load_config
from shared.data import open_data
from shared.interrupt import Interrupt
from shared.recorder import Recorder
from shared.run_directory import RunDirectory
from shared.schedule import learning_rates
from shared.trainer import Trainer


class Kept(Trainer):
    """A trainer that keeps its state in memory where it would write a checkpoint: a disk is not what is measured."""

    kept: tuple[Any, int] | None = None

    def _save(self, state: Any, step: int, evaluated: dict[str, float] | None) -> None:
        self.kept = state, step


class Framework:
    """The trainer of one backend, going on where it was."""

    def __init__(self, config: Any, backend: Any, data: Any, folder: Path):
        directory = RunDirectory(folder)
        recorder = Recorder(directory, config.schedule.steps, tensorboard=True, quiet=True)
        checkpoints = Checkpoints(directory.checkpoints, config.checkpoint)
        self.trainer = Kept(config, backend, data, recorder, checkpoints, {}, Interrupt())

    def seconds_per_token(self, steps: int) -> float:
        state, first = self.trainer.kept or self.trainer.start()
        outcome = self.trainer.train(state, first, first + steps)
        assert outcome.tokens_per_s is not None
        return 1.0 / outcome.tokens_per_s


class Bare:
    """A bare loop on the same batches."""

    def __init__(self, loop: Any, data: Any):
        self.loop, self.data, self.done = loop, data, 0

    def seconds_per_token(self, steps: int) -> float:
        batches = [self.data.batch(step) for step in range(self.done, self.done + steps)]
        self.done += steps
        return self.loop.run(batches) / ((steps - 1) * batches[0].tokens.size)


def contenders(name: str, config: Any, data: Any, folder: Path) -> dict[str, Any]:
    rates = learning_rates(config.schedule)
    if name == "jax":
        from jaxtrain.devices import prefer_existing_platform

        prefer_existing_platform()
        from bare_jax import BareJax

        from jaxtrain.backend import JaxBackend

        return {
            "jaxtrain": Framework(config, JaxBackend(config), data, folder),
            "bare scan": Bare(BareJax(config, rates, unroll=False), data),
            "bare unroll": Bare(BareJax(config, rates, unroll=True), data),
        }
    from bare_torch import BareTorch

    from torchtrain.backend import TorchBackend

    return {
        "torchtrain": Framework(config, TorchBackend(config), data, folder),
        "bare": Bare(BareTorch(config, rates), data),
    }


def measure(name: str, arguments: argparse.Namespace) -> float:
    steps = arguments.steps * (arguments.rounds + 2)
    config = load_config(
        arguments.config,
        [
            f"schedule.steps={steps}",
            "schedule.warmup_steps=0",
            "logging.every=10",
            "evaluation.every=null",
            "checkpoint.every=null",
            "data.held_out_fraction=0.0",
        ],
    ).config
    data = open_data(config)
    with tempfile.TemporaryDirectory() as folder:
        runners = contenders(name, config, data, Path(folder))
        for runner in runners.values():
            runner.seconds_per_token(3)
        ratios = []
        for index in range(arguments.rounds):
            order = list(runners)[:: 1 if index % 2 else -1]
            seconds = {key: runners[key].seconds_per_token(arguments.steps) for key in order}
            own = seconds.pop(f"{name}train")
            ratios.append(min(seconds.values()) / own)
            figures = ", ".join(f"{key} {1 / value:,.0f}" for key, value in seconds.items())
            print(f"{name}train {1 / own:,.0f} tokens/s, {figures}: {ratios[-1]:.3f}", flush=True)
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/demo.yaml")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=21)
    parser.add_argument("--backend", choices=["jax", "torch"], help="measure only this one, in this process")
    arguments = parser.parse_args()
    if arguments.backend:
        print(json.dumps({f"{arguments.backend}train": round(measure(arguments.backend, arguments), 4)}))
        return
    # One process a framework, so that neither's threads are in the other's way.
    result: dict[str, float] = {}
    for name in ("jax", "torch"):
        command = [sys.executable, __file__, *sys.argv[1:], "--backend", name]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        print(output, end="")
        result |= json.loads(output.splitlines()[-1])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
