"""A tokenizer.json of a stranger: it draws nothing, and its memory and time are limited."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import DataError
from pipeline.data.text.text_format import read_tokenizer
from pipeline.data.text.tokenizer import Tokenizer
from pipeline.data.text.tokenizer_file import parse_tokenizer
from tests.data.text.made_up import WORDS, tokenizer_json

TEXT = "the cat sat " + "a" * 50 + "! "
LETTERS = {"a": 0, "b": 1, "ab": 2}


def replacing(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def splitting(expression: str) -> dict[str, Any]:
    pattern = {"Regex": expression}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def refusal(tokenizer: Tokenizer, text: str, capfd: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the message is returned
        tokenizer.encode(text)
    printed = capfd.readouterr()
    assert printed.out + printed.err == ""
    message = str(caught.value)
    assert message.isprintable()
    return message


@pytest.mark.parametrize("dropout", [0.1, 1.0])
def test_merges_with_dropout_are_refused(dropout: float, tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": LETTERS, "merges": [["a", "b"]], "dropout": dropout}
    file = tmp_path / "tokenizer.json"
    file.write_bytes(tokenizer_json(model=model, added_tokens=[], post_processor=None))
    with pytest.raises(DataError) as caught:
        read_tokenizer(file)
    assert str(caught.value) == (
        f"{file}: has model.dropout = {dropout:g}, by which tokens are drawn at random; must be "
        "null"
    )


@pytest.mark.parametrize("dropout", [None, 0.0])
def test_merges_without_dropout_are_applied(dropout: float | None) -> None:
    model = {"type": "BPE", "vocab": LETTERS, "merges": [["a", "b"]], "dropout": dropout}
    content = tokenizer_json(model=model, added_tokens=[], post_processor=None)
    assert parse_tokenizer(content).encode("abba").tolist() == [2, 1, 0]


def test_tokens_with_equal_numbers_are_refused() -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 1}, "unk_token": "a"}
    content = tokenizer_json(model=model, added_tokens=[], post_processor=None)
    with pytest.raises(ValueError, match="has number 1 for the tokens 'b' and 'c'; must have one"):
        parse_tokenizer(content)


@pytest.mark.slow
def test_growing_replacements_are_limited(capfd: pytest.CaptureFixture[str]) -> None:
    growing = [replacing({"String": "a"}, "a" * 10)] * 8
    content = tokenizer_json(normalizer={"type": "Sequence", "normalizers": growing})
    message = refusal(parse_tokenizer(content), TEXT, capfd)
    assert "takes more than 1.1 GB of memory for a text of 64 bytes; its replacements" in message


@pytest.mark.slow
def test_megabyte_replacement_is_limited(capfd: pytest.CaptureFixture[str]) -> None:
    content = tokenizer_json(normalizer=replacing({"String": "a"}, "b" * 2**20))
    message = refusal(parse_tokenizer(content), TEXT * 100, capfd)
    assert "GB of memory for a text of 6,400 bytes" in message


def test_backtracking_expression_error_has_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = parse_tokenizer(tokenizer_json(pre_tokenizer=splitting("(a+)+b")))
    assert "the tokenizer fails on a text: Onig: " in refusal(tokenizer, TEXT, capfd)
    # The process survives an error, and answers the next request.
    assert tokenizer.encode("the").tolist() == [WORDS.index("the")]


@pytest.mark.slow
def test_endless_expression_is_limited(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each place of the text takes less than the library's limit; all of them take days."""
    monkeypatch.setattr("pipeline.data.text.tokenizer_file._BASE_CPU_S", 3)
    tokenizer = parse_tokenizer(tokenizer_json(pre_tokenizer=splitting(r"\w*\w*\d\z")))
    message = refusal(tokenizer, "a" * 4_000 + "!", capfd)
    assert (
        "the tokenizer takes more than 3 s of processor time for a text of 4,001 bytes" in message
    )
    # A process that has ended fails every later request.
    ended = "has ended, since an earlier request took more than 3 s of processor time, and can't be"
    assert ended in refusal(tokenizer, "the", capfd)


def test_deleted_tokenizer_ends_its_process() -> None:
    tokenizer = parse_tokenizer(tokenizer_json())
    process = vars(tokenizer)["_process"]._process._process
    os.kill(process.pid, 0)
    del tokenizer
    assert process.returncode is not None


LINES = ["The naïve cat's  ½ ﬁsh.", "\tdef f(x):  return x\n\n", "日本 \U0001f600 x\u0301", ""]


@pytest.mark.parametrize("kind", ["gpt2", "bert", "unigram", "llama"])
def test_tokenizers_of_published_networks_have_the_librarys_tokens(kind: str) -> None:
    """Each kind is trained on a few lines, and the library itself computes what is expected."""
    tokenizers = pytest.importorskip("tokenizers")
    models, before = tokenizers.models, tokenizers.pre_tokenizers
    norms, trainers = tokenizers.normalizers, tokenizers.trainers
    match kind:
        case "gpt2":
            library = tokenizers.Tokenizer(models.BPE())
            library.pre_tokenizer = before.ByteLevel(add_prefix_space=False)
            library.decoder = tokenizers.decoders.ByteLevel()
            trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
        case "bert":
            library = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
            library.normalizer = norms.BertNormalizer()
            library.pre_tokenizer = before.BertPreTokenizer()
            library.decoder = tokenizers.decoders.WordPiece()
            trainer = trainers.WordPieceTrainer(
                vocab_size=60, show_progress=False, special_tokens=["[UNK]"]
            )
        case "unigram":
            library = tokenizers.Tokenizer(models.Unigram())
            library.normalizer = norms.NFKC()
            library.pre_tokenizer = before.Metaspace()
            library.decoder = tokenizers.decoders.Metaspace()
            trainer = trainers.UnigramTrainer(
                vocab_size=60, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"]
            )
        case _:
            library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
            library.normalizer = norms.Sequence([norms.Prepend("▁"), norms.Replace(" ", "▁")])
            trainer = trainers.BpeTrainer(
                vocab_size=60, show_progress=False, special_tokens=["<unk>"]
            )
    library.train_from_iterator(LINES, trainer)
    tokenizer = parse_tokenizer(library.to_str().encode())
    for line in LINES:
        expected = library.encode(line, add_special_tokens=False).ids
        assert tokenizer.encode(line).tolist() == expected
        assert tokenizer.decode(expected) == library.decode(expected)
