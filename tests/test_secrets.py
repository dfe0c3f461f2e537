"""Passwords of a command stand in none of the files that a run or a sweep leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.config.overrides import hide_secret_values
from pipeline.core.errors import PipelineError, RecipeError, hide_secrets, hide_secrets_in_tree
from tests.conftest import MLP, TINY

SECRET = "s3ntinel"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"postgresql://me:{SECRET}@host/db", "postgresql://me:***@host/db"),
        (f"'http://me:{SECRET}/a@b@host:1/x' y@z", "'http://me:***@host:1/x' y@z"),
        (f"https://{SECRET}@host/x", "https://***@host/x"),
        (f"s3://me:{SECRET * 60}@host/x", "s3://me:***@host/x"),
        (f"https://{SECRET * 60}@host/x", "https://***@host/x"),
        (
            f"mysql://host/db?user=me&password={SECRET}&ssl=1",
            "mysql://host/db?user=me&password=***&ssl=1",
        ),
        (f"https://host/x?X-Amz-Signature={SECRET}", "https://host/x?X-Amz-Signature=***"),
        (f"a.api_key = '{SECRET} b': no such key", "a.api_key = ***: no such key"),
        (f"WANDB_API_KEY={SECRET} x", "WANDB_API_KEY=*** x"),
        (f'{{name: a, "token": "{SECRET}"}}', '{name: a, "token": ***}'),
    ],
)
def test_passwords_are_hidden_in_texts(text: str, shown: str) -> None:
    assert hide_secrets(text) == shown
    assert str(PipelineError(text)) == shown


@pytest.mark.parametrize(
    "text",
    [
        "dataset.tokenizer=bytes tokens: 12, pad_token=<pad> max_tokens = 3",
        "git+ssh://git@host/x http://host:8080/x",
        "train.password: there is no such key",
        "12:30:01 epoch: 1 step: 20, loss is 2.2474456",
    ],
)
def test_texts_without_secrets_are_unchanged(text: str) -> None:
    assert hide_secrets(text) == text


def test_passwords_are_hidden_in_arguments_and_trees() -> None:
    args = [f"hydra.sweeper.storage={SECRET}", f"++a.client_secret={SECRET}", "a.secret.b=1"]
    shown = ["hydra.sweeper.storage=***", "++a.client_secret=***", "a.secret.b=1"]
    assert hide_secret_values(args) == shown
    tree: Any = {"a": [{"token": SECRET, "tokens": 3}], "b": f"redis://:{SECRET}@host", "c": 0.5}
    hidden = {"a": [{"token": "***", "tokens": 3}], "b": "redis://:***@host", "c": 0.5}
    assert hide_secrets_in_tree(tree) == hidden


PLUGIN = """
from typing import Literal
from pipeline.api import Callback, CallbackSpec, component

class Quiet(Callback):
    pass

@component("callback")
class QuietSpec(CallbackSpec):
    name: Literal["quiet"] = "quiet"
    address: str = ""
    token: str = ""

    def build(self):
        assert self.token == "s3ntinel" and "s3ntinel" in self.address
        return Quiet()
"""


def files_with_secret(folder: Path) -> list[str]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path.relative_to(folder)) for path in paths if SECRET.encode() in path.read_bytes()]


def arguments(tmp_path: Path) -> list[str]:
    (tmp_path / "quiet.py").write_text(PLUGIN)
    component = (
        f"{{name: quiet, address: 'https://me:{SECRET}@host/?token={SECRET}', token: {SECRET}}}"
    )
    short = ["train.steps=12", "checkpoint.every_steps=6", "monitor.tensorboard=true"]
    return ["--plugin", "quiet.py", *TINY, *MLP, *short, f"train.callbacks=[{component}]"]


@pytest.mark.slow
def test_run_writes_no_password_and_can_be_resumed(
    command: Any, forked: Any, tmp_path: Path
) -> None:
    base = arguments(tmp_path)
    first = command([*base, "hydra.run.dir=runs/a"])
    assert first.returncode == 0, first.stderr
    resumed = forked([*base, "train.steps=18", "train.resume=runs/a"])
    assert resumed.returncode == 0, resumed.stderr
    refused = forked([*base, "train.steps=6", f"train.api_key={SECRET}", "train.resume=runs/a"])
    assert refused.returncode == 2
    assert SECRET not in first.stdout + resumed.stdout + refused.stdout + refused.stderr
    assert files_with_secret(tmp_path / "runs") == []
    assert "***" in (tmp_path / "runs/a/recipe.yaml").read_text()


@pytest.mark.slow
def test_sweep_writes_no_password_and_is_recognised(
    command: Any, forked: Any, tmp_path: Path
) -> None:
    storage = f"hydra.sweeper.storage=sqlite:///{SECRET}.db"
    study = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=1", storage]
    base = ["-m", *arguments(tmp_path), "hydra.sweep.dir=sweep", "train.optimizer.lr=0.01,0.02"]
    first = command([*base, *study])
    assert first.returncode == 0, first.stderr
    assert (tmp_path / f"{SECRET}.db").exists()
    again = forked([*base, *study])
    assert again.returncode == 0, again.stderr
    assert SECRET not in first.stdout + again.stdout
    assert files_with_secret(tmp_path / "sweep") == []


def test_hydra_config_with_a_password_is_refused() -> None:
    from pipeline.cli.train import main

    args = ["hydra.output_subdir=.hydra", f"hydra.sweeper.storage=postgresql://me:{SECRET}@host/x"]
    with pytest.raises(RecipeError, match=r"hydra\.output_subdir = \.hydra: Hydra would write"):
        main(args)


def test_mirror_with_a_password_is_refused() -> None:
    from pipeline import load_recipe

    with pytest.raises(RecipeError) as caught:
        load_recipe("lenet5_mnist", [f"dataset.mirrors=['https://me:{SECRET}@host']"])
    assert "dataset.mirrors.0 = https://me:***@host: " in str(caught.value)
