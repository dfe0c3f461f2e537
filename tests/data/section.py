"""The keys that every `dataset:` section has, for tests that build sources in Python."""

from __future__ import annotations

from typing import Any


def section(**fields: Any) -> dict[str, Any]:
    """A section without root, mirrors and ops, overridden by `fields`."""
    return {
        "root": None,
        "mirrors": (),
        "buckets": None,
        "padding_mask": False,
        "oversized": "refuse",
        "ignore_index": None,
        "train": {
            "ops": (),
            "shuffle": True,
            "buffer_size": None,
            "drop_remainder": True,
            "repeat": 1,
            "num_shards": None,
            "shard_id": None,
        },
        "eval": {"ops": (), "batch_size": None},
        **fields,
    }
