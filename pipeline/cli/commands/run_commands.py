"""Commands about runs that are done."""

from __future__ import annotations

from pipeline.cli.commands.command import Argument, Option, RunCommand, flag
from pipeline.cli.commands.parameters import (
    MAX_SEED,
    FilePath,
    Number,
    OneOf,
    WholeNumber,
    approximate_option,
    count_option,
    layers_option,
    metric_option,
    out_option,
    overrides_argument,
    path_argument,
    run_argument,
    seed_option,
    what_option,
)

RUN_DIRS = Argument(
    "run_dirs",
    nargs=-1,
    required=True,
    type=FilePath(is_folder=True),
    metavar="RUN_DIR ...",
    text="A run, or one of its checkpoints. Several runs, a sweep or folds are an ensemble.",
)
MAX_TOKENS = 1_000_000
MAX_STEP = 999_999_999

RUN_COMMANDS = (
    RunCommand(
        "report",
        "what a network gets right and wrong, as a page",
        """Evaluate a checkpoint on the evaluation split, and write a page (index.html) and files:
        predictions, classes, the confusion matrix, mistakes, curves and lineage.""",
        [
            RUN_DIRS,
            out_option("FOLDER", "Folder (default: RUN_DIR/report); required with several runs."),
        ],
        example="report outputs/2026-11-21/14-46-29_lenet5_digits",
    ),
    RunCommand(
        "export",
        "a trained network as StableHLO, ONNX or MindSpore files",
        """Write the network of a run with its newest weights: model.bin and model.mlir (StableHLO,
        for any batch size), weights.safetensors and model.json.""",
        [
            RUN_DIRS,
            path_argument("folder", "Folder to write, without other files.", is_folder=True),
            Option(
                "--to",
                type=OneOf(["onnx", "ckpt"]),
                help="onnx: also model.onnx, compared with the run, and predict.py (pip install "
                "'recipe-pipeline[onnx]'). ckpt: instead every checkpoint as MindSpore's "
                "PREFIX-EPOCH_STEP.ckpt; FOLDER may have other files.",
            ),
            flag("--int8", text="With onnx: also model_int8.onnx."),
            count_option(
                "--samples", "With --int8: training samples that calibrate it (default: 512)."
            ),
            Option(
                "--weights",
                type=OneOf(["int8", "int4"]),
                help="With onnx: also model_weights.onnx, whose weights alone are whole numbers.",
            ),
            flag("--optimizer", text="With ckpt: also the optimizer's state."),
            Option(
                "--prefix", metavar="NAME", help="With ckpt: PREFIX (default: the network's name)."
            ),
        ],
        example="export outputs/2026-11-21/14-46-29_lenet5_digits digits_network --to onnx",
    ),
    RunCommand(
        "infer",
        "predictions of images, texts, rows; a text continued",
        """Print the class and its probability of each image, text or row of a table, or numbers in
        the units of the data; or continue a text.""",
        [
            run_argument(
                "source",
                metavar="RUN_DIR|FOLDER",
                text="A run, a checkpoint, an export, or an ensemble: a sweep, or several runs.",
            ),
            Argument(
                "files",
                nargs=-1,
                type=FilePath(),
                metavar="[FILE ...]",
                text="Images, folders of images, or .npy arrays; files with a text on each line; "
                "CSV or Parquet files with the columns of the training.",
            ),
            Option(
                "--text",
                "texts",
                multiple=True,
                metavar="TEXT",
                help="Text to classify; repeatable.",
            ),
            flag("--json", "as_json", text="Print a JSON object a line."),
            count_option("--top", "The N most probable classes (default: 1)."),
            Option("--csv", type=FilePath(), help="Write a CSV file instead of lines."),
            Option(
                "--masks",
                type=FilePath(is_folder=True),
                help="Write a mask for each image: a PNG of the pixels' classes.",
            ),
            Option("--prompt", metavar="TEXT", help="Text to continue."),
            count_option(
                "--tokens", "With --prompt: number of tokens (default: 200).", most=MAX_TOKENS
            ),
            Option(
                "--temperature",
                type=Number(0, 1e6),
                metavar="T",
                help="With --prompt: 0 takes the most probable token, 1 draws by the network's "
                "probabilities (default: 1).",
            ),
            Option(
                "--top-k",
                type=WholeNumber(1, MAX_SEED),
                metavar="K",
                help="With --prompt: draw from the K most probable tokens.",
            ),
            seed_option("With --prompt: seed of the draws (default: 0).", default=None),
        ],
        example="infer digits_network seven.png --top 3",
    ),
    RunCommand(
        "reproduce",
        "does a run repeat its losses, bit for bit?",
        """Run the recipe of a run again, and compare the losses of each step, bit for bit.

        Exit status: 0 equal, 1 something differs or the new run failed, 2 a run can't be read.""",
        [
            run_argument(text="The run to repeat."),
            overrides_argument("[KEY=VALUE ...]", "Keys to change, such as cache.root=DIR."),
            out_option("FOLDER", "Directory of the new run."),
        ],
        example="reproduce outputs/2026-11-21/14-46-29_lenet5_digits",
    ),
    RunCommand(
        "fork",
        "train on from a step of a run, with changed keys",
        """Write a new run directory that begins with the state of a run at a step, replayed if it
        isn't saved, and train on from there with the changed keys; a done run goes on longer.

        Exit status: 0 done, 1 the new run failed or the bits can't be had, 2 the run, the step or a
        key is wrong.""",
        [
            path_argument(
                "place",
                "A run, and the number of steps that the fork keeps; end: all.",
                metavar="RUN_DIR@N",
                is_folder=True,
            ),
            overrides_argument("[KEY=VALUE ...]", "Keys that the steps after N have."),
            out_option("FOLDER", "Empty folder for the new run."),
        ],
        example="fork outputs/again@end train.epochs=20",
    ),
    RunCommand(
        "diff",
        "how two runs and their results differ",
        """Compare two runs: recipe, code, versions, data and machine, metrics, and the first step
        at which losses differ.

        Exit status: 0, also if nothing differs; 2 if a run can't be read.""",
        [
            run_argument("run_a", text="A run directory."),
            run_argument("run_b", text="Another one."),
        ],
        example="diff outputs/2026-11-21/14-46-29_lenet5_digits outputs/again",
    ),
    RunCommand(
        "bisect",
        "which keys, rows or versions make two runs differ",
        """Search the smallest set of keys with which GOOD has the numbers of BAD up to the first
        step that differs, bit for bit; or compare the rows which that step reads; or say whether
        versions, code and machine make the difference. Only first steps are trained again, in a
        temporary folder.

        Exit status: 0 something is named, 1 a run doesn't repeat its bits here, 2 bad input.""",
        [
            run_argument("good", metavar="GOOD", text="A run."),
            run_argument("bad", metavar="BAD", text="Another one, whose numbers are a surprise."),
            Option(
                "--over",
                type=OneOf(["keys", "rows", "versions"]),
                default="keys",
                help="What to search.",
            ),
            metric_option("Search keys by which this metric is worse, by whole runs instead."),
            count_option("--pairs", "With --metric: most seeds of a comparison.", default=8),
        ],
        example="bisect outputs/again outputs/surprise",
    ),
    RunCommand(
        "compare",
        "which layer makes two computations differ",
        """Compare a step that two sides compute from the same state and batch, by the columns of
        CANN's accuracy comparison, and name layers of the left side with more error than their type
        explains. The right side is the reference.

        Exit status: 0 no layer is named (of dumps: no row is marked), 1 otherwise, 2 bad
        input.""",
        [
            Argument(
                "words",
                nargs=-1,
                type=FilePath(is_folder=True),
                metavar="A [B] | +recipe=NAME [KEY=VALUE ...]",
                text="Two runs or two dumps; with --against or --reference one run, or a recipe "
                "with fresh weights.",
            ),
            Option(
                "--against",
                multiple=True,
                metavar="CHANGES",
                help="The left side is A with these overrides, such as train.precision=bf16.",
            ),
            Option(
                "--reference",
                type=FilePath(is_folder=True),
                metavar="FOLDER",
                help="The right side is a step of another framework: files "
                "OP.OUTPUT.MICROSECONDS.npy, or MindSpore's dumps.",
            ),
            count_option(
                "--step",
                "Steps done; the next one is compared (default: the newest checkpoint).",
                least=0,
            ),
            layers_option(),
            what_option("output", "Tensors to compare."),
            Option(
                "--map",
                "mapped",
                metavar="LEFT:RIGHT+RIGHT,...",
                default="",
                show_default=False,
                help="A left layer that replaces several right ones.",
            ),
            Option(
                "--cosine",
                type=Number(0, 1),
                help="Threshold that marks a row, 0 to 1 (default: 0.99).",
            ),
            Option("--max-absolute", type=Number(1, 5), help="The same, 1 to 5 (default: 5)."),
            Option(
                "--relative-euclidean", type=Number(0, 1), help="The same, 0 to 1 (default: 0.1)."
            ),
            out_option("FILE", "Also write all rows as CSV, or FILE.html: a page with sliders."),
            approximate_option(),
        ],
        example="compare outputs/again --against train.precision=bf16",
    ),
    RunCommand(
        "dump",
        "the tensors of every layer in one step",
        """Compute a step of a run again, and write inputs and outputs of every layer, forward and
        backward. The loss is compared with the run's.

        Exit status: 0 written, 1 stopped early, as on a full disk, or the state can't be had, 2 the
        run or an argument is wrong.""",
        [
            run_argument(text="A run; without a checkpoint of the step, it is replayed."),
            Option(
                "--step",
                "steps",
                required=True,
                metavar="N",
                help="Steps done: the tensors are those of the next step; also 0|5|10 and 5-10.",
            ),
            layers_option(),
            what_option("all", "Tensors to write."),
            Option(
                "--as",
                "content",
                type=OneOf(["tensors", "statistics"]),
                default="tensors",
                help="Arrays as .npy files, or statistics.",
            ),
            out_option("FOLDER", "Folder (default: RUN_DIR/dump)."),
            count_option(
                "--max-mib", "Limit of the arrays of a step.", most=1_000_000, default=4096
            ),
            approximate_option(),
        ],
        example="dump outputs/again --step 500 --layers 'conv_*'",
    ),
    RunCommand(
        "step",
        "what happened at a step: loss, features, layers, samples",
        """Open a run at a step, and print what happened there: loss, learning rate, features that
        acted, gradients by layer, and the samples by their share of loss and gradient, with file
        and line. The loss is compared with the run's.

        Exit status: 0 printed, 1 the bits can't be had or, of a bundle, differ, 2 the run or an
        argument is wrong.""",
        [
            run_argument(text="A run, or a bundle that --out wrote, without N."),
            Argument(
                "step",
                required=False,
                type=WholeNumber(1, MAX_STEP),
                metavar="[N]",
                text="The step, counted from 1 as in metrics.jsonl.",
            ),
            out_option(
                "FOLDER",
                "Empty folder for a bundle, with which another machine computes "
                "the step again in seconds.",
            ),
            approximate_option(),
        ],
        example="step outputs/again 500 --out spike",
    ),
    RunCommand(
        "receipt",
        "what was trained, as a signed statement that others can check",
        """Write the receipt of a run: an in-toto statement with the chain of digests that
        receipt.every_steps=N writes while training. A run that was trained without has links at its
        checkpoints alone.""",
        [
            run_argument(text="A run."),
            out_option("FILE", "The statement (default: RUN_DIR/receipt.json)."),
            Option(
                "--sign-with",
                type=FilePath(),
                metavar="FILE",
                help="Sign it by ssh-keygen with this key of ssh, into FILE.sig beside it.",
            ),
        ],
        example="receipt outputs/again --sign-with ~/.ssh/id_ed25519",
    ),
    RunCommand(
        "verify",
        "was a run trained as its receipt says?",
        """Check the signature and the chain of a receipt and the run's files, and train random
        segments again.

        Exit status: 0 verified, 1 broken, differs or not comparable, 2 bad input.""",
        [
            path_argument("receipt_file", "A receipt.", metavar="RECEIPT"),
            Option(
                "--run",
                "run_dir",
                type=FilePath(is_folder=True),
                metavar="RUN_DIR",
                help="Its run (default: the folder of the receipt).",
            ),
            Option(
                "--share", metavar="SHARE", default="5%", help="Segments to train again, at least."
            ),
            seed_option("Seed that draws the segments (default: unpredictable).", default=None),
            Option(
                "--signers",
                type=FilePath(),
                metavar="FILE",
                help="OpenSSH's file of allowed signers; the signature must be by one of them.",
            ),
            Option("--identity", metavar="NAME", help="With --signers: the signer."),
            Option(
                "--parent",
                "parents",
                type=FilePath(),
                metavar="RECEIPT",
                multiple=True,
                help="Of a fork: the receipt of the run that it began with, in that run's folder.",
            ),
        ],
        example="verify outputs/again/receipt.json --share 20%",
    ),
    RunCommand(
        "without",
        "the run as if some training samples weighed nothing",
        """Train a run again without some samples, from the first step that read one of them, and
        print what changes in its metrics and predictions. Batches stay as they were; in the loss
        and its mean the samples weigh nothing.

        Exit status: 0 printed, 1 the bits can't be had, 2 the run or an argument is wrong.""",
        [
            Argument(
                "words",
                nargs=-1,
                type=FilePath(is_folder=True),
                metavar="[ROWS] RUN_DIR",
                text="Rows of the training data, such as 3,17,40-59, or a file with them; a run.",
            ),
            Option(
                "--where",
                metavar="CONDITION",
                help="Instead of ROWS: all rows with COLUMN == VALUE, or !=, <, <=, > or >=.",
            ),
            approximate_option(),
        ],
        example="without outputs/again --where 'label == 7'",
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
                text="Folder to search (default: outputs); links aren't followed.",
            ),
            flag("--html", text="Write a page: table, curves, importance of keys, lineage."),
            out_option("FILE", "The page of --html (default: FOLDER/runs.html)."),
            metric_option(
                "Rank by this metric (default: the one most runs have, of several accuracy)."
            ),
            flag("--json", "as_json", text="Print a JSON object for each run."),
            flag("--watch", "watches", text="Print the table every 2 seconds until Ctrl-C."),
            flag("--all", "shows_all", text="Print all columns and rows, not only what fits."),
        ],
        example="runs outputs --html",
    ),
    RunCommand(
        "autopsy",
        "where the NaN or infinity that ended a run comes from",
        """Repeat the step whose loss or gradient was NaN or infinite, so that the run ended, and
        print where this began: layer, tensor, ranges of its operands, samples of the batch. With
        --step, another step, such as one whose update was skipped: its state is the run's.

        Exit status: 0 the run's result, 1 another result, 2 no such step.""",
        [
            run_argument(text="A run that ended at a non-finite step, or its folder reproducer."),
            count_option("--step", "The step, from 1 (default: the one that ended the run)."),
            approximate_option(),
        ],
        example="autopsy outputs/2026-11-21/14-46-29_lenet5_digits",
    ),
)
