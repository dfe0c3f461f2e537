"""The types of a recipe's sections: frozen pydantic classes, which validate the keys.

The docstrings of fields are the descriptions of keys in the documentation.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    model_serializer,
    model_validator,
)

from pipeline.backends.device_spec import DeviceSpec
from pipeline.config.adapter_words import AdapterWords
from pipeline.config.deadline import MAX_MINUTES, ClockTime
from pipeline.config.inspection_specs import DumpSpec, ProfileSpec, ReceiptSpec
from pipeline.config.renames import RenameSpec
from pipeline.core.errors import hide_secrets_in_tree
from pipeline.core.files.paths import require_address
from pipeline.core.registry import ComponentOf, Expected, FilePath, Location, Seq, Spec
from pipeline.data.dataset_spec import DatasetSpec
from pipeline.engine.callbacks.metric_callbacks import CallbackSpec
from pipeline.models.layers.model_spec import ModelSpec
from pipeline.models.layers.precision import Level, ToFloat
from pipeline.training.component_specs import (
    AverageSpec,
    GradientSpec,
    LossSpec,
    MetricSpec,
    OptimizerRule,
    OptimizerSpec,
    RateRule,
    ScheduleSpec,
    UnfreezeRule,
)
from pipeline.training.features.loss_scales import LossScale
from pipeline.training.features.non_finite_steps import OnNan
from pipeline.training.optimizers.first_order import ClipSpec
from pipeline.training.parallel.parallel_spec import LaunchSpec, ParallelSpec, count_shards
from pipeline.training.privacy.privacy_spec import PrivacySpec
from pipeline.training.robustness.attack_specs import AdversarialSpec, AttackSpec
from pipeline.training.step_feature import FeatureSpec

Stage = Literal["data", "build", "compile", "train", "checkpoint", "eval"]
STAGES: tuple[Stage, ...] = get_args(Stage)
AutotuneMode = Annotated[
    Literal["off", "bank", "tune", "repeat"],
    # YAML reads an unquoted `off` as false.
    BeforeValidator(lambda mode: "off" if mode is False else mode),
]
LogLevel = Literal["debug", "info", "warning", "error"]
"""Levels of messages in MindSpore's order: the variable GLOG_v is 0 for debug, 3 for error."""
Seconds = Annotated[float, Field(gt=0, le=366 * 24 * 3600)]
"""A time in seconds, at most a year."""
LOSABLE_S = 600.0
"""Most seconds of work that a crash loses, unless `checkpoint.every_seconds` is set."""


def parse_size(text: str) -> int:
    """Return the number of bytes of a size such as 4GB or 512MiB. Raises ValueError for others."""
    return TypeAdapter(ByteSize).validate_python(text)


def require_memory(memory: str) -> str:
    """Return `memory`. Raises ValueError unless it is auto or a size above 0."""
    if memory != "auto" and parse_size(memory) == 0:
        raise ValueError("is 0")
    return memory


class TrainSpec(AdapterWords):
    """Training: the components of a step, the number of steps and how they sink."""

    batch_size: PositiveInt
    epochs: PositiveInt | None
    """The length in epochs: readings of the training split."""
    sink_epochs: PositiveInt | None
    """The length in sinks of `sink_size` steps: MindSpore's epoch with `sink_size` > 0."""
    steps: PositiveInt | None
    """The length in steps."""
    minutes: Annotated[float, Field(gt=0, le=MAX_MINUTES)] | None = None
    """The length as a time, from the start of the process to its end. The run measures its pace,
    and writes the number of steps that it chose into its recipe."""
    until: ClockTime | None = None
    """The length as the time of the end: HH:MM of the local clock, or ISO 8601."""
    end_step: PositiveInt | None = None
    """The step after which training ends, if before the end of its schedule; null: at its end."""
    planned_for: str | None = None
    """The deadline that a run chose `steps` for, by which `train.resume=auto` finds the run."""
    sink: bool
    """Whether steps run in sinks; false: `sink_size` is ignored, and the host sees every step."""
    sink_size: Annotated[int | Literal["auto"], Expected("a whole number or auto")]
    """-1: a sink per epoch; N > 0: N batches, continuing after the last sink; auto: the size that
    is measured to be fastest."""
    mechanism: Literal["auto", "loop", "soft"]
    """How a sink runs: one XLA loop, or asynchronous dispatches of single steps. auto: a loop, or
    the faster one by measurement if `sink_size` is auto too."""
    dispatch_seconds: Seconds
    """Approximate length of the chunks of a sink, so that signals are handled in time."""
    feed: Literal["auto", "resident", "stream"]
    """resident: the device holds the training split; stream: it holds windows of consecutive steps;
    auto: the split if it fits."""
    mode: Literal["graph", "eager"]
    """graph: the training loop is one compiled program; eager: every operation runs separately, so
    that custom layers and losses can print, read values and be debugged, much slower."""
    jit_layers: Seq[str]
    """Patterns of layers, such as conv_*, that are compiled although the mode is eager. Python in
    other layers still runs in every step. Dropout in compiled layers draws other numbers."""
    precision: Literal[Level, "auto"]
    """The type that layers compute in; weights and loss are float32. O0: float32; O1: convolutions,
    dense layers and ReLU in float16; O2: float16 except batch and layer norm; O3: float16; bf16:
    bfloat16; fp8: bfloat16 with products of dense layers in 8 bits; auto: bf16 on a GPU, O3 on
    Ascend, O0 on the CPU."""
    keep_batchnorm_fp32: bool | None = None
    """Whether batch norm computes in float32, or else in the type of the level's network; null: as
    the level."""
    to_float: Seq[ToFloat]
    """Types by layer; the last matching rule wins. Only with level O0."""
    loss_scale: LossScale
    """The factor of the loss: a number, fixed, dynamic, or auto: dynamic in O2, else 1."""
    on_nan: OnNan
    """Reaction to a step whose loss or gradient isn't finite: stop, skip or rollback."""
    freeze: Seq[str]
    """Patterns of parameter paths, such as conv_*, that aren't updated. A pattern that begins with
    ! excludes parameters again; the last matching pattern wins. ["!dense_2"] freezes all others."""
    unfreeze: Seq[UnfreezeRule]
    """Frozen parameters to train after some epochs or steps; their optimizer state begins then."""
    freeze_statistics: Literal["none", "frozen", "all"]
    """Which batch norms keep and use their running statistics. frozen: those with frozen
    parameters."""
    lr_decay_by_layer: Annotated[float, Field(gt=0, le=1)]
    """Ratio of the learning rate of a layer to the rate of the next layer. The last layer has
    the full rate. `lr_rules` multiply the result."""
    lr_rules: Seq[RateRule]
    """Learning rates by pattern, each with a factor, a schedule or both; the last matching rule
    wins. The logged rate is the rate of parameters without a rule."""
    accumulate_steps: PositiveInt
    """Number of microbatches of a batch whose gradients are computed one after the other."""
    remat: Literal["none", "blocks", "auto"] = "none"
    """Activations that the backward pass computes again in less memory and more time. blocks: those
    inside residual blocks and branches; auto: like blocks if the temporaries of a step exceed
    `remat_bytes`."""
    remat_bytes: PositiveInt | None = None
    """Bytes of temporaries up to which `remat: auto` recomputes nothing; null: the available
    memory."""
    memory: (
        Annotated[
            Annotated[str, AfterValidator(require_memory)], Expected("auto or a size, as in 4GB")
        ]
        | None
    ) = None
    """Memory that decides how many shards of a batch are computed at once, at the same bits. auto:
    the memory at hand; a size, as in 4GB: memory of this process, or of its GPU. Shards are those
    of `parallel.mode: data`, which replaces none. null: the memory decides nothing."""
    gradients: Annotated[GradientSpec, ComponentOf("gradients")]
    """How gradients are computed: plain, by one backward pass, or by a custom component."""
    adversarial: AdversarialSpec | None = None
    """Training on attacked images; null: on images without attack."""
    ema: AverageSpec
    ledger: bool = False
    """Whether the run records how each training sample is learnt: its last loss and margins, and
    how often it was learnt and forgotten. Its report then lists labels that are probably wrong."""
    resume: str | None
    """A run directory to continue, or `auto`: the newest unfinished run of this recipe."""
    resume_changed: Literal["refuse", "allow"]
    """Reaction to a run to resume whose data or plug-ins have changed since."""
    features: Seq[Annotated[FeatureSpec, ComponentOf("feature")]] = ()
    """Features of the step, such as lookahead or distill, in the order in which they act."""
    callbacks: Seq[Annotated[CallbackSpec, ComponentOf("callback")]]
    """Objects that are called at events, and may stop the run or change its learning rate."""
    loss: Annotated[LossSpec, ComponentOf("loss")]
    optimizer: Annotated[OptimizerSpec, ComponentOf("optimizer")]
    optimizers: Seq[OptimizerRule] = ()
    """Separate optimizers by pattern; the last matching rule wins. Other parameters have
    `optimizer`. All gradients are clipped together. `lr_rules` multiply the rate of `optimizer`."""
    schedule: Annotated[ScheduleSpec, ComponentOf("schedule")]
    clip: ClipSpec

    @model_validator(mode="after")
    def _scale_rates(self) -> Self:
        """Scale the rates of optimizers that have `lr_for_batch` to `batch_size`."""
        optimizer = self.optimizer.scale_rate(self.batch_size)
        rules = tuple(
            rule.model_copy(update={"optimizer": rule.optimizer.scale_rate(self.batch_size)})
            for rule in self.optimizers
        )
        if optimizer == self.optimizer and rules == self.optimizers:
            return self
        return self.model_copy(update={"optimizer": optimizer, "optimizers": rules})

    @property
    def deadline(self) -> str | None:
        """Key and value of the deadline, such as `minutes = 5`; None without a deadline."""
        if self.minutes is not None:
            return f"minutes = {self.minutes:g}"
        return None if self.until is None else f"until = {self.until}"

    @property
    def chooses_sink(self) -> bool:
        """Whether the size of sinks is to be chosen."""
        return self.sink and self.sink_size == "auto"

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of `memory`; None if it is auto or null."""
        return None if self.memory in (None, "auto") else parse_size(str(self.memory))

    @property
    def schedules(self) -> dict[str, ScheduleSpec]:
        """The main schedule and the schedules of `optimizers` and `lr_rules`, by key."""
        lists: dict[str, Seq[OptimizerRule | RateRule]] = {
            "optimizers": self.optimizers,
            "lr_rules": self.lr_rules,
        }
        schedules = {"train.schedule": self.schedule}
        for key, rules in lists.items():
            for number, rule in enumerate(rules):
                if rule.schedule is not None:
                    schedules[f"train.{key}.{number}.schedule"] = rule.schedule
        return schedules

    @property
    def rate_columns(self) -> tuple[OptimizerRule | RateRule, ...]:
        """The rules of columns in the table of learning rates, after the main schedule's column."""
        return (*self.optimizers, *self.lr_rules)


class CheckpointSpec(Spec):
    """Checkpoints: when they are written, which are kept, and which weights to restore."""

    every_steps: PositiveInt | None
    every_epochs: PositiveInt | None
    """Epochs between two checkpoints."""
    every_seconds: Seconds | None
    """Seconds since the last checkpoint, whatever has caused it; null: 600, so that a crash loses
    at most ten minutes of work."""
    keep: PositiveInt
    """Number of newest checkpoints to keep, besides the best."""
    keep_minutes: Annotated[PositiveInt, Field(le=MAX_MINUTES)] | None = None
    """Also keep the first checkpoint of every N minutes."""
    prefix: Annotated[
        Annotated[str, Field(pattern=r"^\w[\w.+-]*$", max_length=100)] | None,
        Expected("the beginning of a file's name: letters, digits, _, +, - and ., at most 100"),
    ] = None
    """Also write the weights of each checkpoint as MindSpore's `{prefix}-{epoch}_{step}.ckpt`, kept
    as long as the checkpoint; null: the network's name if `directory` is set."""
    directory: FilePath | None = None
    """The folder of MindSpore's files; null: `ckpt` in the run directory."""
    optimizer: bool = False
    """Whether MindSpore's files also have the optimizer's state and the step."""
    best: str | None
    """Also keep the checkpoint with the best value of this metric; null: only the newest."""
    mirror: Annotated[str, AfterValidator(require_address)] | None = None
    """The address of a folder for copies of all checkpoints, as in s3://bucket/run, gs:// or
    file:///; `train.resume=auto` continues from there on another machine."""
    restore: Location | None
    """A run directory, its checkpoints folder, one checkpoint or a weight file (.safetensors,
    .ckpt, .pt, .pth, .npz), or an address of a weight file: start from these weights."""
    rules: Literal["auto", "none", "torch", "mindspore", "tensorflow"]
    """Naming rules and layout of the weights to restore; none: this network's names."""
    renames: Seq[RenameSpec]
    """Renaming rules for entries of the weights to restore; the first matching one applies."""
    partial: bool
    """Restore the matching entries even if others are missing, extra or misshapen."""

    @property
    def save_seconds(self) -> float:
        """Longest time without a checkpoint, in seconds."""
        return LOSABLE_S if self.every_seconds is None else self.every_seconds


class EvalSpec(Spec):
    """Evaluation: its samples, and when it runs during training. One always follows training."""

    samples: Annotated[
        PositiveInt | Literal["all", "trained"], Expected("a whole number above 0, all or trained")
    ]
    """Number of samples, spread evenly over the split. trained: at most as many as in training, so
    that a trial of a few steps of a large network ends quickly."""
    every_steps: PositiveInt | None
    every_epochs: PositiveInt | None
    """Epochs between two evaluations."""
    every_seconds: Seconds | None = None
    """Seconds without an evaluation after which one is due; null: no limit."""
    metrics: Seq[Annotated[MetricSpec, ComponentOf("metric")]]
    """Metrics beside the standard ones."""
    robustness: Seq[AttackSpec] = ()
    """Attacks and corruptions under which the accuracy is measured, once after training."""
    on_train: bool
    """Also evaluate the same number of training samples, spread evenly over their split, with the
    map ops of evaluation. Their metrics have the prefix `train_`, as in `train_accuracy`."""


class EarlyStopSpec(Spec):
    """Early stop: training ends when a metric hasn't improved for `patience` evaluations."""

    metric: str | None
    """null: never stop early."""
    patience: PositiveInt
    min_delta: NonNegativeFloat


class MonitorSpec(Spec):
    """Monitoring: the lines of training, and the files of TensorBoard."""

    lines: Literal["plain", "callbacks", "functional"]
    """Lines of training. plain: step, epoch, loss and speed; callbacks: the lines of MindSpore's
    LossMonitor and TimeMonitor, whose epoch is a sink; functional: the lines of MindSpore's
    functional loop, which are a banner, the loss at every 100 batches of an epoch, and accuracy and
    loss after an evaluation."""
    log_level: LogLevel | None
    """Severity from which messages are shown: debug, info, warning or error; null: by the variable
    GLOG_v, 0 to 3, else warning."""
    loss_every: NonNegativeInt
    """Minimum steps between two lines with a loss, which are printed at the end of a sink, or of a
    step if sinks are off; 0: no such lines."""
    tensorboard: bool
    sample_images: NonNegativeInt
    """Number of augmented training images to write to TensorBoard."""
    sample_predictions: NonNegativeInt
    """Number of evaluation images to write to TensorBoard at the end, with their true and predicted
    classes. One more program is compiled for them."""
    collect_every: PositiveInt | None
    """Steps between two histograms of all weights and gradients in TensorBoard, from before the
    first step; null: never. One more program is compiled for the gradients. Losses stay the same
    bits."""
    graph: bool
    """Write the graph of the network to TensorBoard."""
    embeddings: NonNegativeInt
    """Number of evaluation samples whose inputs of the last layer are written for TensorBoard's
    projector at the end. One more program is compiled for them."""
    lineage: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """The user's facts about the run, by name, which are listed with its keys and in its report."""
    early_stop: EarlyStopSpec


class CacheSpec(Spec):
    """The cache of downloads and compiled programs between runs."""

    root: FilePath | None
    """null: `$XDG_CACHE_HOME/pipeline`, else `~/.cache/pipeline`."""
    compiled: bool
    """Keep compiled programs."""


class RunFeatureSpec(Spec):
    """A feature of a run: the component of kind "run_feature"."""

    name: str

    @abstractmethod
    def open(self, recipe: Recipe) -> Any:
        """Return a new `RunFeature` for a run of the recipe. Raises ValueError with what is wrong
        and what would be right, before any data is read."""


WITH_SECRETS = "with secrets"
"""Context for `Recipe.model_dump` that leaves passwords in JSON."""


class Recipe(Spec):
    """The complete description of a run."""

    name: Annotated[str, Field(pattern=r"^\w[\w.+-]*$", max_length=100)]
    """Name in the run directory's name."""
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    stages: Annotated[Seq[Stage], Field(min_length=1)]
    autotune: AutotuneMode
    """How the lowering of every convolution is chosen. off: the defaults; bank: entries of the
    knowledge banks, else a rule; tune: time convolutions without an entry, and store the results;
    repeat: time all again, and store better results."""
    autotune_search: Literal["exhaustive", "ga"]
    """Candidates that tuning times: all, or a genetic search's selection."""
    debug: bool
    """Show tracebacks."""
    dataset: Annotated[DatasetSpec, ComponentOf("dataset")]
    model: Annotated[ModelSpec, ComponentOf("model")]
    device: Annotated[DeviceSpec, ComponentOf("device")]
    train: TrainSpec
    checkpoint: CheckpointSpec
    eval: EvalSpec
    monitor: MonitorSpec
    dump: DumpSpec
    receipt: ReceiptSpec
    cache: CacheSpec
    profile: ProfileSpec
    parallel: ParallelSpec
    launch: LaunchSpec
    privacy: PrivacySpec | None = None
    """Differential privacy of the training samples; null: none."""
    run_features: Seq[Annotated[RunFeatureSpec, ComponentOf("run_feature")]] = ()
    """Features of plug-ins, which act after the features of this package."""

    @model_serializer(mode="wrap")
    def _hide_secrets(
        self, dump: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        """Hide passwords in JSON, which is written to files and shown, unless WITH_SECRETS."""
        tree = dump(self)
        hides_secrets = info.mode == "json" and info.context is not WITH_SECRETS
        return hide_secrets_in_tree(tree) if hides_secrets else tree

    def whole_tree(self) -> dict[str, Any]:
        """Return the recipe as JSON with its secrets, to make another recipe. Don't write it."""
        return self.model_dump(mode="json", context=WITH_SECRETS)

    @model_validator(mode="before")
    @classmethod
    def _resolve_layout(cls, tree: Any) -> Any:
        """Set `batch_size` by `batch_per_device`, and defaults of the layout on devices.

        These are `parallel.mode`, which `train.memory` sets, `parallel.reproducible` and
        `parallel.shards`.
        """
        try:
            parallel = ParallelSpec.model_validate(tree["parallel"])
            train = dict(tree["train"])
            if parallel.batch_per_device is not None:
                train["batch_size"] = parallel.batch_per_device * parallel.num_devices
            if train.get("memory") is not None and parallel.mode == "none":
                parallel = parallel.model_copy(update={"mode": "data"})
            # XLA divides the sums of sharded parameters among devices.
            shards_parameters = parallel.mode in ("semi_auto", "auto")
            reproducible = parallel.reproducible or ("layout" if shards_parameters else "exact")
            shards = parallel.shards
            if parallel.mode != "none" and reproducible == "exact":
                shards = count_shards(parallel, train["batch_size"])
            layout = {"mode": parallel.mode, "reproducible": reproducible, "shards": shards}
            resolved = parallel.model_copy(update=layout)
            if parallel.shards is None:
                # The default is computed again if processes are the devices.
                resolved.model_fields_set.discard("shards")
            return {**tree, "train": train, "parallel": resolved}
        except (KeyError, TypeError, ValueError):
            # The validation of the fields reports the wrong or missing key.
            return tree
