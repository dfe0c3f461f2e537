"""The component `thor` in a recipe."""

from __future__ import annotations

import numpy as np
import pytest
from omegaconf import OmegaConf
from pydantic import ValidationError

from pipeline.core.files.paths import CONF
from pipeline.training.optimizers.thor.thor_spec import DampingSpec, Thor


def written() -> dict:
    return OmegaConf.to_container(OmegaConf.load(CONF / "optimizer" / "thor.yaml"))


def test_conf_has_every_key_of_the_spec() -> None:
    assert Thor.model_validate(written()).model_dump(mode="json") == written()
    text = (CONF / "optimizer" / "thor.yaml").read_text()
    assert text.startswith("# @package train.optimizer\n")


def test_damping_decays_by_its_rate_per_decay_steps() -> None:
    damping = DampingSpec(initial=0.04, decay_rate=0.25, decay_steps=10)
    counts = np.array([0, 5, 10, 20])
    np.testing.assert_allclose(damping.compute_damping(counts), [0.04, 0.02, 0.01, 0.0025])


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"frequency": 0}, "frequency"),
        ({"split_dim": 0}, "split_dim"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"damping": {"initial": 0.0, "decay_rate": 1.0, "decay_steps": 1}}, "damping.initial"),
        ({"damping": {"initial": 0.1, "decay_rate": 1.5, "decay_steps": 1}}, "damping.decay_rate"),
        ({"momentum": 1.0}, "momentum"),
        ({"split_indices": [26, 26]}, "split_indices"),
        ({"split_indices": [53, 26]}, "split_indices"),
        ({"split_indices": [-1]}, "split_indices.0"),
    ],
)
def test_values_out_of_range_are_refused(change: dict, key: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Thor.model_validate(written() | change)
    assert [".".join(map(str, error["loc"])) for error in caught.value.errors()] == [key]
