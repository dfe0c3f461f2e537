"""What transformers' BERT and GPT-2 give where a mask tells padding, kept in attention_masks.json.

    python tests/golden/make_attention_masks.py   with torch 2.13.0 (CPU) and transformers 5.23.0

Networks, weights and samples are those of `make_networks`; the tokens behind a length are padding.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.golden import make_networks
from tests.golden.network_cases import CASES

FILE = Path(__file__).parent / "attention_masks.json"
LENGTHS = (5, 8)
"""Of the two samples, of 9 tokens each."""


def with_mask(network: Any, numbers: Any) -> Any:
    """Logits where attention leaves padding out."""
    import torch

    tokens = numbers.reshape(len(numbers), -1).long()
    mask = torch.arange(tokens.shape[1])[None] < torch.tensor(LENGTHS)[:, None]
    return network(tokens, attention_mask=mask.long()).logits


def main() -> None:
    """Ask both networks."""
    result: dict[str, Any] = {"transformers": version("transformers")}
    with patch.object(make_networks, "_logits_of_tokens", with_mask):
        for case in CASES:
            library, _, name = case.peer.partition(":")
            if library == "transformers":
                logits = make_networks.transformers(case, name).logits
                result[case.model] = np.asarray(logits, float).round(7).tolist()
    FILE.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
