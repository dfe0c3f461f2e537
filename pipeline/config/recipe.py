"""The recipe as frozen types, validated before anything else happens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from pipeline.backends.device_spec import DeviceSpec
from pipeline.config.adapter_words import AdapterWords
from pipeline.config.dump_spec import DumpSpec
from pipeline.config.profile_spec import ProfileSpec
from pipeline.config.renames import RenameSpec
from pipeline.core.errors import hide_secrets_in_tree
from pipeline.core.registry import ComponentOf, Expected, FilePath, Seq, Spec
from pipeline.data.dataset_spec import DatasetSpec
from pipeline.engine.callbacks.metric_callbacks import CallbackSpec
from pipeline.models.layers.model_spec import ModelSpec
from pipeline.models.layers.precision import Level, ToFloat
from pipeline.training.component_specs import (
    AverageSpec,
    GradientSpec,
    LossSpec,
    MetricSpec,
    OptimizerSpec,
    RateRule,
    ScheduleSpec,
    UnfreezeRule,
)
from pipeline.training.loss_scales import LossScale
from pipeline.training.non_finite_steps import OnNan
from pipeline.training.optimizers.first_order import ClipSpec
from pipeline.training.parallel.parallel_spec import LaunchSpec, ParallelSpec
from pipeline.training.parallel.shards import choose_num_shards

Stage = Literal["data", "build", "compile", "train", "checkpoint", "eval"]
STAGES: tuple[Stage, ...] = ("data", "build", "compile", "train", "checkpoint", "eval")
AutotuneMode = Annotated[
    Literal["off", "bank", "tune", "repeat"],
    # YAML reads an unquoted `off` as false.
    BeforeValidator(lambda mode: "off" if mode is False else mode),
]
LogLevel = Literal["debug", "info", "warning", "error"]
"""Levels of messages in MindSpore's order: GLOG_v is the place of one, from 0 on."""
Seconds = Annotated[float, Field(gt=0, le=366 * 24 * 3600)]
"""A time in seconds, at most a year."""


class TrainSpec(AdapterWords):
    """Training: the components of a step, the number of steps and how they sink."""

    batch_size: PositiveInt
    epochs: PositiveInt | None
    """The length in sink epochs (MindSpore's epochs): sinks if `sink_size` > 0, else epochs."""
    passes: PositiveInt | None
    """The length in epochs (readings of the training split)."""
    steps: PositiveInt | None
    """The length in steps."""
    sink: bool
    sink_size: Annotated[int | Literal["auto"], Expected("a whole number or auto")]
    """-1: a sink per epoch; N > 0: N batches, continuing after the last sink; auto: the size
    measured to be fastest once the step is compiled, a sink epoch being an epoch as with -1."""
    mechanism: Literal["auto", "loop", "soft"]
    """How a sink runs: one XLA loop, or asynchronous dispatches of single steps. auto: a loop, or
    the faster one by measurement if `sink_size` is auto too."""
    dispatch_seconds: Seconds
    """A sink is dispatched in chunks of about this length, so that signals are handled in time."""
    feed: Literal["auto", "resident", "stream"]
    mode: Literal["graph", "eager"]
    """graph: the training loop is one compiled program; eager: every operation runs separately, so
    that Python in custom layers can print and be debugged, much slower."""
    jit_layers: Seq[str]
    """Patterns of layers, such as conv_*, that are compiled although the mode is eager: Python in
    the others still runs in every step. Dropout inside of them draws other numbers."""
    precision: Literal[Level, "auto"]
    """The type that layers compute in, weights and loss being float32. O0: float32; O1:
    convolutions, dense layers and ReLU in float16; O2: all in float16 but batch and layer norm; O3:
    all in float16; bf16: all in bfloat16; auto: bf16 on a GPU, O3 on Ascend, O0 on the CPU."""
    to_float: Seq[ToFloat]
    """Types by layer; the last matching rule wins. Only with level O0."""
    loss_scale: LossScale
    """The factor of the loss: a number, fixed, dynamic, or auto: dynamic in O2, else 1."""
    on_nan: OnNan
    """Reaction to a step whose loss or gradient is not finite: stop, skip or rollback."""
    freeze: Seq[str]
    """Patterns of parameter paths, such as conv_*, that are not updated. One that begins
    with ! takes its parameters out again, the last one decides; ["!dense_2"] freezes all others."""
    unfreeze: Seq[UnfreezeRule]
    """Frozen parameters to train after some epochs or steps; their optimizer state begins then."""
    freeze_statistics: Literal["none", "frozen", "all"]
    """Batch norm that normalises by its running statistics, which stay: none, that whose parameters
    are frozen, or all."""
    lr_decay_by_layer: Annotated[float, Field(gt=0, le=1)]
    """Learning rates by depth: the last layer has the full one, each layer before it this share of
    the next one's, times the factor of `lr_rules`."""
    lr_rules: Seq[RateRule]
    """Learning rates by pattern, each with a factor, a schedule or both; the last matching rule
    wins. The rate that is logged belongs to parameters without a rule."""
    accumulate_steps: PositiveInt
    """Number of microbatches of a batch whose gradients are computed one after the other."""
    remat: Literal["none", "blocks", "auto"] = "none"
    """Activations that the backward pass computes again instead of keeping them, in less memory and
    more time: none; blocks: those inside of residual blocks and branches; auto: as blocks if the
    temporaries of a step take more than `remat_bytes`."""
    remat_bytes: PositiveInt | None = None
    """Bytes of temporaries that a step may take before `remat: auto` lowers them; null: the memory
    that is available."""
    gradients: Annotated[GradientSpec, ComponentOf("gradients")]
    """How a step gets its gradients: plain, by one backward pass, or a custom way."""
    ema: AverageSpec
    resume: str | None
    """A run directory to continue, or `auto`: the newest unfinished run of this recipe."""
    resume_changed: Literal["refuse", "allow"]
    """Reaction to a run to resume whose data or plug-ins have changed since."""
    callbacks: Seq[Annotated[CallbackSpec, ComponentOf("callback")]]
    """Code that is notified of events, and may stop the run or change its learning rate."""
    loss: Annotated[LossSpec, ComponentOf("loss")]
    optimizer: Annotated[OptimizerSpec, ComponentOf("optimizer")]
    schedule: Annotated[ScheduleSpec, ComponentOf("schedule")]
    clip: ClipSpec

    @property
    def schedules(self) -> dict[str, ScheduleSpec]:
        """Return all schedules by their keys: of all parameters, and of `lr_rules`."""
        by_rule = {
            f"train.lr_rules.{n}.schedule": rule.schedule for n, rule in enumerate(self.lr_rules)
        }
        return {"train.schedule": self.schedule} | {
            key: s for key, s in by_rule.items() if s is not None
        }


class CheckpointSpec(Spec):
    """Checkpoints: when they are written, which stay, and what to restore."""

    every_steps: PositiveInt | None
    every_passes: PositiveInt | None
    """Epochs between two checkpoints."""
    every_seconds: Seconds | None
    keep: PositiveInt
    """Number of newest checkpoints to keep, besides the best."""
    keep_minutes: Annotated[PositiveInt, Field(le=366 * 24 * 60)] | None = None
    """Also keep one checkpoint of every N minutes, the first of them."""
    prefix: Annotated[
        Annotated[str, Field(pattern=r"^\w[\w.+-]*$", max_length=100)] | None,
        Expected("the beginning of a file's name: letters, digits, _, +, - and ., at most 100"),
    ] = None
    """Also write each checkpoint's weights as MindSpore's `{prefix}-{epoch}_{step}.ckpt`, of which
    as many are kept; null: the network's name if `directory` is set."""
    directory: FilePath | None = None
    """The folder of these files; null: `ckpt` in the run directory."""
    best: str | None
    """Also keep the checkpoint with the best value of this metric; null keeps the newest only."""
    restore: FilePath | None
    """A run directory, its checkpoints folder, one checkpoint or a weight file (.safetensors,
    .ckpt, .pt, .pth, .npz): start from these weights."""
    rules: Literal["auto", "none", "torch", "mindspore"]
    """Naming rules and layout of the weights to restore; none: this network's."""
    renames: Seq[RenameSpec]
    """Renaming rules for entries of the weights to restore; the first matching one applies."""
    partial: bool
    """Restore what matches, also if entries are missing, extra or misshapen."""


class EvalSpec(Spec):
    """Evaluation: its samples, and when it runs during training; one always follows training."""

    samples: Annotated[
        PositiveInt | Literal["all", "trained"], Expected("a whole number above 0, all or trained")
    ]
    """Number of samples, evenly spread over the split. `trained`: no more than training sees, so
    that a trial of a few steps of a large network ends quickly."""

    every_steps: PositiveInt | None
    every_passes: PositiveInt | None
    """Epochs between two evaluations."""
    metrics: Seq[Annotated[MetricSpec, ComponentOf("metric")]]
    """Metrics beside the standard ones."""
    on_train: bool
    """Also evaluate as many training samples, spread evenly over their split, with the map ops of
    evaluation: `train_accuracy` and the others, beside those of the evaluation split."""


class EarlyStopSpec(Spec):
    """Stop when a metric has not improved for `patience` evaluations."""

    metric: str | None
    """null: never stop early."""
    patience: PositiveInt
    min_delta: NonNegativeFloat


class MonitorSpec(Spec):
    """Monitoring: what is printed and written during training."""

    lines: Literal["callbacks", "functional"]
    """Lines of training. callbacks: those of LossMonitor and TimeMonitor; functional:
    those of MindSpore's functional loop, a banner, every 100 batches of an epoch the loss, and
    after an evaluation its accuracy and loss."""
    log_level: LogLevel | None
    """Least severe messages that are shown: debug, info, warning or error; null: by the variable
    GLOG_v, 0 to 3, else warning."""
    loss_every: NonNegativeInt
    """The loss line at every sink (or step, without sinks); N: not more often than every N steps;
    0: never."""
    tensorboard: bool
    sample_images: NonNegativeInt
    """Number of augmented training images to write to TensorBoard."""
    sample_predictions: NonNegativeInt
    """Number of evaluation images to write to TensorBoard at the end, each with its class and the
    predicted one. One more program is compiled for them."""
    collect_every: PositiveInt | None
    """Number of steps after which histograms of all weights and of their gradients are written to
    TensorBoard, before the first step too; null: never. One more program is compiled for the
    gradients, and losses stay the same bits."""
    graph: bool
    """Write the graph of the network to TensorBoard."""
    embeddings: NonNegativeInt
    """Number of evaluation samples of which TensorBoard's projector gets, at the end, the input of
    the last layer. One more program is compiled for them."""
    early_stop: EarlyStopSpec


class CacheSpec(Spec):
    """The cache: where downloads and compiled programs stay between runs."""

    root: FilePath | None
    """null: `$XDG_CACHE_HOME/pipeline`, else `~/.cache/pipeline`."""
    compiled: bool
    """Keep compiled programs."""


WITH_SECRETS = "with secrets"


class Recipe(Spec):
    """One run, completely described."""

    name: Annotated[str, Field(pattern=r"^\w[\w.+-]*$", max_length=100)]
    """Name that run directories contain."""
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    stages: Annotated[Seq[Stage], Field(min_length=1)]
    autotune: AutotuneMode
    """How the lowering of every convolution is chosen, independent of the sink. off: the
    defaults; bank: entries of the knowledge banks, else a rule; tune: also time what they lack, and
    keep the result; repeat: time everything again, and keep better results."""
    autotune_search: Literal["exhaustive", "ga"]
    """Candidates that tuning times: all, or those that a genetic search picks."""
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
    cache: CacheSpec
    profile: ProfileSpec
    parallel: ParallelSpec
    launch: LaunchSpec

    @model_serializer(mode="wrap")
    def _hide_secrets(
        self, dump: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        """Leave passwords out of JSON, which is what is written down and shown."""
        tree = dump(self)
        is_shown = info.mode == "json" and info.context is not WITH_SECRETS
        return hide_secrets_in_tree(tree) if is_shown else tree

    def whole_tree(self) -> dict[str, Any]:
        """Return the recipe as JSON with its secrets, to make another recipe of, not to write."""
        return self.model_dump(mode="json", context=WITH_SECRETS)

    @model_validator(mode="before")
    @classmethod
    def _resolve_layout(cls, tree: Any) -> Any:
        """Fill in what follows from the devices: the batch of all of them, and its shards."""
        try:
            parallel = ParallelSpec.model_validate(tree["parallel"])
            train = dict(tree["train"])
            if parallel.batch_per_device is not None:
                train["batch_size"] = parallel.batch_per_device * parallel.num_devices
            shards = parallel.shards
            if shards is None and parallel.mode != "none" and parallel.reproducible == "exact":
                shards = choose_num_shards(train["batch_size"], parallel.num_devices)
            return {**tree, "train": train, "parallel": {**tree["parallel"], "shards": shards}}
        except (KeyError, TypeError, ValueError):
            # Something else is missing or wrong, and reported when the fields are checked.
            return tree
