"""Small runs of texts."""

from __future__ import annotations

from pathlib import Path

from pipeline import load_recipe
from pipeline.config.recipe import Recipe

SMALL = ["model.features=16", "model.hidden=32", "model.heads=2", "model.blocks=2"]
QUIET = ["monitor.tensorboard=false"]
GPT = [*SMALL, *QUIET, "dataset.length=12", "train.batch_size=8", "train.steps=60"]
GPT += ["train.sink_size=20", "train.schedule.warmup_steps=0", "train.optimizer.lr=0.01"]
GPT += ["eval.samples=20", "eval.every_steps=null", "dataset.tokenizer=characters"]
DECODER = (
    "model.layers=[{name: tied_embedding, scope: tokens, vocabulary: $classes, features: 16,"
    " body: [{use: decoder_block, repeat: 2, with: {heads: 2, hidden: 24}}, rms_norm]}]"
)
BERT = [*SMALL, *QUIET, "train.batch_size=32", "train.epochs=3", "eval.every_epochs=null"]
BERT += ["train.schedule.warmup_epochs=0.0", "train.optimizer.lr=0.005", "model.dropout=0.0"]
BERT += ["dataset.buckets=[[8],[24]]"]

RHYME = "the cat sat on the mat, the dog ran to the hat. " * 40


def gpt(cache: Path, text: Path, *keys: str) -> Recipe:
    """A GPT of characters on a text of a few lines, which is written where it is missing."""
    if not text.exists():
        text.write_text(RHYME)
    return load_recipe("gpt_text", [*GPT, f"dataset.root={text}", f"cache.root={cache}", *keys])


def bert(cache: Path, *keys: str) -> Recipe:
    """A classifier of the docstrings that ship."""
    return load_recipe("bert_docstrings", [*BERT, f"cache.root={cache}", *keys])
