"""A flax module of one's own, as it stands: its convolutions are computed as those of the package.

python -m pipeline --plugin examples/flax_network.py \\
    model=flax model.import=flax_network:Small train.epochs=10
"""

from flax import linen as nn


class Small(nn.Module):
    classes: int  # filled in: the dataset's number of classes
    width: int = 16

    @nn.compact
    def __call__(self, images, train):
        x = images
        for width in (self.width, 2 * self.width):
            x = nn.Conv(width, (3, 3), strides=2)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.Dropout(0.2, deterministic=not train)(x.mean(axis=(1, 2)))
        return nn.Dense(self.classes)(x)
