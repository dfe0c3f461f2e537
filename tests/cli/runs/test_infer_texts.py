"""`infer` of texts: prompts continued and sentences classified, of runs and of exports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipeline.cli.commands.root import ROOT
from pipeline.core.errors import DataError, RecipeError, UsageError
from tests.command_line import convert_records, export, infer
from tests.stages.export.text_runs import bert, gpt
from tests.whole_run import run

TEXTS = ("Draw a circle with the pen.", "Return a string of the message header.")


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("language")
    run(gpt(cache, folder / "a.txt"), folder / "run")
    (folder / "a.txt").unlink()
    assert export([str(folder / "run"), str(folder / "export")]) == 0
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    run(bert(cache), folder / "run")
    assert export([str(folder / "run"), str(folder / "export")]) == 0
    return folder


def said(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[str, str]:
    capsys.readouterr()
    assert infer(list(map(str, args))) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


@pytest.mark.slow
def test_run_and_export_continue_a_prompt_equally(
    language: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--prompt", "the cat", "--tokens", 70, "--temperature=0"
    text, speed = said(capsys, language / "run", *options)
    assert text.startswith("the cat")
    assert len(text) == 7 + 70 + 1
    assert "70 tokens in " in speed
    assert (language / "export" / "next_token.bin").is_file()
    assert said(capsys, language / "export", *options)[0] == text
    as_json = json.loads(said(capsys, language / "run", *options, "--json")[0])
    assert as_json["text"] + "\n" == text == as_json["prompt"] + as_json["continuation"] + "\n"
    # Without the program that has a cache, the one that reads all tokens at once.
    without = language / "without"
    shutil.copytree(language / "export", without, ignore=shutil.ignore_patterns("next_token.bin"))
    assert said(capsys, without, *options)[0] == text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "said_"),
    [
        (["--prompt", "the Dog!"], "the prompt has 'D', '!', not among the 16 characters"),
        (["--prompt="], "the prompt is empty"),
        (["--text", "a"], "the network continues texts; name the text"),
        (["some.png"], "the network continues texts; name the text"),
    ],
)
def test_invalid_prompt_is_refused(args: list[str], said_: str, language: Path) -> None:
    with pytest.raises(DataError, match=said_) as caught:
        infer([str(language / "run"), *args])
    assert caught.value.exit_status == 2


@pytest.mark.slow
def test_missing_or_damaged_tokenizer_is_named(language: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(language / "export", copy)
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: isn't a tokenizer"):
        infer([str(copy), "--prompt", "the"])
    (copy / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="can't be read as a tokenizer: No such file"):
        infer([str(copy), "--prompt", "the"])


@pytest.mark.slow
def test_sentences_are_classified_from_files_and_options(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(TEXTS) + "\n\n")
    by_option = [option for text in TEXTS for option in ("--text", text)]
    answers = []
    for source in ("run", "export"):
        for args in ([lines], by_option):
            found = said(capsys, classifier / source, *args, "--json", "--top=10")[0]
            answers.append([json.loads(line)["top"] for line in found.splitlines()])
    assert len(answers[0]) == 2
    assert answers[0] == answers[1]
    assert answers[2] == answers[3]
    for one, other in zip(answers[0], answers[2], strict=True):
        first, second = ({a["class"]: a["probability"] for a in b} for b in (one, other))
        assert first == pytest.approx(second, abs=1e-4)
    shown, _ = said(capsys, classifier / "run", lines)
    assert shown.startswith(f"{lines}[0]: ")
    with pytest.raises(DataError, match="--prompt needs a network that predicts the next token"):
        infer([str(classifier / "run"), "--prompt", "a"])
    lines.write_text("\n \n")
    with pytest.raises(DataError, match="holds no text; must have one on each line"):
        infer([str(classifier / "run"), str(lines)])
    lines.write_bytes(b"abc \xff")
    with pytest.raises(DataError, match="is not UTF-8: byte 0xff at 4"):
        infer([str(classifier / "run"), str(lines)])


def test_options_are_parsed_with_and_without_equals_sign() -> None:
    args = ["RUN", "--prompt", "-x=1", "--tokens=9", "--json", "--seed", "3", "--top-k=4"]
    typed = ROOT.commands["infer"].make_context("infer", args).params
    assert (typed["prompt"], typed["tokens"], typed["as_json"]) == ("-x=1", 9, True)
    assert (typed["seed"], typed["top_k"]) == (3, 4)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prompt"], "--prompt: needs a value after it"),
        (["--tokens=3"], "--tokens: needs --prompt, the text to be continued"),
        (["--prompt=a", "--tokens=0"], "--tokens 0: must be a whole number from 1 to 1,000,000"),
        (["--prompt=a", "--tokens=x"], "--tokens x: must be a whole number"),
        (["--prompt=a", "--seed=" + "9" * 5000], "must be a whole number from 0 to 2,147,483,647"),
        (["--prompt=a", "--temperature=nan"], "--temperature nan: must be a number from 0 to 1e"),
        (["--prompt=a", "--temperature=-1"], "must be a number"),
        (["--prompt=a", "--text=b"], "one continues a text, the other classifies texts"),
    ],
)
def test_invalid_options_are_refused(args: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        infer(["RUN", *args])


def test_prompt_with_files_is_refused() -> None:
    with pytest.raises(UsageError, match=r"a\.txt: a prompt has no files"):
        infer(["RUN", "a.txt", "--prompt", "x"])


def test_records_of_text_dataset_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat sat on the mat\n" * 100)
    given = ["dataset=text", f"dataset.root={tmp_path / 'a.txt'}", "dataset.length=16"]
    with pytest.raises(RecipeError, match="dataset = text: records can't hold a tokenizer"):
        convert_records([str(tmp_path / "out"), "model=gpt2", *given])
    assert not (tmp_path / "out").exists()
