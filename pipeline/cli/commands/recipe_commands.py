"""Commands about a recipe, a data file or a new project."""

from __future__ import annotations

from pipeline.cli.commands.command import Argument, ComparingCommand, LazyCommand, Option, flag
from pipeline.cli.commands.parameters import (
    OneOf,
    WholeNumber,
    metric_option,
    out_option,
    overrides,
    path_argument,
    seed_option,
)

MAX_COUNT = 1_000_000

RECIPE_COMMANDS = (
    LazyCommand(
        "explain",
        "what sinks cost, hold and buy here, measured",
        """Measure what a dispatch costs here, say which sink size is chosen and why, where events
        split sinks, and train a few steps to see whether it holds. The weights are thrown away.""",
        [overrides(), out_option("FOLDER", "Also write explain.json there.", was="hydra.run.dir")],
        example="explain +recipe=lenet5_digits train.batch_size=64",
    ),
    LazyCommand(
        "profile",
        "where the time of a step goes, and a verdict",
        """Train as long as it takes to trace 20 to 200 steps inside of a sink, and say where their
        time goes: by phase, layer and operator, with the iteration trace, FLOP and bytes against
        measured peaks, memory, the host's share, and one line of verdict with the change that would
        help. The run directory gets profile/ with profile.json, table.txt, trace.json (for
        Perfetto) and picture.svg. With device=ascend910 the modelled step of that device stands
        beside the measured one of the host.

        Keys of the recipe say what is traced: profile.start=N after N steps, else once the run is
        warm; profile.steps=N 20 to 200 steps, else 60 or fewer; profile.output=DIR another folder.
        A whole run is profiled by profile.mode=on, or PROFILING_MODE=true and
        PROFILING_OPTIONS.

        A run directory in place of a recipe makes the same files again from its recorded trace,
        profile/raw/, without training.""",
        [
            overrides(
                "[RUN_DIR | +recipe=NAME] [KEY=VALUE ...]",
                "A profiled run, or a recipe, lenet5_digits unless it is given, and its keys.",
                may_be_run=True,
            )
        ],
        example="profile +recipe=lenet5_digits",
    ),
    LazyCommand(
        "forecast",
        "predict the time of a step; --check compares it with a measurement",
        """Say what a step of a recipe will take on its device, before it is compiled: the sum of
        its parts, the heaviest of which are timed here one by one; on an emulated device by its
        model.""",
        [
            overrides(),
            flag(
                "--check",
                text="Also compile it, run some steps, and say how far off the forecast was.",
            ),
        ],
        example="forecast +recipe=lenet5_digits --check",
    ),
    LazyCommand(
        "find-rate",
        "the learning rate to start with",
        """Train for a few steps at learning rates that grow from 1e-6 to 10, and print the rate at
        which the loss falls fastest. Nothing is written but the page of `--out`.""",
        [
            overrides(),
            Option(
                "--steps",
                type=WholeNumber(20, 100_000),
                default=200,
                help="Steps of the search. Networks that learn slowly at first need more.",
            ),
            out_option("FILE", "Write a page with the losses at each rate."),
        ],
        example="find-rate +recipe=lenet5_digits",
    ),
    ComparingCommand(
        "better",
        "is a change of a recipe better than its noise?",
        """Train a recipe, side A, and the same with the keys after --, side B, over the same seeds,
        until a sequential test finds one better, at 95 %, or the budget is used. Print the verdict
        with its interval. Stopped, it continues as a sweep does.""",
        [
            overrides(
                "[+recipe=NAME] [KEY=VALUE ...] -- KEY=VALUE ...",
                "Recipe, lenet5_digits unless it is given, and its keys; after -- the keys and "
                "components in which side B differs.",
            ),
            metric_option("What is compared; accuracy if the evaluation has it."),
            Option(
                "--pairs",
                type=WholeNumber(6, 1000),
                default=16,
                help="Most pairs of runs; fewer than 6 can't decide.",
            ),
            Option(
                "--minutes",
                type=WholeNumber(1, MAX_COUNT),
                help="Start no pair that would end later.",
            ),
        ],
        example="better +recipe=lenet5_digits -- train.optimizer.lr=0.04",
    ),
    LazyCommand(
        "folds",
        "cross-validation: mean and spread of every metric",
        """Split the training data into folds, with equal shares of each class, and train as often:
        each run evaluates one fold, and trains on the others. The runs are the jobs of a sweep, in
        one program if the recipe allows it, and are resumed and shared like one. Print mean and
        spread of every metric. Write them into folds.csv, and the prediction for each training
        sample into out_of_fold.csv.

        Exit status: as for a sweep; 2 for more folds than samples of a class.""",
        [
            overrides(),
            Option("--k", type=WholeNumber(2, MAX_COUNT), default=5, help="Number of folds."),
            seed_option("Other seeds assign the samples to other folds."),
        ],
        example="folds --k 5 +recipe=lenet5_digits",
    ),
    LazyCommand(
        "job",
        "a file for Slurm, Kubernetes, Ray or SkyPilot",
        """Print a file by which a scheduler runs a recipe: with a time limit from the forecast,
        memory and time to stop as measured here, and a retry after exit status 75 alone. Nothing is
        measured if time and memory are given. Everything else is printed on stderr.""",
        [
            overrides(),
            Option(
                "--to",
                required=True,
                type=OneOf(["slurm", "jobset", "trainjob", "ray", "skypilot"]),
                help="The scheduler; jobset and trainjob are for Kubernetes.",
            ),
            Option(
                "--processes",
                type=WholeNumber(1, MAX_COUNT),
                help="Tasks, pods, workers or nodes, which share the devices; launch.processes, or "
                "1, unless it is given.",
            ),
            Option("--image", metavar="NAME", help="Image; of slurm, for `apptainer exec`."),
            Option("--gpu", metavar="KIND", help="Kind of GPU, for slurm and skypilot."),
            Option("--minutes", type=WholeNumber(1, MAX_COUNT), help="Time limit of the job."),
            Option("--memory-gib", type=WholeNumber(1, MAX_COUNT), help="Memory of a process."),
        ],
        example="job --to slurm +recipe=lenet5_digits > job.sh",
    ),
    LazyCommand(
        "summary",
        "layers, shapes, parameters, what is trained",
        """List the layers of a network: path, kind, shape of the result for one sample, parameters
        with their shapes and type, whether they are trained or frozen, or from which step on.
        Nothing is compiled, and the dataset is read only where its sizes aren't known without.""",
        [
            overrides(
                "[RUN_DIR | +recipe=NAME] [KEY=VALUE ...]",
                "A run or one of its checkpoints, or a recipe, lenet5_digits unless it is given; "
                "keys and components, as for a run.",
                may_be_run=True,
            ),
            flag("--json", "as_json", text="Print one JSON object."),
        ],
        example="summary +recipe=resnet20_cifar10 'train.freeze=[\"!dense_0\"]'",
    ),
    LazyCommand(
        "doctor",
        "are device, cache, data, disk, limits ok?",
        """See before a run whether device, cache, data, disk and limits are as it needs them.
        Nothing is downloaded.

        Exit status: 0 all is well or worth a look, 1 a check has failed, 2 the recipe is wrong.""",
        [overrides()],
        example="doctor +recipe=lenet5_mnist dataset.root=DIR",
    ),
    LazyCommand(
        "recommend",
        "what to try next, by what runs have shown",
        """Read the results of earlier runs and say which values to try next, as commands to copy,
        and the command of a study that begins with what these runs have shown.""",
        [
            path_argument(
                "folder",
                "Earlier runs; those of the same recipe, but for the searched keys, count.",
                is_folder=True,
            ),
            overrides(
                "+recipe=NAME KEY=RANGE ...",
                "A recipe, and the keys that are searched: 'tag(log,interval(0.001,0.1))', "
                "'interval(8,64)' or 16,32,64.",
            ),
            metric_option(
                "What is compared: train_loss, or a metric of the evaluation.", "accuracy"
            ),
            Option("--count", type=WholeNumber(1, 1000), default=3, help="Runs to propose."),
            Option(
                "--sampler",
                type=OneOf(["tpe", "gp", "gp-pi", "gp-ucb", "random"]),
                default="tpe",
                help="tpe: tree-structured Parzen estimator; gp: Gaussian process with expected "
                "improvement, gp-pi with the probability of one, gp-ucb with the upper confidence "
                "bound; random.",
            ),
            seed_option("Seed of the sampler."),
        ],
        example="recommend outputs +recipe=lenet5_digits \\\n"
        "             'train.optimizer.lr=tag(log,interval(0.001,0.5))' train.batch_size=16,32,64",
    ),
    LazyCommand(
        "columns",
        "the columns of a CSV file, and their types",
        "Print the columns of a CSV or Parquet file, with the type that is found and what is "
        "missing.",
        [
            path_argument("file", "A CSV file, or one that ends in .parquet."),
            Option(
                "--delimiter",
                was="delimiter",
                help="Character between values; found unless it is given.",
            ),
            Option("--decimal", was="decimal", help="Decimal separator."),
            Option("--encoding", was="encoding", help="Encoding of the text."),
            flag("--no-header", text="The first line has no names.", was="header"),
        ],
        example="columns houses.csv",
    ),
    LazyCommand(
        "adopt",
        "settings of mindcv, timm or an Estimator as a recipe",
        """Write a recipe of the settings of another trainer: a YAML of mindcv, the args.yaml of
        timm, or a Python script that calls NPURunConfig. Each setting is mapped, or named with the
        reason. A script is parsed and never run; only literals count. Refused: what Ascend's
        adapter for TensorFlow refuses, and networks, datasets and optimizers that aren't here.""",
        [
            path_argument("file", "A .py script, or a YAML file."),
            out_option("FILE", "The recipe to write; without it, recipes/ and the file's name."),
        ],
        example="adopt resnet18_ascend.yaml --out recipes/mine.yaml",
    ),
    LazyCommand(
        "new",
        "a project with custom components",
        "Make a folder with a recipe, a plug-in with a component of each kind, tests and a README.",
        [Argument("name", metavar="NAME", text="Folder to make: letters, digits and _.")],
        example="new demo && cd demo && python -m pipeline --plugin components.py +recipe=demo",
    ),
    LazyCommand(
        "schema",
        "JSON schema of recipes, for editors",
        "Print the JSON schema of recipes, from which editors complete and check them.",
        [],
        example="schema > recipe.schema.json",
        prints_facts=False,
    ),
)
