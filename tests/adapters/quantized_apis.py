"""Both APIs of Flax as functions of variables, and the layers that both have: a law holds for each pair."""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn, nnx
from programs import program_text

import jmp_policy as jmp
from jmp_policy import quant

OVERWRITE = "_overwrite_with_gradient"
FLOAT8 = "float8/4(min_size=0)"
AS_CONVOLUTION = "float8/4(min_size=0), computed with as numbers: it is a convolution"
BY_ROWS = "left: the number of its rows is not a multiple of 16"
BY_WIDTH = "left: the length 10 is not a multiple of 16"
BY_GROUPS = "left: its convolution is one of groups"
BY_CODE = "left: it multiplies by a function of its own"
BY_TABLE = "left: the rows of a table are read, and its logits want all the bits"


def waves(key, shape, dtype):
    """Numbers of both signs: to draw them would take a compilation."""
    return jnp.asarray(np.sin(np.arange(np.prod(shape))).reshape(shape) / 3, dtype)


def own_product(*args, **options):
    return jax.lax.dot_general(*args, **options)


def of(kind, *args, **options):
    """Makes a layer of nnx of its random streams."""
    return lambda rngs: kind(*args, **options, rngs=rngs)


class LinenSum(nn.Dense):
    """A subclass that uses the layer's code and adds its own."""

    def __call__(self, x):
        return x + super().__call__(x)


class NnxSum(nnx.Linear):
    """The same."""

    def __call__(self, x):
        return x + super().__call__(x)


class LinenTied(nn.Embed):
    """A table whose methods call each other."""

    def scores(self, tokens):
        return self.attend(self(tokens))


class NnxTied(nnx.Embed):
    """The same."""

    def scores(self, tokens):
        return self.attend(self(tokens))


class LinenNet(nn.Module):
    """Two layers."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(32, kernel_init=waves, name="hidden")(x))
        return nn.Dense(16, kernel_init=waves, name="head")(x)


class NnxNet(nnx.Module):
    """The same two."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(16, 32, kernel_init=waves, rngs=rngs)
        self.head = nnx.Linear(32, 16, kernel_init=waves, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.hidden(x)))


class Layer(NamedTuple):
    linen: nn.Module | None
    nnx: Callable[[nnx.Rngs], nnx.Module] | None
    inputs: Any
    float8: tuple[str, ...] = ()  # what `explain` says of its weights under a float8 policy, if both say the same
    method: str = "__call__"
    in_blocks: bool = True  # whether formats of blocks store its weight

    @property
    def args(self) -> tuple[Any, ...]:
        return self.inputs if isinstance(self.inputs, tuple) else (self.inputs,)


def _normal(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


X, XS, IMAGE, TOKENS = _normal(16, 16), _normal(16, 2, 16), _normal(2, 4, 4, 16), jnp.arange(16) % 5
MASK = np.tril(np.ones((3, 16, 32), np.float32), 4)
NET = Layer(LinenNet(), NnxNet, X, (FLOAT8, FLOAT8))
DENSE = Layer(nn.Dense(16, kernel_init=waves), of(nnx.Linear, 16, 16, kernel_init=waves), X, (FLOAT8,))

LAYERS = {
    "Dense": DENSE,
    "Dense without bias": Layer(nn.Dense(32, use_bias=False), of(nnx.Linear, 16, 32, use_bias=False), XS, (FLOAT8,)),
    "Dense of few rows": Layer(nn.Dense(32), of(nnx.Linear, 16, 32), X[:3], (BY_ROWS,)),
    "Dense of an odd width": Layer(nn.Dense(10), of(nnx.Linear, 16, 10), X, (BY_WIDTH,)),
    "DenseGeneral over two axes": Layer(
        nn.DenseGeneral((2, 8), axis=(-2, -1)), of(nnx.LinearGeneral, (2, 16), (2, 8), axis=(-2, -1)), XS, (FLOAT8,)
    ),
    "DenseGeneral of a batch": Layer(
        nn.DenseGeneral(16, axis=-1, batch_dims=(0,)),
        of(nnx.LinearGeneral, 16, 16, batch_axis={0: 2}),
        XS.swapaxes(0, 1),
        (FLOAT8,),
    ),
    "Einsum to heads": Layer(
        nn.Einsum((16, 2, 8), "bta,ahd->bthd"), of(nnx.Einsum, "bta,ahd->bthd", (16, 2, 8), (2, 8)), XS, (FLOAT8,)
    ),
    "Einsum in another order": Layer(
        nn.Einsum((2, 16, 8), "bta,had->hbtd"), of(nnx.Einsum, "bta,had->hbtd", (2, 16, 8), (2, 8)), XS
    ),
    "Einsum of a batch": Layer(
        nn.Einsum((2, 16, 16), "tba,tac->tbc"),
        of(nnx.Einsum, "tba,tac->tbc", (2, 16, 16), (2, 16)),
        XS.swapaxes(0, 1),
        (FLOAT8,),
    ),
    "Einsum with the sum last": Layer(
        nn.Einsum((32, 16), "bta,ca->bct", use_bias=False), of(nnx.Einsum, "bta,ca->bct", (32, 16)), XS, in_blocks=False
    ),
    "Conv of a line": Layer(nn.Conv(32, (3,), mask=MASK), of(nnx.Conv, 16, 32, (3,), mask=MASK), XS, (AS_CONVOLUTION,)),
    "Conv of an image": Layer(
        nn.Conv(16, (2, 2), strides=2, padding="CIRCULAR"),
        of(nnx.Conv, 16, 16, (2, 2), strides=2, padding="CIRCULAR"),
        IMAGE,
        (AS_CONVOLUTION,),
    ),
    "Conv in groups": Layer(
        nn.Conv(16, (2, 2), feature_group_count=2),
        of(nnx.Conv, 16, 16, (2, 2), feature_group_count=2),
        IMAGE,
        (BY_GROUPS,),
    ),
    "ConvTranspose": Layer(nn.ConvTranspose(16, (2, 2)), of(nnx.ConvTranspose, 16, 16, (2, 2)), IMAGE, (BY_CODE,)),
    "Embed": Layer(nn.Embed(16, 16), of(nnx.Embed, 16, 16), TOKENS, (BY_TABLE,), in_blocks=False),
    "Embed attended to": Layer(nn.Embed(16, 16), of(nnx.Embed, 16, 16), X, (BY_TABLE,), "attend", in_blocks=False),
    "table whose methods call each other": Layer(
        LinenTied(16, 16), of(NnxTied, 16, 16), TOKENS, (BY_TABLE,), "scores", in_blocks=False
    ),
    "attention": Layer(
        nn.MultiHeadDotProductAttention(2), of(nnx.MultiHeadAttention, 2, 16, decode=False), XS, (FLOAT8,) * 4
    ),
    "recurrent cell": Layer(nn.SimpleCell(16), of(nnx.SimpleCell, 16, 16, keep_rngs=False), (X, X), (FLOAT8,) * 2),
    "subclass that adds": Layer(LinenSum(16), of(NnxSum, 16, 16), X, (FLOAT8,)),
    "function of its author's": Layer(
        nn.Dense(16, dot_general=own_product), of(nnx.Linear, 16, 16, dot_general=own_product), X, (BY_CODE,)
    ),
    "two layers": NET,
}


class OwnProduct(nn.Dense):
    """A subclass with a product of its own."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features), self.param_dtype)
        return x @ kernel.astype(x.dtype)


class Scanned(nn.Module):
    """Layers that are scanned over, with or without biases."""

    use_bias: bool = True

    @nn.compact
    def __call__(self, x):
        step = nn.remat(lambda dense, x, _: (jnp.tanh(dense(x)), None))
        over_layers = nn.scan(step, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return over_layers(nn.Dense(x.shape[-1], use_bias=self.use_bias, name="layers"), x, None)[0]


class Mapped(nn.Module):
    """A layer for each row."""

    @nn.compact
    def __call__(self, x):
        over_rows = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True})
        return over_rows(16, name="layers")(x)


def decode(layer, x):
    layer.init_cache(x.shape)
    return layer(x[:, :1], decode=True)


ALONE = {
    "linen": {
        "Einsum with its equation at the call": Layer(nn.Einsum((16, 32)), None, (XS, "abc,cd->abd")),
        "Conv of a volume": Layer(nn.Conv(16, (2, 2, 2)), None, _normal(1, 2, 2, 2, 16)),
        "ConvLocal": Layer(nn.ConvLocal(4, (3, 3)), None, IMAGE),
        "optimized LSTM cell": Layer(nn.OptimizedLSTMCell(16), None, ((X, X), X)),
        "subclass with its own product": Layer(OwnProduct(16), None, X),
        "scan of layers": Layer(Scanned(), None, X),
        "vmap of layers": Layer(Mapped(), None, XS.swapaxes(0, 1)),
    },
    "nnx": {
        "Einsum with its equation at the call": Layer(None, of(nnx.Einsum, "ab,bc->ac", (16, 32)), (X, "ab,bc->ac")),
        "Einsum with an ellipsis in the kernel": Layer(None, of(nnx.Einsum, "...a,...ab->...b", (2, 16, 4)), XS),
        "Einsum, channels between": Layer(None, of(nnx.Einsum, "nta,tca->nc", (2, 4, 16)), XS),
        "ConvTranspose, masked": Layer(None, of(nnx.ConvTranspose, 16, 32, (3,), mask=MASK), XS),
        "ConvTranspose, transposed": Layer(
            None, of(nnx.ConvTranspose, 16, 4, (3, 3), transpose_kernel=True, padding="CIRCULAR"), IMAGE
        ),
        "attention with a cache": Layer(None, of(nnx.MultiHeadAttention, 2, 16), XS, method=decode),
        "LoRALinear": Layer(None, of(nnx.LoRALinear, 16, 32, lora_rank=2), X),
        "LoRA": Layer(None, lambda rngs: nnx.LoRA(16, 2, 4, base_module=nnx.Linear(16, 4, rngs=rngs), rngs=rngs), X),
        "OptimizedLSTMCell": Layer(None, of(nnx.OptimizedLSTMCell, 16, 16), ((X, X), X)),
    },
}
"""Layers of one API, on which the other has no counterpart or the same code."""


class Linen:
    """Models of linen, and their variables."""

    name = "linen"

    def make(self, layer: Layer, policy: Any = None) -> Any:
        return layer.linen if policy is None else jmp.with_policy(layer.linen, policy)

    def shapes(self, model: Any, layer: Layer) -> Any:
        return jax.eval_shape(lambda: model.init(jax.random.key(0), *layer.args, method=layer.method))

    def call(self, model: Any, variables: Any, *inputs: Any, method: str = "__call__") -> Any:
        return model.apply(variables, *inputs, method=method)

    def bind(self, model: Any, variables: Any) -> Any:
        return model.bind(variables)

    def quantize(self, model: Any, variables: Any, policy: Any) -> tuple[Any, Any]:
        return jmp.with_policy(model, policy), quant.quantize(variables, policy)

    def params(self, variables: Any) -> Any:
        return variables["params"]

    def state(self, variables: Any) -> dict[str, np.ndarray]:
        """The float8 state of variables, or of gradients, by path."""
        leaves = jax.tree.leaves_with_path(variables.get(OVERWRITE, {}))
        return {"/".join(key.key for key in path): leaf for path, leaf in leaves}


class Nnx:
    """Models of nnx, made of shapes alone, and their states."""

    name = "nnx"

    def make(self, layer: Layer, policy: Any = None) -> Any:
        attach = (lambda model: model) if policy is None else (lambda model: jmp.with_policy(model, policy))
        return nnx.eval_shape(lambda: attach(layer.nnx(nnx.Rngs(0))))

    def shapes(self, model: Any, layer: Layer) -> Any:
        return nnx.state(model)

    def call(self, model: Any, variables: Any, *inputs: Any, method: str = "__call__") -> Any:
        model = self.bind(model, variables)
        return method(model, *inputs) if callable(method) else getattr(model, method)(*inputs)

    def bind(self, model: Any, variables: Any) -> Any:
        return nnx.merge(nnx.graphdef(model), variables, copy=True)

    def quantize(self, model: Any, variables: Any, policy: Any) -> tuple[Any, Any]:
        quantized = quant.quantize(self.bind(model, variables), policy)
        return quantized, nnx.state(quantized)

    def params(self, variables: Any) -> Any:
        return nnx.to_pure_dict(nnx.filter_state(variables, nnx.Param))

    def state(self, variables: Any) -> dict[str, np.ndarray]:
        flat = nnx.to_flat_state(nnx.filter_state(variables, jmp.nnx.Float8State))
        return {"/".join(map(str, (*path[:-2], path[-1]))): leaf.get_value() for path, leaf in flat}


APIS = {api.name: api for api in (Linen(), Nnx())}


def filled(shapes: Any, seed: int = 0) -> Any:
    """Random arrays of these shapes; drawn by numpy, which compiles nothing."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape) / 4, leaf.dtype), shapes)


def run(api: str, name: str, policy: Any = None) -> Callable[..., Any]:
    """A layer of the registry under a policy, as a function of its variables."""
    layer, (model, _) = find(api, name), made(api, name, policy)
    return lambda variables: APIS[api].call(model, variables, *layer.args, method=layer.method)


def run_quantized(api: str, name: str, policy: Any) -> Callable[..., Any]:
    """The same, with weights that are quantized from the variables without a policy."""
    layer, (model, _) = find(api, name), made(api, name)

    def call(variables):
        return APIS[api].call(*APIS[api].quantize(model, variables, policy), *layer.args, method=layer.method)

    return call


def dataflow(lowered: Any) -> list[str]:
    """Every operation of a lowered program, whatever their order, with what defines its operands in their place."""
    defined: dict[str, int] = {}
    lines = []
    for line in program_text(lowered).splitlines():
        name, operation = re.fullmatch(r"\s*(?:(%\w+)(?::\d+)? = )?(.*)", line).groups()
        operation = re.sub(r"%\w+", lambda found: str(defined.get(found.group(), found.group())), operation)
        defined[name] = hash(operation)
        lines.append(operation)
    return sorted(lines)


def sum_of_squares(tree: Any) -> jax.Array:
    return sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree))


def find(api: str, name: str) -> Layer:
    return LAYERS.get(name) or ALONE[api][name]


@functools.cache
def made(api: str, name: str, policy: Any = None) -> tuple[Any, Any]:
    """A layer of the registry under a policy, and its variables as shapes and dtypes."""
    layer = find(api, name)
    model = APIS[api].make(layer, policy)
    return model, APIS[api].shapes(model, layer)
