"""Names of squeeze and excitation, which the blocks of several networks have."""

from __future__ import annotations

from pipeline.models.weights.rules.syntax import LayerRules


def squeeze(before: str, scope: str) -> LayerRules:
    """Rules for its two dense layers, with the prefix `before`, in a block called `scope` here."""
    return (
        (rf"{before}(?:fc1|conv_reduce|fc\.0)", f"{scope}/squeeze_excite/dense_0"),
        (rf"{before}(?:fc2|conv_expand|fc\.2)", f"{scope}/squeeze_excite/dense_1"),
    )
