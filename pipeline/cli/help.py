"""The text of `--help`: commands, groups with their options, and recipes, one line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.config.files import description, find_groups, find_recipes
from pipeline.errors import printable

HEAD = """\
Train what a YAML recipe describes.

  python -m pipeline                                    the default recipe, lenet5_digits
  python -m pipeline +recipe=NAME KEY=VALUE ...         a recipe, with keys overridden
  python -m pipeline +recipe=path/to/mine.yaml          a recipe of your own
  python -m pipeline device=path/to/mine.yaml           a device of your own; so with every group
  python -m pipeline -m +recipe=NAME KEY=A,B GROUP=C,D  a sweep: every combination
  python -m pipeline -m ... hydra.sweep.dir=DIR          again, or twice at once: what is left of it
  python -m pipeline --cfg job +recipe=NAME             show the resolved recipe
  python -m pipeline explain +recipe=NAME KEY=VALUE ... what sinks cost, hold and buy here, measured
  python -m pipeline profile +recipe=NAME KEY=VALUE ... where the time of a step goes, and a verdict
  python -m pipeline forecast +recipe=NAME [--check]    what a step will take here; was it so?
  python -m pipeline summary +recipe=NAME|RUN_DIR       layers, shapes, parameters, what is trained
  python -m pipeline convert weights FROM TO +recipe=NAME  weights of PyTorch or MindSpore, renamed
  python -m pipeline convert records OUT dataset=NAME ...   any dataset as ArrayRecord files
  python -m pipeline report RUN_DIR                     what it gets right and wrong, as one page
  python -m pipeline export RUN_DIR FOLDER              a trained network as StableHLO and weights;
                                                        to=onnx [int8=true], to=ckpt
  python -m pipeline infer RUN_DIR|FOLDER FILE ...      what it says of images, texts, rows
  python -m pipeline infer RUN_DIR|FOLDER --prompt TEXT a text continued; --tokens, --temperature
  python -m pipeline reproduce RUN_DIR                  run it again: the same losses, bit for bit?
  python -m pipeline diff RUN_A RUN_B                   what sets two runs apart, what came of it
  python -m pipeline runs [FOLDER] [--html]             all runs as a table, or as one page
  python -m pipeline recommend FOLDER +recipe=NAME ...  what to try next, by what runs have shown
  python -m pipeline columns FILE                       the columns of a CSV file, and their types
  python -m pipeline doctor +recipe=NAME KEY=VALUE ...  are device, cache, data, disk, limits ok?
  python -m pipeline autopsy RUN_DIR                    the bad step that ended a run, looked into
  python -m pipeline new NAME                           a project with parts of your own
  python -m pipeline --plugin FILE ...                  any of these, with parts of your own
  python -m pipeline schema                             JSON schema of recipes, for editors
  python -m pipeline COMMAND --help                     what one of these takes, with an example
  python -m pipeline --hydra-help                       flags of Hydra's own

Exit status: 0 done, 1 the run failed or was stopped, 2 the recipe or its data is wrong.
"""


def main(args: Sequence[str]) -> int:
    """Print commands, recipes and groups; the exit status is 0."""
    print(guide())
    return 0


def guide() -> str:
    """The text of `--help`; reads only file headers and composes nothing."""
    parts = [HEAD, "Recipes (+recipe=NAME)", *_lines(find_recipes(Path.cwd())), ""]
    for group, options in find_groups().items():
        parts += [f"Group {group} ({group}=NAME)", *_lines(options), ""]
    parts.append("Keys: see --cfg job; the ones typed most are train.batch_size, train.epochs |")
    parts.append("train.passes | train.steps, train.sink, train.sink_size, train.optimizer.lr,")
    parts.append(
        "train.precision, train.resume, stages, seed, dataset.root, checkpoint.every_steps,"
    )
    parts.append("checkpoint.keep, checkpoint.restore, debug.")
    return "\n".join(parts)


def _lines(files: Mapping[str, Path]) -> list[str]:
    width = max(map(len, files), default=0)
    lines = (f"  {name:<{width}}  {description(file)}" for name, file in files.items())
    return [printable(line) for line in lines]
