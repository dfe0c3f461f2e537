"""Commands about a recipe, a data file or a new project, and conversions between formats."""

from __future__ import annotations

from pipeline.cli.commands.command import (
    Argument,
    CommandGroup,
    ComparingCommand,
    LazyCommand,
    Option,
    flag,
)
from pipeline.cli.commands.parameters import (
    MAX_COUNT,
    CommaList,
    FilePath,
    OneOf,
    Override,
    Size,
    count_option,
    metric_option,
    out_option,
    overrides_argument,
    page_option,
    path_argument,
    seed_option,
)

MAX_NUMBER = 1_000_000

RECIPE_COMMANDS = (
    LazyCommand(
        "explain",
        "how many steps to hand to the device at once, measured",
        """Choose a sink size, the number of steps that the device computes without the host, and
        print why: what the host takes to start steps, which evaluations and checkpoints come
        between, and the gain in speed, predicted and measured.""",
        [overrides_argument(), out_option("FOLDER", "Also write explain.json there.")],
        example="explain +recipe=lenet5_digits train.batch_size=64",
    ),
    LazyCommand(
        "profile",
        "the time of each part of a step, and a verdict",
        """Trace 20 to 200 training steps, and print their time by phase, layer and operator, with a
        verdict: what limits the step, and the change that would help. Write profile/ in the run
        directory. RUN_DIR@N profiles the steps of a done run after step N, in a fork of it.

        Keys: profile.start, profile.steps, profile.output; profile.mode=on profiles a whole
        run.""",
        [
            overrides_argument(
                "[RUN_DIR | RUN_DIR@N | +recipe=NAME] [KEY=VALUE ...]",
                "A profiled run, a step of a run, or a recipe (default: lenet5_digits).",
                may_be_run=True,
            )
        ],
        example="profile +recipe=lenet5_digits",
    ),
    LazyCommand(
        "forecast",
        "predict the time of a step; --check compares it with a measurement",
        """Predict the time of a step of a recipe on its device before it is compiled: the sum of
        its parts, the slowest of which are timed.""",
        [
            overrides_argument(),
            flag("--check", text="Also run some steps, and print the error of the forecast."),
        ],
        example="forecast +recipe=lenet5_digits --check",
    ),
    LazyCommand(
        "find-rate",
        "the learning rate to start with",
        """Train for a few steps at learning rates that grow from 1e-6 to 10, and print the rate at
        which the loss falls fastest.""",
        [
            overrides_argument(),
            count_option(
                "--steps",
                "Steps of the search; more for a slow start.",
                least=20,
                most=100_000,
                default=200,
            ),
            page_option("Write a page with the losses at each rate."),
        ],
        example="find-rate +recipe=lenet5_digits",
    ),
    ComparingCommand(
        "better",
        "is a recipe better with changed keys, beyond noise?",
        """Train a recipe, side A, and the same with the keys after --, side B, over the same seeds,
        until a test at 95 % finds one better, or the budget is used.""",
        [
            overrides_argument(
                "[+recipe=NAME] [KEY=VALUE ...] -- KEY=VALUE ...",
                "Recipe (default: lenet5_digits) and its keys; after -- the keys of side B.",
            ),
            metric_option("Metric to compare (default: accuracy, else the main one)."),
            count_option(
                "--pairs",
                "Most pairs of runs, at least 6 for a verdict.",
                least=6,
                most=1000,
                default=16,
            ),
            count_option("--minutes", "Start no pair that would end later.", most=MAX_NUMBER),
            page_option("Write a page with the pairs and the running interval."),
        ],
        example="better +recipe=lenet5_digits -- train.optimizer.lr=0.04",
    ),
    LazyCommand(
        "arena",
        "which optimizer, tuned equally, is better?",
        """Tune two to six optimizers, or values of a key, by the same number of trials each, and
        compare them over fresh seeds, on eight shipped workloads or on a recipe. Write a page, the
        numbers as JSON, and logs in AlgoPerf's format. The same command on the same folder
        continues.""",
        [
            overrides_argument(
                "[+recipe=NAME [KEY=VALUE ...]]",
                "Recipe and its keys (default: the shipped workloads).",
            ),
            Option(
                "--optimizers",
                type=CommaList(),
                metavar="A,B,...",
                default=(),
                show_default=False,
                help="Optimizers to compare (default: adamw, momentum, lion and muon).",
            ),
            Option("--key", metavar="KEY", help="Key to compare, instead of the optimizer."),
            Option("--values", metavar="A,B,...", help="Its values."),
            Option("--baseline", metavar="VALUE", help="Default: adamw, else the first value."),
            Option(
                "--workloads",
                type=CommaList(),
                metavar="NAME,...",
                default=(),
                show_default=False,
                help="Some of digits, halves, table, regression, series, sound, text, retrieval.",
            ),
            Option(
                "--search",
                multiple=True,
                metavar="[VALUE:]KEY=LOW,HIGH",
                help="Range of a searched number; repeatable (default: three decades of the "
                "learning rate).",
            ),
            metric_option("Metric of a recipe's evaluations (default: the main one)."),
            Option(
                "--tune-on",
                type=OneOf(["fold", "eval"]),
                default="fold",
                help="Trials evaluate a fold of the training split, or the evaluation split.",
            ),
            count_option("--trials", "Trials of each value.", least=2, most=1000, default=6),
            count_option("--seeds", "Fresh seeds of each value.", least=6, most=1000, default=10),
            seed_option("Seed of the trials and their numbers; fresh seeds follow it."),
            out_option("FOLDER", "Folder of the arena (default: a new one under outputs/)."),
        ],
        example="arena --optimizers adamw,muon --workloads digits,table --out contest",
    ),
    LazyCommand(
        "test",
        "do runs of recipes meet their section `expect`?",
        """Train recipes, and print a line for each expectation of their section `expect`. Against
        another side, equal bits need one short run of each, and so does a first step that differs
        by more than rounding; else both train over the same seeds, until a test at 99 % finds a
        difference, or the pairs are used.

        Exit status: 0 all are met, 1 one isn't or nothing could be compared, 2 a recipe is
        wrong.""",
        [
            Argument(
                "recipes",
                nargs=-1,
                metavar="[RECIPE ...]",
                text="Names or files; without them, those in recipes/ that have the section.",
            ),
            Option(
                "--against",
                metavar="COMMIT|RUN",
                help="The other side: a commit of the folder's repository, or a run.",
            ),
            Option(
                "--junit",
                type=FilePath(checks_folder=True),
                metavar="FILE",
                help="Also write a JUnit file.",
            ),
            count_option(
                "--pairs", "Most pairs of runs for an expectation.", least=9, most=1000, default=16
            ),
            flag("--record", text="Record the figures of this run, then compare."),
            flag(
                "--other-draws",
                text="The commit draws other random numbers, on purpose: pairs alone decide.",
            ),
        ],
        example="test lenet5_digits --against HEAD~1 --junit expectations.xml",
    ),
    LazyCommand(
        "folds",
        "cross-validation: mean and spread of every metric",
        """Train a recipe once for each fold of its training data, as the jobs of a sweep. Print
        mean and spread of every metric. Write folds.csv, and out_of_fold.csv with a prediction for
        each training sample.""",
        [
            overrides_argument(),
            count_option("--k", "Number of folds.", least=2, most=MAX_NUMBER, default=5),
            seed_option("Seed of the folds."),
        ],
        example="folds --k 5 +recipe=lenet5_digits",
    ),
    LazyCommand(
        "job",
        "a file for Slurm, Kubernetes, Ray or SkyPilot",
        """Print a scheduler's file for a recipe, with the time limit, memory and time to stop that
        are measured here, and a retry after exit status 75 alone.""",
        [
            overrides_argument(),
            Option(
                "--to",
                required=True,
                type=OneOf(["slurm", "jobset", "trainjob", "ray", "skypilot"]),
                help="Scheduler; jobset and trainjob: Kubernetes.",
            ),
            count_option(
                "--processes",
                "Tasks, pods, workers or nodes (default: launch.processes, or 1).",
                most=MAX_NUMBER,
            ),
            Option("--image", metavar="NAME", help="Image; with slurm for `apptainer exec`."),
            Option("--gpu", metavar="KIND", help="Kind of GPU, for slurm and skypilot."),
            count_option("--minutes", "Time limit, instead of the forecast.", most=MAX_NUMBER),
            count_option(
                "--memory-gib", "Memory of a process, instead of the measured one.", most=MAX_NUMBER
            ),
        ],
        example="job --to slurm +recipe=lenet5_digits > job.sh",
    ),
    LazyCommand(
        "summary",
        "layers, shapes, parameters, what is trained",
        """List the layers of a network: path, kind, output shape, parameters with shapes and dtype,
        and whether they are trained, or from which step on. Nothing is compiled.""",
        [
            overrides_argument(
                "[RUN_DIR | +recipe=NAME] [KEY=VALUE ...]",
                "A run, a checkpoint, or a recipe (default: lenet5_digits), and keys.",
                may_be_run=True,
            ),
            flag("--json", "as_json", text="Print one JSON object."),
        ],
        example="summary +recipe=resnet20_cifar10 'train.freeze=[\"!dense_0\"]'",
    ),
    LazyCommand(
        "doctor",
        "are device, cache, data, disk, limits ok?",
        """Check device, cache, data, disk and limits before a run. Nothing is downloaded.

        Exit status: 0 all is well, maybe with warnings, 1 a check has failed, 2 the recipe is
        wrong.""",
        [
            overrides_argument(),
            flag("--details", text="Also print the checks that are fine."),
            flag("--self-test", text="Also train, replay, export and price small runs: 30 s."),
        ],
        example="doctor +recipe=lenet5_mnist dataset.root=DIR",
    ),
    LazyCommand(
        "recommend",
        "what to try next, by what runs have shown",
        """Print which values to try next after earlier runs, as commands, and the command of a
        study that continues them.""",
        [
            path_argument(
                "folder", "Earlier runs; only those of the same recipe are used.", is_folder=True
            ),
            overrides_argument(
                "+recipe=NAME KEY=RANGE ...",
                "A recipe, and the keys that are searched: 'tag(log,interval(0.001,0.1))', "
                "'interval(8,64)' or 16,32,64.",
            ),
            metric_option("Metric to compare: train_loss, or one of the evaluation.", "accuracy"),
            count_option("--count", "Runs to propose.", most=1000, default=3),
            Option(
                "--sampler",
                type=OneOf(["tpe", "gp", "gp-pi", "gp-ucb", "random"]),
                default="tpe",
                help="tpe: tree-structured Parzen estimator; gp: Gaussian process by expected "
                "improvement; gp-pi by its probability; gp-ucb by the upper confidence bound; "
                "random.",
            ),
            seed_option("Seed of the sampler."),
        ],
        example="recommend outputs +recipe=lenet5_digits \\\n"
        "             'train.optimizer.lr=tag(log,interval(0.001,0.5))' train.batch_size=16,32,64",
    ),
    LazyCommand(
        "columns",
        "the columns of a file or a dataset, and their types",
        """Print the columns of a CSV or Parquet file, their types and missing values; or those of a
        recipe's dataset, their shapes and types before and after the map ops, and what the network
        reads of them.""",
        [
            Argument(
                "words",
                nargs=-1,
                required=True,
                type=Override(may_be_run=True),
                metavar="FILE | +recipe=NAME [KEY=VALUE ...]",
                text="A CSV file, one that ends in .parquet, or a recipe and keys.",
            ),
            Option("--delimiter", help="Character between values (default: detected)."),
            Option("--decimal", help="Decimal separator."),
            Option("--encoding", help="Encoding of the text."),
            flag("--no-header", text="The first line has no names."),
        ],
        example="columns houses.csv",
    ),
    LazyCommand(
        "adopt",
        "another trainer's settings (Lightning, Keras, timm, ...) as a recipe",
        """Write a recipe from another trainer's settings: a config of Lightning (Hydra,
        LightningCLI), a JSON of Hugging Face's TrainingArguments, a YAML of mindcv, the args.yaml
        of timm, or a script of Keras or with NPURunConfig, which isn't run. Print each setting,
        mapped or with the reason why not.""",
        [
            path_argument("file", "A .py script, a YAML or a JSON file."),
            out_option("FILE", "Recipe to write (default: recipes/ and the file's name)."),
        ],
        example="adopt resnet18_ascend.yaml --out recipes/mine.yaml",
    ),
    LazyCommand(
        "new",
        "a project with custom components",
        "Make a project: a recipe, a plug-in with a component of each kind, tests and a README.",
        [Argument("name", metavar="NAME", text="Folder to make: letters, digits and _.")],
        example="new demo && cd demo && python -m pipeline --plugin components.py +recipe=demo",
    ),
    LazyCommand(
        "schema",
        "JSON schema of recipes, for editors",
        "Print the JSON schema of recipes, for editors.",
        [],
        example="schema > recipe.schema.json",
        prints_facts=False,
    ),
)


CONVERT = CommandGroup(
    "convert",
    "weights, data and networks, from one format into another",
    "Convert weights from one format and one set of names into another, a dataset into ArrayRecord "
    "files, or a network of PyTorch or ONNX into a recipe. Each has its own help: "
    "`convert weights --help`.",
    [
        LazyCommand(
            "convert weights",
            "weights of other frameworks, renamed",
            """Convert weights to the names and layout of a recipe's network. Without a recipe only
            the format changes.""",
            [
                path_argument(
                    "source",
                    ".safetensors, .ckpt, .pt, .pth, .npz, .index, .keras or .h5, or a run "
                    "(default recipe: the run's).",
                ),
                path_argument("target", ".safetensors, .ckpt or .npz."),
                overrides_argument(text="The network's recipe, and its keys."),
                Option(
                    "--rules",
                    type=OneOf(["auto", "none", "torch", "mindspore", "tensorflow"]),
                    help="Framework whose names SOURCE has (sets checkpoint.rules).",
                ),
                flag("--partial", text="Take what matches (sets checkpoint.partial=true)."),
                Option(
                    "--like", type=FilePath(), help="Write the names, layout and dtypes of FILE."
                ),
            ],
            example="convert weights theirs.pth ours.safetensors +recipe=resnet18_cifar10",
        ),
        LazyCommand(
            "convert records",
            "any dataset as ArrayRecord files",
            "Write a dataset as ArrayRecord files, for dataset=records.",
            [
                path_argument("out", "The folder to write.", is_folder=True),
                overrides_argument(
                    "dataset=NAME [KEY=VALUE ...]",
                    "The dataset, and keys of a recipe, such as dataset.root=DIR.",
                ),
                flag("--overwrite", text="Replace existing records."),
            ],
            example="convert records cifar dataset=cifar10 dataset.root=DIR",
        ),
        LazyCommand(
            "convert model",
            "a network of PyTorch or ONNX as a recipe",
            """Write a torch.nn.Module or an ONNX file's network as a recipe with weights.
            The recipe lists layers, or names a graph file if no layer fits a module.""",
            [
                Argument(
                    "module",
                    metavar="MODULE",
                    text="A class, function or module of a plug-in, such as my_nets:MyNet, or an "
                    "ONNX file.",
                ),
                path_argument(
                    "target",
                    "my_net.yaml, weights beside it in my_net.safetensors; or my_net.torch.json "
                    "for a graph without recipe.",
                ),
                Argument(
                    "sizes",
                    nargs=-1,
                    metavar="[SIZE ...]",
                    type=Size(1, MAX_COUNT),
                    text="Channels, height and width of a sample (default: the ONNX file's, or 3 "
                    "224 224).",
                ),
                Option(
                    "--argument",
                    "arguments",
                    multiple=True,
                    metavar="NAME=VALUE",
                    help="An argument of MODULE, such as num_classes=10; repeatable. For ONNX: "
                    "output=NAME, the tensor of logits.",
                ),
            ],
            example="--plugin torchvision.models convert model torchvision.models:resnet18 \\\n"
            "             resnet18.yaml 3 32 32 --argument num_classes=10",
        ),
    ],
)
