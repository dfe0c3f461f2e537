"""Policies of augmentation."""

import pytest
from pydantic import ValidationError

from pipeline.data.ops.policies import RandAugment


def test_rand_augment_refuses_a_magnitude_beyond_its_bins():
    with pytest.raises(
        ValidationError, match="magnitude = 31: must be below num_magnitude_bins = 31"
    ):
        RandAugment(magnitude=31)
