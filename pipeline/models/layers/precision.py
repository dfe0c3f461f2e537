"""Types that layers compute in: MindSpore's amp levels, bfloat16, and types by layer.

Levels follow `build_train_network` and `auto_mixed_precision` of mindspore/train/amp.py (2.10).
At every level, weights are stored in float32 and cast when a layer reads them. Gradients and the
loss are float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar, Literal

from pipeline.core.registry import Spec
from pipeline.models.layers.path_patterns import LayerPath, covers

Level = Literal["O0", "O1", "O2", "O3", "bf16", "fp8"]
Products = Literal["plain", "float8"]
FloatType = Literal["float32", "float16", "bfloat16"]

WHITE_LIST = frozenset(
    {"conv", "conv1d", "conv3d", "conv_transpose", "dense", "gru", "lstm", "relu", "self_attention"}
)
"""Kinds of layers that O1 computes in float16: `AMP_WHITE_LIST` (`nn.Conv1d` to `nn.Conv3d`,
`nn.Conv2dTranspose`, `nn.Dense`, `nn.GRUCell`, `nn.LSTMCell`, `P.ReLU`; the products of attention
are `nn.Dense` and `P.BatchMatMul`)."""

BLACK_LIST = frozenset({"batch_norm", "layer_norm"})
"""Kinds of layers that O2 computes in float32: `AMP_BLACK_LIST`."""


@dataclass(frozen=True)
class KindRule:
    """A rule that layers of these kinds compute in `dtype`."""

    kinds: frozenset[str]
    dtype: FloatType
    casts_back: bool = True
    """Whether the layers' output is cast to the network's type."""

    def covers(self, kind: str, path: LayerPath) -> bool:
        return kind in self.kinds

    def __str__(self) -> str:
        return ", ".join(sorted(self.kinds))


class ToFloat(Spec):
    """`to_float`: a layer whose path matches a glob, with its inner layers, computes in `dtype`.

    A path is the layer's scope, as in names of parameters, such as `residual_0/conv_1`. A * also
    matches slashes. The output of the layer has that type too.
    """

    pattern: str
    dtype: FloatType

    casts_back: ClassVar[bool] = False
    """MindSpore's `to_float` casts the inputs of a cell, not its output."""

    def covers(self, kind: str, path: LayerPath) -> bool:
        """Whether the glob matches the path, or the path of an enclosing layer."""
        return covers(self.pattern, path)

    def __str__(self) -> str:
        return self.pattern


@dataclass(eq=False)
class PathListing:
    """A rule that covers no layer, and records the paths of all layers of a traced network."""

    dtype: str = "float32"
    casts_back: bool = False
    paths: dict[LayerPath, None] = field(default_factory=dict)

    def covers(self, kind: str, path: LayerPath) -> bool:
        self.paths[path] = None
        return False


TypeRule = KindRule | ToFloat | PathListing
"""Rule for layers that compute in another type than the network."""


@dataclass(frozen=True)
class Precision:
    """Type of a network's activations, and rules for layers that compute in another type. The last
    rule that covers a layer applies."""

    dtype: FloatType
    rules: tuple[KindRule | ToFloat, ...] = ()
    products: Products = "plain"
    """How dense layers multiply. float8: inputs, weights and gradients are rounded to 8 bits."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """All types that layers compute in, without repetitions."""
        products = ["float8"] if self.products == "float8" else []
        types = (self.dtype, *(rule.dtype for rule in self.rules), *products)
        return tuple(dict.fromkeys(types))

    def with_batch_norm(self, *, in_float32: bool) -> Precision:
        """Return the precision with batch norm in float32 or in `dtype`. All rules must be
        `KindRule`, as in a level."""
        batch_norm = frozenset({"batch_norm"})
        kind_rules = [rule for rule in self.rules if isinstance(rule, KindRule)]
        rules = [replace(rule, kinds=rule.kinds - batch_norm) for rule in kind_rules]
        if in_float32 and self.dtype != "float32":
            rules.append(KindRule(batch_norm, "float32"))
        return replace(self, rules=tuple(rules))


LEVELS: Mapping[Level, Precision] = MappingProxyType(
    {
        "O0": Precision("float32"),
        "O1": Precision("float32", (KindRule(WHITE_LIST, "float16"),)),
        "O2": Precision("float16", (KindRule(BLACK_LIST, "float32"),)),
        "O3": Precision("float16"),
        "bf16": Precision("bfloat16"),
        "fp8": Precision("bfloat16", products="float8"),
    }
)


def find_type_rule(rules: tuple[TypeRule, ...], kind: str, path: LayerPath) -> TypeRule | None:
    """Return the rule for a layer; None if it computes in the network's type."""
    covering = [rule for rule in rules if rule.covers(kind, path)]
    return covering[-1] if covering else None
