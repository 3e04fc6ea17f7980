"""Which layers of nnx compute in 8-bit floating point, that `explain` says the same, and that the others do nothing."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from float8_nnx import CURRENT, DELAYED, X, linear
from jax import lax
from nnx_layers import LAYERS

import jmp_policy as jmp

BATCH = jnp.ones((4, 8, 16))
SQUARES = jnp.ones((16, 8, 16))
STEPS = jnp.ones((16, 3, 16))


class Doubled(nnx.Linear):
    """A subclass that hands on to its base."""

    def __call__(self, x):
        return super().__call__(x) * 2


class WithoutBias(nnx.Linear):
    """A subclass that multiplies itself, by the function that its base has."""

    def __call__(self, x):
        x, kernel = self.promote_dtype((x, self.kernel[...]), dtype=self.dtype)
        return self.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))


class Contained(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(16, 32, rngs=rngs)])
        self.heads = nnx.Dict(one=nnx.Linear(32, 16, rngs=rngs))

    def __call__(self, x):
        return self.heads.one(self.layers[0](x))


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, 16, qkv_features=32, rngs=rngs)
        self.attention.init_cache((16, 4, 16), jnp.bfloat16)

    def __call__(self, x):
        return self.attention(x, decode=True)


def product(*operands, **options):
    return lax.dot_general(*operands, **options)


IN_8_BITS = {  # how to make it, what it takes, and how many products have their operands in 8 bits
    "Linear": (lambda rngs: nnx.Linear(16, 32, rngs=rngs), BATCH, 1),
    "LinearGeneral": (lambda rngs: nnx.LinearGeneral((8, 16), (2, 8), axis=(-2, -1), rngs=rngs), SQUARES, 1),
    "Einsum": (lambda rngs: nnx.Einsum("bta,ahd->bthd", (16, 2, 16), (2, 16), rngs=rngs), BATCH, 1),
    "Conv of one axis": (lambda rngs: nnx.Conv(16, 32, (3,), rngs=rngs), BATCH, 1),
    "Conv of two axes": (lambda rngs: nnx.Conv(16, 32, (3, 3), rngs=rngs), jnp.ones((1, 4, 4, 16)), 1),
    "Conv of three axes": (lambda rngs: nnx.Conv(16, 32, (1, 3, 3), rngs=rngs), jnp.ones((1, 2, 2, 2, 16)), 1),
    "MultiHeadAttention": (lambda rngs: nnx.MultiHeadAttention(2, 16, 32, decode=False, rngs=rngs), BATCH, 4),
    "MultiHeadAttention with a cache": (Decoder, jnp.ones((16, 1, 16)), 4),
    "LSTMCell": (lambda rngs: nnx.RNN(nnx.LSTMCell(16, 16, rngs=rngs)), STEPS, 8),
    "GRUCell": (lambda rngs: nnx.RNN(nnx.GRUCell(16, 16, rngs=rngs)), STEPS, 2),
    "SpectralNorm": (lambda rngs: nnx.SpectralNorm(nnx.Linear(16, 32, rngs=rngs), rngs=rngs), BATCH, 1),
    "LoRALinear": (lambda rngs: nnx.LoRALinear(16, 32, lora_rank=16, rngs=rngs), BATCH, 1),
    "Sequential": (lambda rngs: nnx.Sequential(nnx.Linear(16, 32, rngs=rngs), nnx.relu), BATCH, 1),
    "List and Dict": (Contained, BATCH, 2),
    "subclass": (lambda rngs: Doubled(16, 32, rngs=rngs), BATCH, 1),
    "subclass that multiplies": (lambda rngs: WithoutBias(16, 32, rngs=rngs), BATCH, 1),
}

LEFT = {  # how to make it, what it takes, and why its products stay as they are
    "few features": (lambda rngs: nnx.Linear(16, 10, rngs=rngs), BATCH, "the length 10 is not a multiple of 16"),
    "few channels": (lambda rngs: nnx.Conv(3, 32, (3,), rngs=rngs), BATCH[..., :3], "the length 3 is not a multiple"),
    "few rows": (lambda rngs: nnx.Linear(16, 32, rngs=rngs), X[:3], "the number of its rows is not a multiple of 16"),
    "groups": (lambda rngs: nnx.Conv(16, 32, (3,), feature_group_count=2, rngs=rngs), BATCH, "one of groups"),
    "written function": (lambda rngs: nnx.Linear(16, 32, dot_general=product, rngs=rngs), BATCH, "function of its own"),
    "ConvTranspose": (lambda rngs: nnx.ConvTranspose(16, 32, (3,), rngs=rngs), BATCH, "function of its own"),
    "Embed": (lambda rngs: nnx.Embed(32, 16, rngs=rngs), jnp.zeros((4, 4), jnp.int32), "the rows of a table are read"),
}


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # layers promote their own float32 statistics
        yield


def abstract(make, policy):
    return nnx.eval_shape(lambda: jmp.with_policy(make(nnx.Rngs(0)), policy))


def program(model, x):
    graphdef, state = nnx.split(model)
    return jax.jit(lambda state, x: nnx.merge(graphdef, state, copy=True)(x)).trace(state, x)


def products_in_8_bits(model, x):
    casts = str(program(model, x).jaxpr).count("new_dtype=float8_e4m3fn")
    assert casts % 2 == 0
    return casts // 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", IN_8_BITS)
def test_a_layer_multiplies_in_8_bits_and_explain_says_so(name):
    make, x, count = IN_8_BITS[name]
    model = abstract(make, DELAYED)
    assert products_in_8_bits(model, x) == count
    assert products_in_8_bits(abstract(make, CURRENT), x) == count
    assert len(nnx.to_flat_state(nnx.state(model, jmp.nnx.Float8State))) == 6 * count
    said = [row.quantization for row in jmp.explain(model, x).rows]
    assert len([text for text in said if text.startswith("float8/4(min_size=0)")]) == count


@pytest.mark.slow
def test_a_layer_whose_weight_is_normed_multiplies_in_8_bits():
    normed = nnx.WeightNorm(linear(16, 32), rngs=nnx.Rngs(0))  # which older Flax cannot make abstract
    model = jmp.with_policy(normed, DELAYED)
    assert products_in_8_bits(model, BATCH) == 1
    assert jmp.explain(model, BATCH)["layer_instance"].quantization == "float8/4(min_size=0)"


@pytest.mark.filterwarnings("ignore:No layer of the model computes in float8")  # of the few rows
@pytest.mark.sample(5)
@pytest.mark.parametrize("name", LEFT)
def test_a_layer_that_is_left_does_what_it_does_without_and_explain_says_why(name):
    make, x, reason = LEFT[name]
    model = abstract(make, DELAYED)
    plain = abstract(make, "mixed_bfloat16")
    assert program(model, x).lower().as_text() == program(plain, x).lower().as_text()
    said = jmp.explain(model, x).rows[0].quantization
    assert said.startswith("left: ")
    assert reason in said


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [name for name, layer in LAYERS.items() if not layer.drawn])
def test_layers_of_few_features_compute_as_without(name):
    layer = LAYERS[name]
    model = nnx.eval_shape(lambda: layer.make(None, nnx.Rngs(0)))

    def gradients(policy):
        policied = jmp.with_policy(model, policy)
        layer.prepare(policied, None)
        graphdef, params, rest = nnx.split(policied, nnx.Param, ...)

        def loss(params, rest, inputs):
            merged = nnx.merge(graphdef, params, rest, copy=True)
            out = layer.call(merged, *inputs)
            total = sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(out))
            return total, (out, nnx.to_pure_dict(nnx.state(merged)))

        return str(jax.make_jaxpr(jax.grad(loss, has_aux=True))(params, rest, layer.inputs))

    assert gradients(DELAYED) == gradients("mixed_bfloat16")


def test_rows_that_keep_every_layer_out_of_8_bits_are_told_once():
    class Layer(nnx.Linear):
        """A class of this test, of which nothing was said before."""

    model = abstract(lambda rngs: Layer(16, 16, rngs=rngs), DELAYED)
    program(model, X[:16])
    message = r"float8 in this call, but in bfloat16: .* a multiple of 16; it is 3\. Pad the batch to 16 rows\."
    with pytest.warns(UserWarning, match=message):
        program(model, X[:3])
    program(model, X[:5])
