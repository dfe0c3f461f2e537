"""Every problem of a recipe, in one message: dotted key, value, what would be right."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pipeline import load_recipe
from pipeline.config import device_checks
from pipeline.config.checks import CHECKS
from pipeline.config.hydra_options import resolve_recipe
from pipeline.config.privacy_robustness_checks import check_privacy
from pipeline.core.errors import RecipeError


def problems(*overrides: str, recipe: str = "lenet5_mnist") -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, overrides)
    return list(caught.value.problems)


CASES = {
    "unknown key, added": (
        ["+train.sink_sise=5"],
        "train.sink_sise = 5: there is no such key; did you mean train.sink_size?",
    ),
    "unknown key, overridden": (
        ["train.sink_sise=5"],
        "train.sink_sise = 5: there is no such key; did you mean train.sink_size?",
    ),
    "word of another framework": (
        ["train.optimizer.learning_rate=0.1"],
        "train.optimizer.learning_rate = 0.1: there is no such key; did you mean "
        "train.optimizer.lr?",
    ),
    "word of another framework in another section": (
        ["train.learning_rate=0.1"],
        "train.learning_rate = 0.1: there is no such key; did you mean train.optimizer.lr?",
    ),
    "word of another framework at the top": (
        ["num_epochs=3"],
        "num_epochs = 3: there is no such key; did you mean train.epochs?",
    ),
    "key of another section": (
        ["dataset.batch_size=3"],
        "dataset.batch_size = 3: there is no such key; did you mean train.batch_size?",
    ),
    "key spelled like one of its section": (
        ["checkpoint.steps=3"],
        "checkpoint.steps = 3: there is no such key; did you mean checkpoint.every_steps?",
    ),
    "device of another framework": (
        ["device=cuda"],
        "device = cuda: there is no such device; did you mean gpu? Choose from ascend910, ",
    ),
    "unknown key of an op": (
        ["dataset.train.ops=[{name: rescale, factr: 2.0, factor: 1.0, shift: 0.0}]"],
        "dataset.train.ops.0.factr = 2.0: there is no such key; "
        "did you mean dataset.train.ops.0.factor?",
    ),
    "unknown name": (
        ["model.name=lenet6"],
        "model.name = lenet6: there is no such model; did you mean lenet5? "
        "Choose from alexnet, bert, densenet, dpn, ",
    ),
    "unknown op": (
        ["dataset.eval.ops=[resise]"],
        "dataset.eval.ops.0.name = resise: there is no such op; did you mean resize?",
    ),
    "unknown group option": (
        ["model=lenet6"],
        "model = lenet6: there is no such model; did you mean lenet5?",
    ),
    "wrong type": (
        ["train.sink_size=banana"],
        "train.sink_size = banana: must be a whole number or auto",
    ),
    "several types": (
        ["eval.samples=banana"],
        "eval.samples = banana: must be a whole number above 0, all or trained",
    ),
    "number as text": (
        ["train.batch_size='32'"],
        "train.batch_size = '32': must be a whole number",
    ),
    "fraction": (["train.batch_size=32.5"], "train.batch_size = 32.5: must be a whole number"),
    "not finite": (["train.optimizer.lr=inf"], "train.optimizer.lr = inf: must be a finite number"),
    "negative": (["train.batch_size=-4"], "train.batch_size = -4: must be greater than 0"),
    "not a switch": (["train.sink=1"], "train.sink = 1: must be true or false"),
    "literal": (["train.feed=magic"], "train.feed = magic: must be 'auto', 'resident' or 'stream'"),
    "missing": (
        ["dataset.train.ops=[{name: rescale, shift: 0.0}]"],
        "dataset.train.ops.0.factor: missing",
    ),
    "plus on a known key": (["+seed=3"], "+seed: the key exists already; leave out the +"),
    "two lengths": (
        ["train.epochs=2", "train.steps=5"],
        "train: give exactly one of epochs, sink_epochs, steps, minutes, until; given are epochs "
        "= 2, steps = 5",
    ),
    "a length and a deadline": (
        ["train.steps=5", "train.minutes=1"],
        "train: give exactly one of epochs, sink_epochs, steps, minutes, until; given are steps "
        "= 5, minutes = 1",
    ),
    "no time": (
        ["train.until='tea time'"],
        "train.until = tea time: must be a time such as 18:00, or a date with a time such as ",
    ),
    "a time without quotes in YAML": (
        ["train.until=1080"],
        "train.until = 1080: must be a time such as 18:00, or a date with a time such as "
        "2027-01-31T18:00+01:00, as text in quotes",
    ),
    "an end after the last step": (
        ["train.steps=5", "train.end_step=6"],
        "train.end_step = 6: must be at most the 5 steps of training",
    ),
    "an end before an unknown one": (
        ["train.minutes=5", "train.end_step=6"],
        "train.end_step: must be null with train.minutes = 5",
    ),
    "as many evaluation samples as an unknown number": (
        ["train.until=18:00", "eval.samples=trained"],
        "eval.samples = trained: must be all or a number with train.until = 18:00",
    ),
    "a rate for each of unknown steps": (
        ["train.minutes=5", "schedule=table", "train.schedule.file=rates.csv"],
        "train.schedule: must not be a table, which has a rate for each step, with "
        "train.minutes = 5",
    ),
    "sink epochs without a size of sinks": (
        ["train.sink_epochs=3", "train.sink_size=-1"],
        "train.sink_epochs = 3: counts sinks of sink_size steps, and sink_size is -1; set it, "
        "as in train.sink_size=100, or read the data 3 times with train.epochs=3",
    ),
    "the former name of a length": (
        ["train.passes=3"],
        "train.passes = 3: is called train.epochs now",
    ),
    "the former name of a period": (
        ["checkpoint.every_passes=1"],
        "checkpoint.every_passes = 1: is called checkpoint.every_epochs now",
    ),
    "the former name of a component's key": (
        ["schedule=linear_cosine", "train.schedule.warmup_passes=1"],
        "train.schedule.warmup_passes = 1: is called train.schedule.warmup_epochs now",
    ),
    "no length": (
        ["train.epochs=null"],
        "train: give exactly one of epochs, sink_epochs, steps, minutes, until; none is given",
    ),
    "sink of nothing": (
        ["train.sink_size=0"],
        "train.sink_size = 0: must be a number of steps, -1 (a sink an epoch) or auto; "
        "train.sink=false turns sinks off",
    ),
    "type that the device lacks": (
        ["device=ascend910", "train.precision=bf16"],
        "train.precision = bf16: Ascend 910A supports float16, float32, ",
    ),
    "two ways to type": (
        ["train.precision=O2", "train.to_float=[{pattern: conv_0, dtype: float16}]"],
        "train.to_float: conflicts with train.precision = O2, which is O2 on cpu and types every "
        "layer; use one of them: train.precision=O0, or train.to_float=[]",
    ),
    "type of a layer that there is not": (
        ["train.to_float=[{pattern: conv_0, dtype: float8}]"],
        "train.to_float.0.dtype = float8: must be 'float32', 'float16' or 'bfloat16'",
    ),
    "microbatches of different sizes": (
        ["train.accumulate_steps=5"],
        "train.accumulate_steps = 5: must divide train.batch_size = 32",
    ),
    "hardest of a microbatch": (
        ["train.loss.hardest_share=0.7", "train.accumulate_steps=2"],
        "train.loss.hardest_share = 0.7: must be 1.0 with train.accumulate_steps = 2; "
        "the hardest samples are chosen from the whole batch",
    ),
    "feature that needs microbatches": (
        ["train.features=[gradient_noise]"],
        "train.accumulate_steps = 1: must be above 1 with train.features.gradient_noise, which "
        "compares microbatches with the batch; or parallel.mode must be data, with several shards",
    ),
    "feature that needs several shards": (
        ["train.features=[gradient_noise]", "parallel.mode=data", "parallel.shards=1"],
        "train.accumulate_steps = 1: must be above 1 with train.features.gradient_noise, which "
        "compares microbatches with the batch; or parallel.mode must be data, with several shards",
    ),
    "feature that needs shards in a mode without them": (
        ["train.features=[gradient_noise]", "parallel.mode=semi_auto"],
        "train.accumulate_steps = 1: must be above 1 with train.features.gradient_noise, which "
        "compares microbatches with the batch; or parallel.mode must be data, with several shards",
    ),
    "feature of a sum": (
        ["train.features=[{name: accumulate_labels, labels: 9}]", "train.loss.reduction=sum"],
        "train.loss.reduction = sum: must be mean with accumulate_labels",
    ),
    "feature that applies the network to an observed one": (
        ["train.features=[gradient_penalty]", "optimizer=thor"],
        "train.optimizer = thor: must be another optimizer with gradient_penalty, which applies "
        "the network twice",
    ),
    "unknown feature": (
        ["train.features=[lookahed]"],
        "train.features.0.name = lookahed: there is no such feature; did you mean lookahead?",
    ),
    "batches mixed in evaluation": (
        ["dataset.eval.ops=[{name: one_hot, classes: 10}, mix_up]"],
        "dataset.eval: ops.1 (mix_up): mixes the samples of a batch, and evaluation measures each "
        "by itself; list it only under dataset.train.ops",
    ),
    "key of a component by itself": (
        ["train.on_nan.most=5"],
        "train.on_nan = {'most': 5}: must be a section with a `name`, as in "
        "train.on_nan={name: rollback, most: 5}",
    ),
    "component without a name": (
        ["train.on_nan={lest: 5}"],
        "train.on_nan = {'lest': 5}: must be a section with a `name`",
    ),
    "optional key of another model": (
        ["model.padding=same"],
        "model.padding = same: there is no such key",
    ),
    "loss scale of nothing": (
        ["train.loss_scale=0"],
        "train.loss_scale: 0 must be a finite number from 1.1754943508222875e-38",
    ),
    "dynamic scale that never grows": (
        ["train.loss_scale={name: dynamic, factor: 1}"],
        "train.loss_scale.factor = 1: must be greater than 1",
    ),
    "unknown loss scale": (
        ["train.loss_scale=dynamo"],
        "train.loss_scale.name = dynamo: there is no such loss_scale; did you mean dynamic?",
    ),
    "average of everything": (
        ["train.ema.decay=1.0"],
        "train.ema.decay = 1.0: must be less than 1",
    ),
    "stages out of order": (
        ["stages=[build,data]"],
        "must be in this order, each once: data, build",
    ),
    "stage without its ground": (["stages=[data,train]"], "train needs compile"),
    "evaluation of nothing": (
        ["stages=[data,build,compile,eval]"],
        "checkpoint.restore: missing; stages have eval without train, so name a checkpoint",
    ),
    "resuming without training": (
        ["train.resume=auto", "stages=[data]"],
        "train.resume = auto: needs the stages train and checkpoint",
    ),
    "length beyond reason": (
        ["train.epochs=60000000"],
        "train: 112500000000 steps in all; must be",
    ),
    "stage twice": (["stages=[data,data]"], "must be in this order, each once: data"),
    "name that leaves the folder": (["name=../x"], "name = ../x: "),
    "number in quotes": (["train.steps='30'"], "train.steps = '30': must be a whole number"),
    "two origins": (
        ["train.resume=auto", "checkpoint.restore=x"],
        "train.resume = auto: conflicts with checkpoint.restore = x",
    ),
    "unknown metric": (
        ["checkpoint.best=acuracy"],
        "checkpoint.best = acuracy: there is no such metric; did you mean accuracy?",
    ),
    "metric never measured": (
        ["monitor.early_stop.metric=loss"],
        "monitor.early_stop.metric = loss: needs eval.every_steps or eval.every_epochs",
    ),
    "metric measured by the clock": (
        ["monitor.early_stop.metric=loss", "eval.every_steps=5", "eval.every_seconds=60"],
        "monitor.early_stop.metric = loss: must be null with eval.every_seconds, whose steps vary",
    ),
    "crop larger than the image": (
        ["dataset.train.ops=[{name: random_crop, size: [40, 40]}]"],
        "dataset.train.ops.0 (random_crop): ",
    ),
    "splits of two shapes": (
        ["dataset.eval.ops=[]"],
        "same shape as dataset.train.ops; (32, 32, 1) in training and (28, 28, 1) in evaluation",
    ),
    "batch larger than the data": (
        ["train.batch_size=60001"],
        "train.batch_size = 60001: must be at most the 60000 training samples",
    ),
    "two classes of a name": (
        ["dataset=image_masks", "dataset.root=.", "dataset.classes=[sky, sea, sky]"],
        "dataset.classes: has the name sky twice; classes must have different names",
    ),
    "two classes of a name in files of examples": (
        ["dataset=tfrecord", "dataset.root=.", "dataset.classes=[sky, sky]"],
        "dataset.classes: has the name sky twice; classes must have different names",
    ),
    "masks that are the images": (
        ["dataset=image_masks", "dataset.root=.", "dataset.masks=images"],
        "dataset: masks = images: must be another folder than the images'",
    ),
    "no class": (
        ["dataset=image_masks", "dataset.root=.", "dataset.classes=[]"],
        "dataset.classes = []: must be a number from 1 to 256, or a list of names",
    ),
    "types of layers that the device lacks": (
        [
            "device=ascend910",
            "train.precision=O0",
            "train.to_float=[{pattern: conv_0, dtype: bfloat16}]",
        ],
        "train.to_float: Ascend 910A supports float16",
    ),
    "warmup longer than training": (
        ["train.schedule.warmup_steps=10000"],
        "train.schedule: warmup of 10000 steps must be shorter than the 10000 steps",
    ),
    "warmup in two units": (
        ["train.schedule.warmup_steps=3", "train.schedule.warmup_epochs=1.0"],
        "train.schedule: warmup_steps = 3 and warmup_epochs = 1.0: set at most one",
    ),
    "layers compiled in a compiled step": (
        ["train.jit_layers=[conv_0]"],
        "train.jit_layers = ['conv_0']: must be [] with train.mode = graph, which compiles every",
    ),
    "two backward passes and an optimizer that looks at one": (
        ["optimizer=thor", "train.gradients=sam"],
        "train.gradients = sam: must be plain with thor, which looks at layers in one backward",
    ),
    "network of code that nobody loaded": (
        ["model=flax", "model.import=nets:Net"],
        "which runs only where the command line names it: add --plugin nets.py",
    ),
    "a loop that does not divide the run": (
        ["train.iterations_per_loop=7", "train.sink_size=-1", "train.steps=10"],
        "train.iterations_per_loop = 7: must divide the 10 steps of training",
    ),
    "nothing is computed again in eager mode": (
        ["train.remat=blocks", "train.mode=eager"],
        "train.remat = blocks: must be none with train.mode = eager",
    ),
    "a profile of a run without steps": (
        ["profile.mode=only", "stages=[data,build]"],
        "stages = ['data', 'build']: must have train, whose steps are traced",
    ),
    "separate optimizers beside one that looks into layers": (
        [
            "optimizer=thor",
            "train.optimizers=[{pattern: conv_0, optimizer: "
            "{name: sgd, lr: 0.1, weight_decay: 0.0, decay_rules: []}}]",
        ],
        "train.optimizers: must be [] with thor, which looks into layers",
    ),
    "unreadable interpolation": (["seed=${nowhere}"], "seed: Interpolation key 'nowhere'"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "message"), CASES.values(), ids=CASES.keys())
def test_error_has_one_line(overrides: list[str], message: str) -> None:
    found = problems(*overrides)
    assert len(found) == 1
    assert message in found[0]


@pytest.mark.slow
def test_all_problems_are_reported_at_once() -> None:
    found = problems(
        "+train.sink_sise=5", "model.name=lenet6", "train.batch_siz=3", "loss=cros_entropy"
    )
    assert len(found) == 4
    assert sorted(problem.split(" ")[0] for problem in found) == [
        "loss",
        "model.name",
        "train.batch_siz",
        "train.sink_sise",
    ]


@pytest.mark.slow
def test_problems_of_several_rules_are_reported_together() -> None:
    found = problems("train.sink_size=0", "train.batch_size=70000", "checkpoint.best=loss")
    assert len(found) == 3


def test_every_rule_has_a_test_case() -> None:
    """The rules of privacy have theirs in test_privacy_checks.py."""
    others = {*device_checks.RULES, check_privacy}
    assert len(set(CHECKS) - others) == 26


@pytest.mark.medium
def test_shortened_run_may_end_during_warmup() -> None:
    recipe = load_recipe("resnet50_cifar10", ["train.steps=3"])
    table = recipe.train.schedule.table(0.1, 3, 1562)
    assert (recipe.train.epochs, recipe.train.steps) == (None, 3)
    assert table.tolist() == pytest.approx([0.1 / 7810, 0.2 / 7810, 0.3 / 7810])


@pytest.mark.slow
def test_unknown_recipe_suggests_the_nearest() -> None:
    (found,) = problems(recipe="lenet5_mnits")
    assert "recipe = lenet5_mnits: there is no such recipe; did you mean lenet5_mnist?" in found


@pytest.mark.slow
def test_component_override_brings_its_defaults() -> None:
    """No key of the recipe's own component remains."""
    chosen = load_recipe("lenet5_digits", ["dataset=mnist", "model=resnet20", "optimizer=adam"])
    plain = load_recipe("lenet5_mnist", ["model=resnet20", "optimizer=adam", "dataset=mnist"])
    assert chosen.dataset == plain.dataset
    assert chosen.model == plain.model == load_recipe("resnet20_cifar10").model
    assert chosen.train.optimizer == plain.train.optimizer
    assert chosen.train.optimizer.lr == 0.001


def test_plus_before_recipe_may_be_omitted() -> None:
    assert resolve_recipe(["recipe=mlp_mnist"]) == ["+recipe=mlp_mnist"]


MANY = 3_000


def _keys(indent: int) -> str:
    return "".join(f"{' ' * indent}k{n}: 1\n" for n in range(MANY))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "opening"),
    [
        (_keys(0), "k0 = 1: there is no such key"),
        (f"train:\n  optimizer:\n{_keys(4)}", "train.optimizer.k0 = 1: there is no such key"),
        (
            f"dataset: {{train: {{ops: [{', '.join(['resise'] * MANY)}]}}}}\n",
            "dataset.train.ops.0.name = resise: there is no such op; did you mean resize?",
        ),
        (
            f"train: {{freeze: [{', '.join(['1'] * MANY)}]}}\n",
            "train.freeze.0 = 1: must be a text",
        ),
    ],
    ids=["top", "deep", "components", "values"],
)
def test_thousands_of_problems_are_reported_quickly(
    text: str, opening: str, tmp_path: Path
) -> None:
    """Guessing what each of them may have been among all the others took a minute."""
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    begun_s = time.process_time()
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(file))
    assert time.process_time() - begun_s < 10
    assert len(caught.value.problems) == MANY
    lines = str(caught.value).splitlines()
    assert lines[0] == "the recipe has 3,000 problems:"
    assert lines[1].startswith(f"  {opening}")
    assert (len(lines), lines[-1]) == (52, "  ... and 2,950 more")


@pytest.mark.slow
def test_unknown_key_is_not_suggested_for_another() -> None:
    first, second = problems("+train.abcdef1=1", "+train.abcdef2=1")
    assert first == "train.abcdef1 = 1: there is no such key"
    assert second == "train.abcdef2 = 1: there is no such key"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"train.k{n}=1" for n in range(300)], "train.k0 = 1: there is no such key"),
        ([f"~train.k{n}" for n in range(300)], "~train.k0: there is no such key"),
        ([f"stages=[data{n}" for n in range(300)], "stages=[data0: no viable alternative"),
        (["seed=1"] * 1_001, "1,002 overrides; must be at most 1,000; write them into a recipe"),
        (["k" * 1_000_000 + "=1"], "kkk...: 1,000,002 characters; must be at most 10,000"),
        (["+" + "a." * 200 + "a=1"], "a.a...: a key of 402 bytes; must be at most 255"),
    ],
    ids=["unknown", "deleted", "unparsable", "too many", "long", "deep"],
)
def test_command_line_size_is_bounded(overrides: list[str], message: str) -> None:
    """Each problem was looked for by composing all the others."""
    begun_s = time.process_time()
    found = problems(*overrides)
    assert time.process_time() - begun_s < 10
    assert len(found) == (len(overrides) if len(overrides) == 300 else 1)
    assert (
        message.replace("kkk...", "k" * 57 + "...").replace("a.a...", "a." * 28 + "a...")
        in (found[0])
    )


@pytest.mark.slow
def test_error_lists_problems_of_all_kinds() -> None:
    found = problems(
        "train.k=1", "+seed=1", "~zzz", "seed", "stages=[data", "model=no", "loss=cros"
    )
    assert len(found) == 7


@pytest.mark.slow
def test_error_has_one_line_for_any_key(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text('"a\\n  error: b\\e[31m": 1\n' + "x" * 900 + ": 1\n" + "lo\u0455s: 1\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(file))
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert lines[1] == r"  a\n  error: b\x1b[31m = 1: there is no such key"
    assert max(map(len, lines)) < 200


def test_key_may_be_added_after_it_was_removed() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("lenet5_digits", ["~seed", "+seed=3", "train.stepz=5"])
    (problem,) = caught.value.problems
    assert problem.startswith("train.stepz = 5: there is no such key")
