"""Export of PyTorch modules: the half that needs torch."""

from __future__ import annotations

import runpy
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.models.lowerings.problem import DEFAULTS
from pipeline.models.torch_graph.computation.graph_file import graph_to_text
from pipeline.models.torch_graph.computation.torch_network import initial_variables_of
from pipeline.models.torch_graph.conversion.export_module import export_module, make_module
from pipeline.models.torch_graph.conversion.program_nodes import VIEWS, parse_base_name
from pipeline.models.torch_graph.graph import TensorSpec, TorchGraph, TypeOf
from pipeline.models.torch_graph.operator_table import OPERATORS as FUNCTIONS
from pipeline.models.torch_graph.operator_table import OperatorContext, to_tensor
from tests.models.torch_graph.golden_graphs import golden_graph, network_of

torch = pytest.importorskip("torch", reason="torch is not installed")
nn: Any = torch.nn
functional: Any = torch.nn.functional

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@dataclass
class Record:
    """A result with fields, one of which is absent."""

    hidden: Any
    logits: Any
    loss: Any = None


class Opaque:
    """A result in which no tensor is found."""


class Net(nn.Module):  # type: ignore[misc]
    """A convolution and a dense layer; what `change` does comes between."""

    def __init__(self, change: Any = None, classes: int = 3) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.fc, self.change = nn.Linear(4, classes), change

    def forward(self, x: Any) -> Any:
        """Logits."""
        y = self.norm(self.conv(x))
        y = y if self.change is None else self.change(self, y)
        return self.fc(y.mean((2, 3)))


def logits_of(graph: TorchGraph, images: np.ndarray) -> np.ndarray:
    """Logits of images NCHW."""
    variables, own = initial_variables_of(graph), jnp.asarray(images.transpose(0, 2, 3, 1))
    return np.asarray(network_of(graph).apply(variables, own, train=False))


def assert_as_in_torch(module: Any, batch: int = 3) -> TorchGraph:
    """Export a module, compare logits in evaluation, and return its graph."""
    graph = export_module(module, (2, 6, 6))
    images = np.random.default_rng(0).normal(size=(batch, 2, 6, 6)).astype(np.float32)
    with torch.no_grad():
        theirs = module.eval()(torch.from_numpy(images)).numpy()
    np.testing.assert_allclose(logits_of(graph, images), theirs, rtol=1e-4, atol=1e-5)
    return graph


def refused(change: Any) -> str:
    """The message for a network with a change."""
    with pytest.raises(ValueError, match=r"\w") as caught:
        export_module(Net(change), (2, 6, 6), origin="my_nets:Net")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_exported_graph_matches_the_golden_file() -> None:
    from tests.golden import make_torch_graphs

    torch.manual_seed(3)
    graph = export_module(
        make_torch_graphs.Mobile(p=0.5), (3, 12, 12), origin="make_torch_graphs:Mobile"
    )
    own, kept = graph_to_text(graph).splitlines(), graph_to_text(golden_graph("dropped"))
    assert own[4:] == kept.splitlines()[4:], "the first lines name the version of torch"


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_exported_graph_supports_any_batch_size(batch: int) -> None:
    assert_as_in_torch(Net(), batch)


def in_place_chain(_: Any, y: Any) -> Any:
    """A value that is changed in place after another has read it."""
    z = y * 2
    y.add_(1).relu_()
    return y + z


def through_views(_: Any, y: Any) -> Any:
    """Parts of a value that are changed in place."""
    y = y.clone()
    y[:, :2] += 1
    y[:, 2:].mul_(2)
    return y


def through_windows(_: Any, y: Any) -> Any:
    """A value that is changed after windows of it, which share its memory."""
    y = y * 1
    windows = y.unfold(3, 2, 1)
    y.add_(1)
    return windows.sum(-1)


def through_copies(_: Any, y: Any) -> Any:
    """A value that is changed after it was broadcast."""
    y = y * 1
    wide = y.broadcast_to((2, *y.shape))
    y.add_(1)
    return wide.sum(0)


def through_pairs(_: Any, y: Any) -> Any:
    """A complex value whose real and imaginary numbers are changed as pairs."""
    z = torch.complex(y, y * 2)
    torch.view_as_real(z).add_(1)
    return z.real + z.imag


def through_real_part(_: Any, y: Any) -> Any:
    """A value of which the real part, which is the value itself, is changed."""
    y = y * 1
    torch.real(y).add_(1)
    return y


def changed_after(share: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """A value that is read after a result that has its memory has changed in place."""

    def change(_: Any, y: Any) -> Any:
        y = y * 1
        shared = share(y)
        shared.mul_(3)
        return y + shared.sum() / 100

    return change


IN_PLACE = [
    *map(
        changed_after,
        (
            lambda y: functional.dropout(y, 0.5, False),
            lambda y: functional.dropout2d(y, 0.5, False),
            lambda y: functional.alpha_dropout(functional.dropout(y, 0.5, False), 0.5, False),
            lambda y: torch.einsum("bchw->bwch", y),
            lambda y: torch.einsum("bchw,bchw->bchw", y, y),
            lambda y: torch.atleast_3d(y),
            lambda y: y.sum_to_size(y.shape),
        ),
    ),
    in_place_chain,
    through_views,
    through_windows,
    through_copies,
    through_pairs,
    through_real_part,
]


@pytest.mark.parametrize("change", IN_PLACE)
def test_in_place_changes_match_torch(change: Any) -> None:
    assert_as_in_torch(Net(change))


def test_results_that_share_memory_are_known() -> None:
    """By the schemas of torch, of all operators that the table has."""
    sharing = set()
    for schema in torch._C._jit_get_all_schemas():
        parts = (*schema.arguments, *schema.returns)
        shared = [x.alias_info is not None and not x.alias_info.is_write for x in parts]
        count = len(schema.arguments)
        name = f"{schema.name.replace('::', '.')}.{schema.overload_name or 'default'}"
        if name in FUNCTIONS and any(shared[:count]) and any(shared[count:]):
            sharing.add(parse_base_name(name))
    assert len(sharing) > 30
    assert sharing <= VIEWS


def test_lines_of_a_folder_named_torch_are_the_users(tmp_path: Path) -> None:
    file = tmp_path / "torch" / "nets.py"
    file.parent.mkdir()
    file.write_text("def change(net, y):\n    return y.histogram(5)[0].sum() + y\n")
    assert "(nets.py:2: return y.histogram(5)[0].sum() + y)" in refused(
        runpy.run_path(str(file))["change"]
    )


class ChangesItsInput(Net):
    """A network that writes into its images, as `relu_` does first in many."""

    def forward(self, x: Any) -> Any:
        """Logits."""
        x.mul_(2).add_(1)
        return super().forward(x)


class WritesIntoAView(Net):
    """A network that writes into a part of its images."""

    def forward(self, x: Any) -> Any:
        """Logits."""
        x[:, :1] += 1
        return super().forward(x)


@pytest.mark.parametrize("kind", [ChangesItsInput, WritesIntoAView])
def test_in_place_changes_of_images_are_local_to_the_network(kind: Any) -> None:
    """Each batch is a value here: logits are PyTorch's, and nothing else sees the change."""
    module = kind()
    graph = export_module(module, (2, 6, 6))
    assert {name.split(".")[0] for name, _ in graph.training.updates} <= {"norm"}
    images = np.random.default_rng(0).normal(size=(3, 2, 6, 6)).astype(np.float32)
    with torch.no_grad():
        theirs = module.eval()(torch.from_numpy(images.copy())).numpy()
    np.testing.assert_allclose(logits_of(graph, images), theirs, rtol=1e-4, atol=1e-5)


class Counts(Net):
    """A network with a buffer of its own, changed in training."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=dtype))

    def forward(self, x: Any) -> Any:
        """Logits, which depend on the buffer."""
        if self.training:
            self.seen += 1
        return super().forward(x) + self.seen


def test_float_buffer_is_updated_in_training() -> None:
    graph = export_module(Counts(torch.float32), (2, 6, 6))
    assert [name for name, _ in graph.training.updates] == ["seen"]
    assert graph.evaluation.updates == ()
    network, variables = network_of(graph), initial_variables_of(graph)
    images = np.zeros((2, 6, 6, 2), np.float32)
    for count in (1.0, 2.0):
        _, changed = network.apply(variables, images, train=True, mutable=["batch_stats"])
        assert float(changed["batch_stats"]["seen"]) == count
        variables = {**variables, **changed}


def test_changing_integer_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"buffer seen of torch\.int64 changes in training"):
        export_module(Counts(torch.int64), (2, 6, 6))


class Remembers(Net):
    """A network that keeps a tensor in an attribute that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(3)

    def forward(self, x: Any) -> Any:
        """Logits."""
        logits = super().forward(x) + self.last
        self.last = logits.mean(0)
        return logits


class ChangesItsWeights(Net):
    """A network that writes into a parameter."""

    def forward(self, x: Any) -> Any:
        """Logits."""
        self.fc.weight.detach().mul_(0.9)
        return super().forward(x)


class ChangesThemWithoutGradients(Net):
    """The same, as it is written more often."""

    def forward(self, x: Any) -> Any:
        """Logits."""
        with torch.no_grad():
            self.fc.weight.mul_(0.9)
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            Remembers,
            r"the tensor self\.last is replaced in the forward pass; a tensor that changes",
        ),
        (ChangesItsWeights, r"parameter fc\.weight changes in its forward pass"),
        (ChangesThemWithoutGradients, r"parameter fc\.weight changes in its forward pass"),
    ],
)
def test_state_outside_of_buffers_is_refused(kind: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        export_module(kind(), (2, 6, 6))
    assert "\n" not in str(caught.value)


def scaled_in_float32(y: Any) -> Any:
    """A region without autocast, as timm and transformers have them."""
    with torch.autocast("cpu", enabled=False):
        return torch.tanh(y) * 2


OPERATORS = {
    "mish": lambda _, y: functional.mish(y),
    "elu": lambda _, y: functional.elu(y, 0.5),
    "softplus": lambda _, y: functional.softplus(y, 2.0),
    "glu": lambda _, y: functional.glu(torch.cat([y, y + 1], 1), 1),
    "normalize": lambda _, y: functional.normalize(y, dim=1),
    "log_softmax": lambda _, y: functional.log_softmax(y, 1),
    "instance norm": lambda _, y: functional.instance_norm(y),
    "bilinear": lambda _, y: functional.interpolate(y, size=(9, 4), mode="bilinear"),
    "corners": lambda _, y: functional.interpolate(
        y, scale_factor=2, mode="bilinear", align_corners=True
    ),
    "bilinear by a factor": lambda _, y: functional.interpolate(
        y, scale_factor=(1.7, 0.7), mode="bilinear"
    ),
    "nearest": lambda _, y: functional.interpolate(y, size=(4, 9)),
    "nearest by a factor": lambda _, y: functional.interpolate(y, scale_factor=(1.6, 0.7)),
    "adaptive": lambda _, y: functional.adaptive_avg_pool2d(y, (4, 5)),
    "dilated maxima": lambda _, y: functional.max_pool2d(y, 2, 1, dilation=2),
    "padded means": lambda _, y: functional.avg_pool2d(y, 3, 2, 1, count_include_pad=False),
    "reflect": lambda _, y: functional.pad(y, (1, 2, 0, 1), "reflect"),
    "cropped": lambda _, y: functional.pad(y, (-1, 0, 0, -2)),
    "shuffled": lambda _, y: torch.channel_shuffle(y, 2),
    "pixels": lambda _, y: functional.pixel_shuffle(y, 2).expand(-1, 4, -1, -1),
    "einsum": lambda _, y: torch.einsum("bchw,bdhw->bchw", y, y),
    "causal": lambda _, y: functional.scaled_dot_product_attention(y, y, y, is_causal=True),
    "where": lambda _, y: torch.where(y > 0, y, torch.tanh(y) ** 2),
    "std": lambda _, y: (y - y.mean(1, True)) / (y.std((1, 2), keepdim=True) + 1),
    "largest": lambda _, y: y.max(1, keepdim=True).values + y,
    "stack": lambda _, y: torch.stack([y, y.flip(3)], 2).flatten(1, 2)[:, ::2],
    "gather": lambda _, y: y.gather(1, torch.zeros_like(y, dtype=torch.int64)),
    "triangle": lambda _, y: y.tril() + torch.arange(6.0),
    "repeat": lambda _, y: y.repeat(1, 2, 1, 1).unflatten(1, (2, 4)).sum(1),
    "movedim": lambda _, y: y.movedim(1, -1).unbind(3)[0].unsqueeze(1).expand_as(y),
    "sizes": lambda _, y: y.reshape(y.shape[0] * 2, -1).view(y.shape[0], 4, -1, y.shape[3]),
    "unfold": lambda _, y: y.unfold(2, 3, 2).mean(-1),
    "columns": lambda _, y: functional.unfold(y, 3, 2, 1, 2).unsqueeze(1).expand(-1, 4, -1, -1),
    "cubic": lambda _, y: functional.interpolate(y, size=(9, 4), mode="bicubic"),
    "cubic corners": lambda _, y: functional.interpolate(
        y, scale_factor=2, mode="bicubic", align_corners=True
    ),
    "cubic by a factor": lambda _, y: functional.interpolate(
        y, scale_factor=(1.7, 0.7), mode="bicubic"
    ),
    "antialiased by a factor": lambda _, y: functional.interpolate(
        y, scale_factor=(1.7, 0.6), mode="bilinear", antialias=True
    ),
    "antialiased": lambda _, y: functional.interpolate(
        y, size=(4, 9), mode="bilinear", antialias=True
    ),
    "antialiased cubic": lambda _, y: functional.interpolate(
        y, size=(3, 8), mode="bicubic", antialias=True
    ),
    "volumes": lambda _, y: functional.conv3d(
        y.unsqueeze(1), torch.ones(2, 1, 3, 3, 2) * 0.1, stride=(1, 2, 1), padding=1
    )[:, 0],
    "autocast": lambda _, y: scaled_in_float32(y) + 1,
    "dtype": lambda _, y: y.double().float() + y.to(torch.float32).type_as(y),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_matches_torch(name: str) -> None:
    assert_as_in_torch(Net(OPERATORS[name]))


DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32")


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_cast_matches_torch(source: str, target: str) -> None:
    """Between all pairs of dtypes; int64 is int32 here, so its values are within that."""
    # -65504 is the largest number of float16: beyond it is infinity, which int32 has otherwise.
    numbers = [-65504.0, -300.7, -1.5, -0.5, 0.0, 0.5, 1.5, 127.9, 128.0, 255.9, 300.0, 40000.7]
    wide = torch.tensor(numbers) if "float" in source else torch.tensor(numbers).to(torch.int64)
    x = wide.to(getattr(torch, source))
    own = x.float().numpy() if "float" in source else x.numpy()
    context = OperatorContext("float32", DEFAULTS, "nhwc", None)
    array = jnp.asarray(own).astype(source) if "float" in source else jnp.asarray(own)
    cast = FUNCTIONS["aten.to.dtype"](context, to_tensor(array), TypeOf(target)).plain()
    theirs = x.to(getattr(torch, target))
    np.testing.assert_array_equal(np.asarray(cast, np.float64), theirs.double().numpy())


def test_conv1d_and_transposed_convolutions_match_torch() -> None:
    class Sequences(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(2, 4, 3, stride=2, padding=1)
            self.up = nn.ConvTranspose2d(4, 6, (2, 3), (3, 2), padding=1, groups=2, dilation=2)

        def forward(self, x: Any) -> Any:
            y = self.conv(x.flatten(2))
            return self.up(y.unflatten(2, (3, 6))).mean((2, 3))

    assert_as_in_torch(Sequences())


def test_tied_weights_are_one_parameter() -> None:
    class Tied(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.second.weight = self.first.weight

        def forward(self, x: Any) -> Any:
            return self.second(self.first(x.mean(1))).mean(1)

    graph = assert_as_in_torch(Tied())
    assert [spec.name for spec in graph.arrays] == ["first.weight", "first.bias", "second.bias"]


def test_transformer_and_embedding_match_torch() -> None:
    class Text(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 8)
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Any) -> Any:
            return self.head(self.encoder(self.table(x))[:, 0])

    module = Text()
    graph = export_module(module, (5,), dtype="int64")
    tokens = np.random.default_rng(0).integers(0, 11, (4, 5))
    with torch.no_grad():
        theirs = module.eval()(torch.from_numpy(tokens)).numpy()
    images = tokens[:, :, None, None].astype(np.float32)
    own = network_of(graph).apply(initial_variables_of(graph), images, train=False)
    np.testing.assert_allclose(own, theirs, rtol=1e-4, atol=1e-5)


def test_batch_size_can_be_set() -> None:
    graph = export_module(Net(lambda _, y: y.reshape(3, 4, 6, 6)), (2, 6, 6), batch=3)
    images = np.zeros((3, 2, 6, 6), np.float32)
    assert logits_of(graph, images).shape == (3, 3)
    np.testing.assert_array_equal(logits_of(graph, images[:2]), logits_of(graph, images)[:2])
    variables = initial_variables_of(graph)
    with pytest.raises(ValueError, match="a batch has 2 samples; must have 3"):
        network_of(graph).apply(variables, images[:2], train=True, mutable=["batch_stats"])


def test_unknown_operator_is_reported_with_its_line() -> None:
    message = refused(lambda _, y: torch.special.bessel_j0(y))
    assert message.startswith("operator aten.special_bessel_j0.default of the network (test_export")
    assert "else self.change(self, y)) isn't supported" in message


def test_unknown_operators_are_named_beside_one_whose_shape_depends_on_the_data() -> None:
    message = refused(lambda _, y: torch.special.bessel_j0(y) + torch.nonzero(y).sum())
    assert message.startswith("operator aten.special_bessel_j0.default of the network (test_export")
    assert "1 other operator isn't either: aten.nonzero.default of the network (test_ex" in message


def test_all_unknown_operators_are_reported_at_once() -> None:
    message = refused(lambda _, y: torch.special.airy_ai(torch.special.bessel_y0(y)))
    assert message.startswith("operator aten.special_bessel_y0.default of the network (test_export")
    assert ". 1 other operator isn't either: aten.special_airy_ai.default of the n" in message


def test_steps_through_memory_that_is_not_contiguous_are_refused() -> None:
    steps = ((2, 4, 2, 6), (144, 36, 6, 1))
    export_module(Net(lambda _, y: y.contiguous().as_strided(*steps)), (2, 6, 6), batch=2)
    with pytest.raises(ValueError, match=r"isn't contiguous; must be of x\.contiguous\(\)"):
        export_module(Net(lambda _, y: y.mT.as_strided(*steps)), (2, 6, 6), batch=2)


class Complex(Net):
    """A network with a complex parameter."""

    def __init__(self) -> None:
        super().__init__(lambda net, y: y * net.turn.abs())
        self.turn = nn.Parameter(torch.ones(6, dtype=torch.complex64))


def test_complex_parameter_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"turn of torch\.complex64 is trained or changes; must be"
    ):
        export_module(Complex(), (2, 6, 6))


def test_data_dependent_control_flow_is_refused() -> None:
    message = refused(lambda _, y: y if y.sum() > 0 else -y)
    assert message.startswith(
        "my_nets:Net: torch.export for samples of shape (2, 6, 6) after map ops fails in t"
    )
    assert message.endswith("; its control flow must not depend on values of tensors")
    assert "test_export_module.py:" in message


def test_fixed_batch_size_is_refused() -> None:
    message = refused(lambda _, y: y.reshape(2, 4, 6, 6))
    assert message.startswith("my_nets:Net: its code fixes the batch size in training; use x.")


def test_draws_in_evaluation_are_refused() -> None:
    message = refused(lambda _, y: functional.dropout(y, 0.5))
    assert "draws random numbers in evaluation; must do so only" in message
    message = refused(lambda _, y: y + torch.rand_like(y))
    assert message.startswith("aten.rand_like.default of the network")


def test_images_of_the_wrong_shape_are_refused() -> None:
    pattern = r"shape \(3, 6, 6\) after map ops fails in training: .*3 channels"
    with pytest.raises(ValueError, match=pattern):
        export_module(Net(), (3, 6, 6))


Pair = namedtuple("Pair", "features logits")


class Several(Net):
    """A network with two outputs in training, and one or two in evaluation."""

    def __init__(self, pack: Callable[[Any, Any], Any], *, evaluates_one: bool = False) -> None:
        super().__init__()
        self.pack = pack
        self.evaluates_one = evaluates_one

    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        return y if self.evaluates_one and not self.training else self.pack(y, x)


@pytest.mark.parametrize(
    ("pack", "output"),
    [
        (lambda y, x: {"features": x, "logits": y}, None),
        (lambda y, x: Pair(x, y), None),
        (lambda y, x: {"hidden": x, "scores": y}, "scores"),
        (lambda y, x: (x, {"scores": (x, y)}), "1.scores.1"),
        (lambda y, x: [y, x], "0"),
        (lambda y, x: (y, None), None),
        (lambda y, x: Record(x, y), None),
        (lambda y, x: (x, Record(y, x)), "1.hidden"),
        (lambda y, x: MappingProxyType({"hidden": x, "logits": Record(x, y)}), "logits.logits"),
        (lambda y, x: {"cache": Opaque(), "hidden": x, "logits": y}, None),
        (lambda y, x: Record(y, Opaque()), "hidden"),
    ],
)
@pytest.mark.parametrize("evaluates_one", [False, True])
def test_logits_are_chosen_among_several_outputs(
    pack: Callable[[Any, Any], Any], output: str | None, evaluates_one: bool
) -> None:
    module = Several(pack, evaluates_one=evaluates_one)
    graph = export_module(module, (2, 6, 6), output=output)
    x = np.random.default_rng(0).normal(size=(3, 2, 6, 6)).astype(np.float32)
    images = jnp.asarray(x.transpose(0, 2, 3, 1))
    for train in (False, True):
        ours = network_of(graph).apply(initial_variables_of(graph), images, train=train)
        with torch.no_grad():
            theirs = Net.forward(module.train(train), torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("pack", "output", "words"),
    [
        (lambda y, x: (y, x), None, "returns 2 tensors, 0, 1; model.output must name one of them"),
        (
            lambda y, x: {"a": y, "b": (x, x)},
            "c",
            r"returns no output c; model.output must name one of a, b\.0, b\.1",
        ),
        (
            lambda y, x: Record(x, y),
            "scores",
            "returns no output scores; model.output must name one of hidden, logits",
        ),
        (
            lambda y, x: (y, Opaque()),
            None,
            r"^the network returns a tests.*\.Opaque; must return a tensor, or a tuple, list, dict",
        ),
        (
            lambda y, x: {"loss": y, "out": Opaque()},
            None,
            r"a tests.*\.Opaque; .* by model\.output$",
        ),
    ],
)
def test_outputs_without_logits_are_refused(
    pack: Callable[[Any, Any], Any], output: str | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        export_module(Several(pack), (2, 6, 6), output=output)


def test_weights_follow_the_seed() -> None:
    before = torch.random.get_rng_state()
    one, same, other = (make_module("my_nets:Net", Net, {}, seed) for seed in (1, 1, 2))
    assert torch.equal(one.conv.weight, same.conv.weight)
    assert not torch.equal(one.conv.weight, other.conv.weight)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_invalid_module_is_refused() -> None:
    with pytest.raises(ValueError, match=r"my_nets:f returns a int; must be a torch\.nn\.Module"):
        make_module("my_nets:f", lambda: 1, {}, 0)
    with pytest.raises(ValueError, match=r"my_nets:Net can't be made: .*unexpected keyword"):
        make_module("my_nets:Net", Net, {"width": 2}, 0)
    with pytest.raises(ValueError, match="is a module already; must have no arguments"):
        make_module("my_nets:net", Net(), {"width": 2}, 0)
    with pytest.raises(ValueError, match=r"must be a torch\.nn\.Module class"):
        make_module("my_nets:x", 3, {}, 0)


class Both(nn.Module):  # type: ignore[misc]
    """A dense layer of an image and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(36, 3)

    def add(self, image: Any, row: Any) -> Any:
        return self.fc(torch.cat([image.flatten(1), 2 * row], 1))


class ByName(Both):
    def forward(self, row: Any, image: Any) -> Any:
        return self.add(image, row)


class ByKeyword(Both):
    def forward(self, image: Any, scale: float = 1.0, *, row: Any) -> Any:
        return self.add(image * scale, row)


class ByPosition(Both):
    def forward(self, first: Any, second: Any) -> Any:
        return self.add(first, second)


class Variadic(Both):
    def forward(self, *arrays: Any) -> Any:
        return self.add(*arrays)


class OfDictionary(Both):
    def forward(self, arrays: Any) -> Any:
        return self.add(arrays["image"], arrays["row"])


@pytest.mark.parametrize("kind", [ByName, ByKeyword, ByPosition, Variadic, OfDictionary])
def test_several_inputs_reach_forward(kind: Any) -> None:
    module = kind()
    samples = {"image": TensorSpec((1, 4, 8), "float32"), "row": TensorSpec((4,), "float32")}
    graph = export_module(module, samples)
    assert set(graph.inputs) == set(samples)
    draw = np.random.default_rng(0)
    image = draw.normal(size=(3, 1, 4, 8)).astype(np.float32)
    row = draw.normal(size=(3, 4)).astype(np.float32)
    with torch.no_grad():
        theirs = module.add(torch.from_numpy(image), torch.from_numpy(row)).numpy()
    inputs = {"row": jnp.asarray(row), "image": jnp.asarray(image.transpose(0, 2, 3, 1))}
    ours = network_of(graph).apply(initial_variables_of(graph), inputs, train=False)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_dictionary_in_place_of_an_array_is_explained() -> None:
    module = nn.Sequential(nn.Linear(4, 2))
    samples = {"row": TensorSpec((4,), "float32"), "mask": TensorSpec((4,), "float32")}
    expected = (
        r"\(its input is a dictionary of row, mask; model\.inputs=\[COLUMN\] or parameters of"
    )
    with pytest.raises(ValueError, match=expected):
        export_module(module, samples)


def test_missing_input_is_refused() -> None:
    expected = r"can't be called with one array: missing .*'image'; model.inputs must name a column"
    with pytest.raises(ValueError, match=expected):
        export_module(ByName(), (1, 4, 8))
