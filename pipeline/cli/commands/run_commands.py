"""Commands about runs that are done."""

from __future__ import annotations

from pipeline.cli.commands.command import Argument, Option, RunCommand, flag
from pipeline.cli.commands.parameters import (
    MAX_SEED,
    FilePath,
    Number,
    OneOf,
    WholeNumber,
    layers_option,
    metric_option,
    out_option,
    overrides,
    path_argument,
    run_dir,
    seed_option,
    what_option,
)

SAVED_RUN = "A run that has saved a checkpoint, or one of its checkpoints."
RUN_DIRS = Argument(
    "run_dirs",
    nargs=-1,
    required=True,
    type=FilePath(is_folder=True),
    metavar="RUN_DIR ...",
    text=f"{SAVED_RUN} Several runs, or the folder of a sweep or of folds, are an ensemble: their "
    "probabilities are averaged, or the numbers of a regression.",
)
MAX_TOKENS = 1_000_000
MAX_COUNT = 999_999_999

RUN_COMMANDS = (
    RunCommand(
        "report",
        "what it gets right and wrong, as one page",
        """Evaluate a run's checkpoint on its evaluation split, and write what it gets right and
        wrong: a page without server or network (index.html), and files: every prediction, the table
        of classes, the confusion matrix, the worst mistakes, the curves of training. The page ends
        with the lineage of the run, and with its profile and dumps where it has any.""",
        [
            RUN_DIRS,
            out_option(
                "FOLDER",
                "Where to write; RUN_DIR/report without it. Several runs need it. Files of an "
                "earlier report are replaced.",
            ),
        ],
        example="report outputs/2026-11-21/14-46-29_lenet5_digits",
    ),
    RunCommand(
        "export",
        "a trained network as StableHLO, ONNX or MindSpore files",
        """Write the network of a run, with its newest weights, so that it needs no recipe any more:
        model.bin and model.mlir (StableHLO, for any batch size), weights.safetensors and
        model.json.""",
        [
            RUN_DIRS,
            path_argument(
                "folder",
                "The folder to write; one that holds something else is left alone.",
                is_folder=True,
            ),
            Option(
                "--to",
                type=OneOf(["onnx", "ckpt"]),
                was="to",
                help="onnx: also model.onnx, compared with the run in ONNX Runtime, and "
                "predict.py, which needs onnxruntime, numpy and pillow alone (pip install "
                "'recipe-pipeline[onnx]'). ckpt: instead every checkpoint as MindSpore's "
                "PREFIX-EPOCH_STEP.ckpt; FOLDER may hold other files.",
            ),
            flag(
                "--int8",
                text="Of onnx: also model_int8.onnx, calibrated with training samples.",
                was="int8",
            ),
            Option(
                "--samples",
                type=WholeNumber(1, MAX_COUNT),
                was="samples",
                help="Of int8: the number of them, 512 unless it is given.",
            ),
            flag(
                "--optimizer", text="Of ckpt: the optimizer's state in them, too.", was="optimizer"
            ),
            Option(
                "--prefix",
                was="prefix",
                metavar="NAME",
                help="Of ckpt: the name of the network unless it is given.",
            ),
        ],
        example="export outputs/2026-11-21/14-46-29_lenet5_digits digits_network --to onnx",
    ),
    RunCommand(
        "infer",
        "what it says of images, texts, rows; a text continued",
        """Print what a trained network gives to each image, text or row of a table: the class and
        its probability, or numbers in the units of the data; or continue a text.""",
        [
            run_dir(
                "source",
                metavar="RUN_DIR|FOLDER",
                text="A run that has saved a checkpoint, one of its checkpoints, or what `export` "
                "wrote; or an ensemble: the folder of a sweep, or several runs before the files.",
            ),
            Argument(
                "files",
                nargs=-1,
                type=FilePath(),
                metavar="[FILE ...]",
                text="Images as the network was trained on, folders of them (in the order of "
                "their paths), or .npy arrays of them; texts, one on each line; of a network "
                "that was trained on a table, a CSV or Parquet file with its columns, targets not "
                "needed.",
            ),
            Option(
                "--text",
                "texts",
                multiple=True,
                metavar="TEXT",
                help="A text to be classified; may be given again.",
            ),
            flag("--json", "as_json", text="Print a JSON object a line."),
            Option(
                "--top",
                type=WholeNumber(1, MAX_COUNT),
                help="The N most probable classes, 1 unless it is given.",
            ),
            Option(
                "--csv",
                type=FilePath(),
                help="Write a CSV file instead of lines: file, class and probability, or the "
                "numbers.",
            ),
            Option(
                "--masks",
                type=FilePath(is_folder=True),
                help="Of a network that gives a class to every pixel: write a mask for each image, "
                "a PNG of its size whose values are the classes.",
            ),
            Option(
                "--prompt",
                metavar="TEXT",
                help="A text to be continued, by a network that predicts the next token.",
            ),
            Option(
                "--tokens",
                type=WholeNumber(1, MAX_TOKENS),
                help="Of a prompt: how many tokens, 200 unless it is given.",
            ),
            Option(
                "--temperature",
                type=Number(0, 1e6),
                metavar="T",
                help="Of a prompt: 0 takes the most probable token; 1, which it is unless it is "
                "given, draws as the network says.",
            ),
            Option(
                "--top-k",
                type=WholeNumber(1, MAX_SEED),
                metavar="K",
                help="Of a prompt: draw from the K most probable tokens.",
            ),
            seed_option(
                "Of a prompt: other seeds draw other texts; 0 unless it is given.", default=None
            ),
        ],
        example="infer digits_network seven.png --top 3",
    ),
    RunCommand(
        "reproduce",
        "run it again: the same losses, bit for bit?",
        """Run the recipe of a run again, here and now, and compare the losses step by step, bit for
        bit.

        Exit status: 0 all is the same, 1 something differs or the new run failed, 2 a run can't be
        read.""",
        [
            run_dir(text="The run to repeat."),
            overrides("[KEY=VALUE ...]", "Keys to change, such as cache.root=DIR."),
            out_option("FOLDER", "Directory of the new run.", was="hydra.run.dir"),
        ],
        example="reproduce outputs/2026-11-21/14-46-29_lenet5_digits",
    ),
    RunCommand(
        "diff",
        "what sets two runs apart, what came of it",
        """Show what sets two runs apart: recipe, code, versions, data and machine; then their
        metrics, and the first step at which their losses differ.

        Exit status: 0, also where nothing differs; 2 where a run can't be read.""",
        [
            run_dir("run_a", text="A run directory."),
            run_dir("run_b", text="Another one."),
        ],
        example="diff outputs/2026-11-21/14-46-29_lenet5_digits outputs/again",
    ),
    RunCommand(
        "compare",
        "which layer makes two computations differ",
        """Compare one step as two sides compute it, by the columns of CANN's accuracy comparison.
        The left side is examined, the right one is the reference. Both begin at the reference's
        state, with the same batch; random draws are equal on any device and in any precision. Then
        every layer of the left side is fed with what the right side's layers read, and those that
        make more error than their type explains are named.

        Exit status: 0 no layer is named, and of dumps no row is marked; 1 one is; 2 bad input.""",
        [
            Argument(
                "words",
                nargs=-1,
                type=FilePath(is_folder=True),
                metavar="A [B] | +recipe=NAME [KEY=VALUE ...]",
                text="Two runs, or two dumps, of which the files alone are compared; with "
                "--against or --reference one run, or a recipe without a run, with fresh weights.",
            ),
            Option(
                "--against",
                multiple=True,
                metavar="CHANGES",
                was="against",
                help="The left side is A with these overrides, such as 'device=gpu', "
                "'train.precision=bf16' or 'checkpoint.restore=FILE'; A is the reference.",
            ),
            Option(
                "--reference",
                type=FilePath(is_folder=True),
                metavar="FOLDER",
                help="The right side is a step of another framework, by its .npy files: "
                "OP.OUTPUT.MICROSECONDS.npy, or as MindSpore names its dumps.",
            ),
            Option(
                "--step",
                type=WholeNumber(0, MAX_COUNT),
                was="step",
                help="Steps done: the next one is computed. That of the newest checkpoint unless "
                "it is given.",
            ),
            layers_option(),
            what_option("output", "Rows of input, output or all."),
            Option(
                "--map",
                "mapped",
                metavar="LEFT:RIGHT+RIGHT,...",
                default="",
                show_default=False,
                was="map",
                help="A left layer that stands for several right ones.",
            ),
            Option(
                "--cosine",
                type=Number(0, 1),
                was="cosine",
                help="Threshold beyond which a row is marked, 0 to 1; 0.99 unless it is given.",
            ),
            Option(
                "--max-absolute",
                type=Number(1, 5),
                was="max_absolute",
                help="The same, 1 to 5; 5 unless it is given.",
            ),
            Option(
                "--relative-euclidean",
                type=Number(0, 1),
                was="relative_euclidean",
                help="The same, 0 to 1; 0.1 unless it is given.",
            ),
            out_option("FILE", "Also write all rows as CSV.", was="out"),
        ],
        example="compare outputs/again --against train.precision=bf16",
    ),
    RunCommand(
        "dump",
        "the tensors of every layer in one step",
        """Compute a step of a run again from its saved state, and write what every layer reads and
        gives, in the forward and in the backward pass. The run is not changed. The loss is compared
        with the run's.

        Exit status: 0 written, 1 it stops early, as on a full disk, 2 the run or an argument is
        wrong.""",
        [
            run_dir(text="A run that has saved checkpoints."),
            Option(
                "--step",
                "steps",
                required=True,
                metavar="N",
                was="step",
                help="Steps done: the tensors are those of the next one; also 0|5|10 and 5-10. "
                "Without a checkpoint of N, the steps after the one before are trained again.",
            ),
            layers_option(),
            what_option("all", "What reaches layers: input, output, or all."),
            Option(
                "--as",
                "content",
                type=OneOf(["tensors", "statistics"]),
                default="tensors",
                was="as",
                help="Whole arrays as .npy files, or statistics.",
            ),
            out_option("FOLDER", "Where to; RUN_DIR/dump unless it is given.", was="path"),
            Option(
                "--max-mib",
                type=WholeNumber(1, 1_000_000),
                default=4096,
                was="max_mib",
                help="Limit of the arrays of a step.",
            ),
        ],
        example="dump outputs/again --step 500 --layers 'conv_*'",
    ),
    RunCommand(
        "runs",
        "all runs as a table, or as one page",
        "Print all runs below a folder, the best first, with the keys in which they differ.",
        [
            Argument(
                "folder",
                required=False,
                type=FilePath(is_folder=True),
                default="outputs",
                metavar="[FOLDER]",
                text="outputs/ unless it is given; folders below it are searched, links are not "
                "followed.",
            ),
            flag(
                "--html",
                text="Write one page that needs no server and no net: table with filter, curves of "
                "picked runs, parallel coordinates, importance of keys, scatter, lineage.",
            ),
            out_option("FILE", "The page of --html; FOLDER/runs.html unless it is given."),
            metric_option(
                "Rank by this metric; accuracy, or else what most runs have, unless it is given. "
                "Runs without it come last."
            ),
            flag("--json", "as_json", text="Print a JSON object a line, one for each run."),
            flag("--watch", "watches", text="Print the table every 2 seconds until Ctrl-C."),
            flag("--all", "shows_all", text="All columns and rows; else what fits."),
        ],
        example="runs outputs --html",
    ),
    RunCommand(
        "autopsy",
        "the non-finite step that ended a run, looked into",
        """Compute the non-finite step that ended a run once more and say where the loss or a
        gradient ceased to be finite: layer, tensor, ranges of its operands, samples of the batch.

        Exit status: 0 found again what the run had found, 1 found something else, 2 there is
        nothing to look into.""",
        [
            run_dir(
                text="A run that ended at a loss that is not finite, or the reproducer that it "
                "has kept."
            )
        ],
        example="autopsy outputs/2026-11-21/14-46-29_lenet5_digits",
    ),
)
