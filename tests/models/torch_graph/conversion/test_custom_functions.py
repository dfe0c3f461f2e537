"""Custom backward passes of PyTorch modules: torch's gradients, or a refusal by name."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from pipeline.models.torch_graph.computation.torch_network import initial_variables_of
from pipeline.models.torch_graph.conversion.export_module import export_module
from tests.models.torch_graph.golden_graphs import LABELS, network_of, train_once

torch = pytest.importorskip("torch", reason="torch is not installed")
nn: Any = torch.nn
Function: Any = torch.autograd.Function

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Reverse(Function):  # type: ignore[misc]
    """The identity with the gradient of another sign; an argument that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Any, scale: float) -> Any:
        """The same values."""
        ctx.scale = scale
        return x

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        """The gradient, times a negative number."""
        return -ctx.scale * g, None


class Sign(Function):  # type: ignore[misc]
    """A straight-through estimator, in the form with a separate context and a default."""

    @staticmethod
    def forward(x: Any, limit: float = 0.5) -> Any:
        """Signs."""
        return torch.sign(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep both."""
        ctx.limit = inputs[1]
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        """The gradient of the numbers that are near 0."""
        x, sign = ctx.saved_tensors
        return g * (x.abs() < ctx.limit) + 0.1 * sign * g, None


class Exp(Function):  # type: ignore[misc]
    """A backward pass that is differentiated once, with and without gradients inside."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """A result of a region without gradients."""
        with torch.no_grad():
            ctx.save_for_backward(x.exp())
        return x.exp().mul_(2)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Any) -> Any:
        """The gradient clipped by its norm, in place."""
        (y,) = ctx.saved_tensors
        scaled = g / torch.clamp(g.norm(), min=1e-3)
        return scaled.mul_(y)


class Pair(Function):  # type: ignore[misc]
    """Two outputs, one of which has no gradient, and a gradient that is broadcast."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        """A product, and a mask."""
        mask = (x > 0).float()
        ctx.mark_non_differentiable(mask)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)
        return x * w, mask, 3

    @staticmethod
    def backward(ctx: Any, g: Any, *_: Any) -> Any:
        """Twice the gradient of w; torch sums it over the batch."""
        x, w = ctx.saved_tensors
        gradient = g * x * 2 if ctx.needs_input_grad[1] else None
        return g * w, gradient


class Products(Function):  # type: ignore[misc]
    """Two differentiable outputs."""

    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        """A product and a sum."""
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, product: Any, total: Any) -> Any:
        """Gradients of a function of its own."""
        x, y = ctx.saved_tensors
        return product * y * 2 + total, product * x - total


class Recomputed(Function):  # type: ignore[misc]
    """A backward pass that differentiates a function by torch, and one that calls a function."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """A function of torch inside of another."""
        ctx.save_for_backward(x)
        return Reverse.apply(x * x, 2.0)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        """The gradient of a cube."""
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = x * x * x
        return Reverse.apply(torch.autograd.grad(y, x, g)[0], 1.0)


class NoBackward(Function):  # type: ignore[misc]
    """A forward pass alone."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """Doubles."""
        return x * 2


def without_gradients(net: Any, y: Any) -> Any:
    """Values of a region without gradients, which also changes a buffer."""
    with torch.no_grad():
        largest = y.abs().amax() + net.scale
        net.seen.mul_(0.9).add_(y.mean(0), alpha=0.1)
    return y / largest + net.seen


class Net(nn.Module):  # type: ignore[misc]
    """A convolution and two dense layers; what `change` does comes between."""

    def __init__(self, change: Any, prepare: Any = None) -> None:
        super().__init__()
        self.conv, self.mid, self.fc = nn.Conv2d(2, 4, 3), nn.Linear(4, 4), nn.Linear(4, 3)
        self.scale, self.change = nn.Parameter(torch.linspace(0.5, 2, 4)), change
        self.register_buffer("seen", torch.zeros(4))
        if prepare is not None:
            prepare(self)

    def forward(self, x: Any) -> Any:
        """Logits."""
        return self.fc(self.change(self, torch.tanh(self.mid(self.conv(x).mean((2, 3)) * 4))))


class Rounded(nn.Module):  # type: ignore[misc]
    """A parametrisation with a custom gradient."""

    def forward(self, weight: Any) -> Any:
        """Signs of the weights."""
        return Sign.apply(weight) * 0.3


def checkpointed(net: Any, y: Any, reentrant: bool) -> Any:
    """A recomputed region with a custom backward pass."""
    return torch.utils.checkpoint.checkpoint(
        lambda x: Reverse.apply(torch.tanh(x) * net.scale, 0.5), y, use_reentrant=reentrant
    )


HONOURED = {
    "reversal": lambda _, y: Reverse.apply(y, 0.5),
    "straight through": lambda _, y: Sign.apply(y) + Sign.apply(y, limit=0.2),
    "once": lambda _, y: Exp.apply(y),
    "pair": lambda net, y: Pair.apply(y, net.scale)[0] * (1 + Pair.apply(y, net.scale)[1]),
    "two outputs": lambda net, y: sum(Products.apply(y, net.scale.expand_as(y))),
    "one output read": lambda _, y: Products.apply(y, y * 2)[1],
    "recomputed": lambda _, y: Recomputed.apply(y),
    "chain": lambda _, y: Reverse.apply(Sign.apply(Exp.apply(y) - 1), 0.3) + y,
    "of weights": lambda net, y: nn.functional.linear(y, Sign.apply(net.mid.weight)),
    "of a constant": lambda net, y: y * NoBackward.apply(net.seen) + NoBackward.apply(y.detach()),
    "without gradients": without_gradients,
    "inside of no_grad": lambda _, y: y + torch.no_grad()(lambda x: Reverse.apply(x, 2.0))(y),
    "detached": lambda net, y: y * y.detach() + net.scale.detach(),
    "checkpoint": lambda net, y: checkpointed(net, y, reentrant=False),
    "reentrant checkpoint": lambda net, y: checkpointed(net, y, reentrant=True),
}
PREPARED = {
    "frozen": lambda net: net.mid.weight.requires_grad_(False),
    "parametrised": lambda net: nn.utils.parametrize.register_parametrization(
        net.fc, "weight", Rounded()
    ),
    "forward hook": lambda net: net.mid.register_forward_hook(
        lambda _, __, y: Reverse.apply(y, 0.5)
    ),
}
CASES = {name: (change, None) for name, change in HONOURED.items()} | {
    name: (lambda _, y: y, prepare) for name, prepare in PREPARED.items()
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_match_torch(name: str) -> None:
    torch.manual_seed(1)
    net = Net(*CASES[name])
    images = torch.randn(4, 2, 6, 6)
    graph = export_module(net, (2, 6, 6))
    own_loss, own, _ = train_once(graph, images.permute(0, 2, 3, 1).numpy())
    loss = nn.functional.cross_entropy(net(images), torch.from_numpy(LABELS))
    loss.backward()
    assert own_loss == pytest.approx(loss.item(), rel=1e-5)
    theirs = {n: p.grad.numpy() for n, p in net.named_parameters() if p.grad is not None}
    assert {n for n, g in own.items() if np.any(g)} <= set(theirs)
    for parameter, gradient in theirs.items():
        np.testing.assert_allclose(
            own.get(parameter, np.zeros_like(gradient)), gradient, rtol=1e-4, atol=1e-6
        )


def test_gradients_differ_from_those_of_the_forward_pass() -> None:
    """The cases above would pass for a function whose backward pass is the true derivative."""
    torch.manual_seed(1)
    images = np.random.default_rng(0).normal(size=(4, 6, 6, 2)).astype(np.float32)
    net = Net(lambda _, y: Reverse.apply(y, 0.5))
    _, reversed_, _ = train_once(export_module(net, (2, 6, 6)), images)
    net.change = lambda _, y: y
    _, plain, _ = train_once(export_module(net, (2, 6, 6)), images)
    np.testing.assert_allclose(reversed_["mid.weight"], -0.5 * plain["mid.weight"], rtol=1e-5)
    np.testing.assert_array_equal(reversed_["fc.weight"], plain["fc.weight"])


class Dirty(NoBackward):
    """A function that changes its input."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """Doubles, in place."""
        ctx.mark_dirty(x)
        return x.mul_(2)


class TooFew(Reverse):
    """A backward pass with one gradient of two."""

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        """One gradient."""
        return g


class Halved(NoBackward):
    """A backward pass with a gradient of another shape."""

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        """Half of the gradient."""
        return g[:, :2]


class Branches(NoBackward):
    """A backward pass whose control flow depends on values."""

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        """Clipped."""
        return g / g.norm() if g.norm() > 1 else g


def hooked(_: Any, y: Any) -> Any:
    """A hook on a tensor."""
    y.register_hook(lambda g: g * 2)
    return y


def changed_in_place(_: Any, y: Any) -> Any:
    """An activation that changes without its gradient."""
    y = y * 2
    with torch.no_grad():
        y.mul_(3)
    return y


def changed_part(_: Any, y: Any) -> Any:
    """A half of an activation that changes without its gradient."""
    y = y * 2
    with torch.no_grad():
        first, _ = y.chunk(2, 1)
        first.mul_(3)
    return y


def packed(net: Any, y: Any) -> Any:
    """Saved tensors that are rounded."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.round(), lambda t: t):
        return y * net.scale


REFUSED = {
    r"Dirty\.forward \(test_custom_functions\.py:\d+\) changes its input in place": (
        lambda _, y: Dirty.apply(y * 1)
    ),
    r"NoBackward \(test_custom_functions\.py:\d+\) has no backward pass": (
        lambda _, y: NoBackward.apply(y)
    ),
    r"TooFew\.backward returns 1 gradients; must return 2": lambda _, y: TooFew.apply(y, 1.0),
    r"Halved\.backward returns a gradient of shape \(batch, 2\) of argument 0": (
        lambda _, y: Halved.apply(y)
    ),
    "its control flow must not depend on values of tensors": lambda _, y: Branches.apply(y),
    r"a hook on the gradient of a tensor, by register_hook, \(test_custom_fun": hooked,
    "a tensor changes in place under torch.no_grad in the network": changed_in_place,
    r"changes in place under torch\.no_grad": changed_part,
    "saved_tensors_hooks .* isn't supported": packed,
    "torch.autograd.grad without create_graph=True in a forward pass": (
        lambda _, y: torch.autograd.grad((y**2).sum(), y)[0]
    ),
    "Sign.apply .* inside of a transform of torch.func": lambda _, y: torch.vmap(Sign.apply)(y),
}


@pytest.mark.parametrize("message", REFUSED)
def test_gradient_that_cannot_be_computed_is_refused_by_name(message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        export_module(Net(REFUSED[message]), (2, 6, 6))
    assert "\n" not in str(caught.value)


HOOKS = {
    "module mid .* by register_full_backward_hook": (
        lambda net: net.mid.register_full_backward_hook(lambda *_: None)
    ),
    "module mid .* by register_full_backward_pre_hook": (
        lambda net: net.mid.register_full_backward_pre_hook(lambda *_: None)
    ),
    "parameter scale .* by register_hook": lambda net: net.scale.register_hook(lambda g: g * 2),
    "parameter scale .* by register_post_accumulate_grad_hook": (
        lambda net: net.scale.register_post_accumulate_grad_hook(lambda _: None)
    ),
}


@pytest.mark.parametrize("message", HOOKS)
def test_hook_on_gradients_is_refused_by_name(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        export_module(Net(lambda _, y: y, HOOKS[message]), (2, 6, 6))


def test_torch_is_unchanged_after_an_export() -> None:
    before = (Function.__dict__["apply"], torch.Tensor.register_hook, torch.autograd.grad)
    with pytest.raises(ValueError, match="register_hook"):
        export_module(Net(hooked), (2, 6, 6))
    assert before == (
        Function.__dict__["apply"],
        torch.Tensor.register_hook,
        torch.autograd.grad,
    )


def test_gradients_of_single_samples_match_those_of_the_batch() -> None:
    """Per-sample gradients are computed by vmap, which a custom backward pass must allow."""
    torch.manual_seed(1)
    graph = export_module(Net(lambda _, y: Reverse.apply(y, 0.5)), (2, 6, 6))
    variables = initial_variables_of(graph)
    images = np.random.default_rng(0).normal(size=(4, 6, 6, 2)).astype(np.float32)

    def loss(params: Any, image: Any) -> Any:
        inputs = {**variables, "params": params}
        logits: Any = network_of(graph).apply(inputs, image[None], train=False)
        return logits[0, 0]

    single = jax.vmap(jax.grad(loss), (None, 0))(variables["params"], images)
    whole = jax.grad(lambda p: sum(loss(p, image) for image in images))(variables["params"])
    for one, other in zip(jax.tree.leaves(single), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(one.sum(0), other, rtol=1e-4, atol=1e-6)
