"""The recipe's schema: every section and field a config file may hold.

A config describes one training run for either backend. Its sections fall into two kinds. *Identity* sections decide
the numbers of the run (``seed``, ``model``, ``data``, ``optimizer``, ``schedule``, ``batch``, ``precision``);
:mod:`shared.config.recipe` hashes them. All other sections only decide where and how fast the run happens, so they
may differ between two machines that train the same run, and ``targets`` may override them for each accelerator.

Nothing that a framework would choose for itself has a default here: epsilons, betas, decay and initial scale are
always stated.

A rule between several keys raises a ValueError whose message begins with the key it is about, and writes every key as
it is called from the section that the rule belongs to; :mod:`shared.config.problems` finds the line by that.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from shared.config.data import (
    BytesTokenizer,
    Data,
    FileTokenizer,
    GPT2Tokenizer,
    HuggingFaceSource,
    JsonLinesSource,
    ParquetSource,
    Source,
    SpeechesSource,
    TextSource,
    Tokenizer,
)
from shared.config.execution import (
    Accumulation,
    Checkpoint,
    Evaluation,
    Execution,
    JaxExecution,
    Logging,
    Nonfinite,
    Offload,
    Parallel,
    Remat,
    TensorName,
    TorchExecution,
)
from shared.config.model import GPT2, Decoder, Gemma, Llama, Model, Qwen3, RopeScaling, RotaryDecoder
from shared.config.optimization import (
    SGD,
    AdamW,
    AnyOptimizer,
    AnySchedule,
    Batch,
    ConstantSchedule,
    CosineSchedule,
    Optimizer,
    Schedule,
    WSDSchedule,
)
from shared.config.precision import Dtype, LossScale, Precision
from shared.config.section import NonEmpty, Section, Seed

__all__ = [
    "GPT2",
    "SGD",
    "Accumulation",
    "AdamW",
    "AnyOptimizer",
    "AnySchedule",
    "Batch",
    "BytesTokenizer",
    "Checkpoint",
    "Config",
    "ConstantSchedule",
    "CosineSchedule",
    "Data",
    "Decoder",
    "Dtype",
    "Evaluation",
    "Execution",
    "FileTokenizer",
    "GPT2Tokenizer",
    "Gemma",
    "HuggingFaceSource",
    "JaxExecution",
    "JsonLinesSource",
    "Llama",
    "Logging",
    "LossScale",
    "Model",
    "Nonfinite",
    "Offload",
    "Optimizer",
    "Parallel",
    "ParquetSource",
    "Precision",
    "Qwen3",
    "Remat",
    "RopeScaling",
    "RotaryDecoder",
    "Schedule",
    "Section",
    "Source",
    "SpeechesSource",
    "TargetOverrides",
    "TensorName",
    "TextSource",
    "Tokenizer",
    "TorchExecution",
    "WSDSchedule",
]


class TargetOverrides(Section):
    """Overrides for one accelerator: only sections that are not part of the recipe's identity."""

    accumulation: Accumulation | None = None
    """See ``accumulation``."""
    remat: Remat | None = None
    """See ``remat``."""
    parallel: Parallel | None = None
    """See ``parallel``."""
    offload: Offload | None = None
    """See ``offload``."""
    execution: Execution | None = None
    """See ``execution``."""
    checkpoint: Checkpoint | None = None
    """See ``checkpoint``."""
    nonfinite: Nonfinite | None = None
    """See ``nonfinite``."""
    evaluation: Evaluation | None = None
    """See ``evaluation``."""
    logging: Logging | None = None
    """See ``logging``."""


class Config(Section):
    """One training run."""

    seed: Seed
    """Seed of the initial weights and of the data's order."""
    model: Model
    """The architecture."""
    data: Data
    """What it reads."""
    optimizer: AnyOptimizer
    """How parameters are updated."""
    schedule: AnySchedule
    """How long, at which learning rate."""
    batch: Batch
    """What one update sees."""
    precision: Precision
    """Number formats; see :mod:`shared.policies.precision`."""
    accumulation: Accumulation = Accumulation()
    """How a global batch is cut into microbatches."""
    remat: Remat = Remat(policy="none")
    """Rematerialisation (activation checkpointing)."""
    parallel: Parallel = Parallel()
    """The device mesh."""
    offload: Offload = Offload()
    """What is kept in host memory."""
    execution: Execution = Execution()
    """Kernels and compilers."""
    checkpoint: Checkpoint = Checkpoint()
    """When the state is saved."""
    nonfinite: Nonfinite = Nonfinite()
    """What happens when a loss or a gradient is not finite."""
    evaluation: Evaluation = Evaluation()
    """When the held-out loss is measured."""
    logging: Logging = Logging()
    """What is recorded."""
    targets: dict[NonEmpty, TargetOverrides] = Field(default={})
    """Overrides by accelerator (``cpu``, ``v5e-1``, ``a100-80``): chosen with --target, else by what is found."""

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        length = self.batch.sequence_length
        if isinstance(self.model, GPT2) and length > self.model.max_position_embeddings:
            raise ValueError(
                f"batch.sequence_length ({length}) must not exceed model.max_position_embeddings "
                f"({self.model.max_position_embeddings})"
            )
        if self.evaluation.every is not None and not self.data.held_out_fraction:
            raise ValueError("evaluation.every needs held-out documents, and data.held_out_fraction is 0")
        rows, replicas = self.batch.global_batch, self.parallel.data
        if rows % replicas:
            raise ValueError(
                f"parallel.data ({replicas}) must divide batch.global_batch ({rows}); nearest valid: "
                f"{_largest_divisor(rows, at_most=replicas)}"
            )
        share, microbatch = rows // replicas, self.accumulation.microbatch
        if isinstance(microbatch, int) and share % microbatch:
            of_what = "batch.global_batch" if replicas == 1 else "a replica's share of batch.global_batch"
            raise ValueError(
                f"accumulation.microbatch ({microbatch}) must divide {of_what} ({share}); nearest valid: "
                f"{_largest_divisor(share, at_most=microbatch)}"
            )
        for key, names in (("remat.names", self.remat.names), ("offload.activations", self.offload.activations)):
            if isinstance(self.model, GPT2) and "gate" in (names or ()):
                raise ValueError(f"{key} names 'gate', and the model.family gpt2 has no gate")
        return self


def _largest_divisor(number: int, at_most: int) -> int:
    return next(d for d in range(min(number, at_most), 0, -1) if number % d == 0)
