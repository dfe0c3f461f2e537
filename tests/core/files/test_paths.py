"""Addresses in place of paths."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from pipeline.core.files.paths import Address, parse_location
from pipeline.core.registry import FilePath, Location

ADDRESSES = [
    "https://host/data/x.npz",
    "https://host/x.npz?a=1&b=2#sha256=0f",
    "s3://bucket/folder",
    "gs://bucket",
    "hf://timm/resnet18.a1_in1k",
    "hf://datasets/user/name@main/data",
]


@pytest.mark.parametrize("text", ADDRESSES)
def test_address_text_is_unchanged(text: str) -> None:
    address = parse_location(text)
    assert isinstance(address, Address)
    for same in (address, copy.deepcopy(address), pickle.loads(pickle.dumps(address))):
        assert f"{same}" == text
        assert isinstance(same, Address)
    assert not address.exists()
    assert TypeAdapter(Location).dump_json(address) == f'"{text}"'.encode()


def test_path_and_a_local_address_are_paths() -> None:
    adapter = TypeAdapter(Location)
    assert adapter.validate_python("a/b") == Path("a/b")
    assert adapter.validate_python("~/b") == Path.home() / "b"
    assert adapter.validate_python("~no_such_user/b") == Path("~no_such_user/b")
    assert adapter.validate_python("file:///data/x") == Path("/data/x")
    assert not isinstance(adapter.validate_python("file:///data/x"), Address)
    assert str(TypeAdapter(FilePath).validate_python("s3://b/x")) == "s3:/b/x"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ftp://host/x", "must be a path or an address: https://, http://, s3://, gs://, hf://"),
        ("S3://bucket/x", "must be a path or an address"),
        ("s3:///x", "lacks a host or bucket"),
        ("file://data/x", "needs a whole path, as in file:///data"),
        ("https://me:secret@host/x", "must have no name or password"),
        ("s3://key@bucket/x", "must have no name or password"),
        ("s3://bucket/a//b", "must have no empty part"),
        ("s3://bucket/./b", "must have no empty part"),
    ],
)
def test_invalid_addresses_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ValidationError, match=r"must|lacks|needs") as error:
        TypeAdapter(Location).validate_python(text)
    assert problem in str(error.value)
