import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx, serialization

import jmp_policy as jmp
from jmp_policy import quant

POLICY = "int8(min_size=0)_from_float32"
STATIC = "int8(min_size=0,act_scale=static)_from_float32"


def batches(count: int = 3) -> list[jax.Array]:
    return list(jax.random.normal(jax.random.key(0), (count, 4, 8)) * jnp.arange(1.0, count + 1)[:, None, None])


class Residual(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        self.sow("intermediates", "entering", x)
        return x + nn.Dense(8, name="dense")(x), None


class Model(nn.Module):
    """A layer that is called as it is, a scan of three, and one whose inputs have no numbers."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, name="first")(x)
        scan = nn.scan(Residual, variable_axes={"params": 0, "intermediates": 0}, split_rngs={"params": True}, length=3)
        x, _ = scan(name="blocks")(x, None)
        return nn.vmap(nn.Dense, variable_axes={"params": None}, split_rngs={"params": False})(8, name="last")(x)


class NnxModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.head = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dense(self.norm(x)))

    def without_head(self, x, scale=1.0):
        return self.dense(x * scale)


def linear(policy=POLICY, inputs=8):
    return jmp.with_policy(nnx.Linear(inputs, 8, rngs=nnx.Rngs(0)), policy)


@pytest.mark.slow
def test_layers_of_linen_are_told_by_path_and_those_without_numbers_are_named():
    """Those of a scan share a magnitude, and a static scale under a policy that has one."""
    model = jmp.with_policy(Model(), POLICY)
    variables = jax.jit(model.init)(jax.random.key(0), batches()[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        clips = quant.calibrate(model, batches(), variables=variables, clip="absmax")
    assert str(caught[0].message) == (
        "calibrate cannot read the inputs of 'last', inside of vmap, remat or a gradient: these inputs are not clipped"
    )
    assert caught[0].filename == __file__
    assert list(clips) == ["first", "blocks/dense"]
    assert clips["first"] == float(jnp.abs(jnp.stack(batches())).max())
    _, state = model.apply(variables, batches()[2], mutable="intermediates")
    entering = jnp.abs(state["intermediates"]["blocks"]["entering"][0])
    assert entering.shape == (3, 4, 8)
    assert np.isclose(clips["blocks/dense"], entering.max(), rtol=1e-5)
    quantized = quant.quantize(variables, POLICY, input_clips=clips, stacked=["blocks"])
    assert quantized["params"]["blocks"]["dense"]["kernel"].input_clip.tolist() == [clips["blocks/dense"]] * 3


@pytest.mark.slow
def test_an_nnx_model_is_calibrated_and_stays_as_it_is():
    model = NnxModel(nnx.Rngs(0))
    policied = jmp.with_policy(model, POLICY)
    clips = quant.calibrate(policied, batches(), clip="absmax")
    assert list(clips) == ["dense", "head"]
    assert not model.norm.mean[...].any()
    by_method = quant.calibrate(policied, [(batches()[0],)], clip="absmax", method="without_head", scale=2.0)
    assert by_method == {"dense": 2 * float(jnp.abs(batches()[0]).max())}
    again = quant.calibrate(quant.quantize(model, POLICY), batches(), clip="absmax")
    assert again == clips


def test_percentiles_are_those_of_all_batches_to_the_width_of_a_bin():
    rng = np.random.default_rng(0)
    batches = [rng.lognormal(size=(64, 64)).astype(np.float32) * np.float32(10.0**power) for power in (-4, 0, 3)]
    magnitudes = np.concatenate(batches).astype(np.float64)
    signed = [jnp.asarray(batch * rng.choice([-1, 1], batch.shape), jnp.float32) for batch in batches]
    for percentile in (1, 50, 99.9, 100):
        wanted = np.percentile(magnitudes, percentile, method="inverted_cdf")
        found = quant.calibrate(linear(inputs=64), signed, clip=percentile)[""]
        assert wanted <= found <= wanted * (1 + (0 if percentile == 100 else 1 / 128))


@pytest.mark.slow
def test_the_best_clip_has_the_least_square_error_of_all_that_were_tried_on_every_batch():
    x = np.random.default_rng(1).normal(size=(1, 65536)).astype(np.float32)
    x[0, [0, -1]] = 30.0  # one in each half: cutting it a little costs less than the steps it takes from the others
    halves = np.split(x, 2, axis=1)
    model = linear(inputs=32768)
    best = quant.calibrate(model, [jnp.asarray(half) for half in halves])[""]

    def error(clip: float) -> float:
        total = 0.0
        for half in halves:
            scale = min(np.abs(half).max(), clip) / 127
            total += np.sum((np.clip(np.rint(half.astype(np.float64) / scale), -127, 127) * scale - half) ** 2)
        return total

    assert error(best) < 0.99 * error(np.inf)
    assert error(best) <= 1.001 * min(error(2.0 ** (power / 8)) for power in range(0, 41))
    outlier = jnp.ones((1, 32768)).at[0, 0].set(30.0)  # by itself best clipped below 30
    assert quant.calibrate(model, [outlier])[""] < 30
    assert quant.calibrate(model, [outlier, jnp.full((1, 32768), 1e5)]) == {"": 1e5}


def test_a_layer_whose_inputs_are_all_zero_has_no_clip():
    for clip in ("absmax", "mse", 99.9):
        assert quant.calibrate(linear(), [jnp.zeros((4, 8))], clip=clip) == {}


VARIABLES, BATCH = {"params": {"kernel": np.ones((8, 8), np.float32)}}, batches()[0]
DENSE = jmp.with_policy(nn.Dense(8, use_bias=False), POLICY)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: quant.calibrate(linear(), []), ValueError, "calibrate was given no batches"),
        (lambda: quant.calibrate(linear(), [BATCH.at[0, 0].set(jnp.nan)]), ValueError,
         "The inputs of the layer '' are not all finite"),
        (lambda: quant.calibrate(linear(), [BATCH], clip=0), ValueError, "clip is 'absmax', 'mse' or a percentile"),
        *[
            (lambda policy=policy: quant.calibrate(linear(policy), [BATCH]), ValueError,
             "No layer that was called quantizes its inputs to integers")
            for policy in ("float32", "int8(activations=false,min_size=0)_from_f32")
        ],
        pytest.param(
            lambda: quant.calibrate(linear("mxfp8/8(min_size=0)_from_f32"), [BATCH]), ValueError,
            "No layer that was called quantizes its inputs to integers", marks=pytest.mark.slow,
        ),
        (lambda: quant.calibrate(linear(), [BATCH], variables=VARIABLES), ValueError,
         "variables belong to a linen module"),
        (lambda: quant.calibrate(DENSE, [BATCH]), ValueError, "runs with variables, and is not bound to them"),
        (lambda: quant.calibrate(DENSE.bind(VARIABLES), [BATCH], variables=VARIABLES), ValueError,
         "runs with variables, and is bound to some already"),
        (lambda: quant.calibrate(VARIABLES, [BATCH]), TypeError, "calibrate takes a Flax module, got "),
        (lambda: quant.calibrate(linear(), jnp.ones((4, 8))), TypeError,
         r"^calibrate takes a list of batches, got an array of shape \(4, 8\)\. Pass "),
    ],
)  # fmt: skip
def test_what_cannot_be_calibrated_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_layers_in_blocks_have_no_clip_and_leave_the_one_they_are_given():
    model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(1)))
    rules = jmp.PolicyMap({"layers/1": "mxfp8/8(min_size=0)_from_float32"}, POLICY)
    assert list(quant.calibrate(jmp.with_policy(model, rules), batches())) == ["layers/0"]
    made = quant.quantize(model, rules, input_clips={"layers/0": 2.0, "layers/1": 2.0})
    assert [layer.kernel[...].input_clip for layer in made.layers] == [2.0, None]


class TiedHead(nn.Module):
    def setup(self):
        self.table = nn.Embed(8, 8)
        self.layer = nn.Dense(8)
        self.head = nn.Dense(8, use_bias=False)

    def __call__(self, ids):
        x = self.layer(self.table(ids))
        return self.head.apply({"params": {"kernel": self.table.variables["params"]["embedding"].T}}, x)


@pytest.mark.slow
def test_a_head_that_is_tied_to_a_table_has_no_clip_that_quantize_would_refuse():
    policy = jmp.PolicyMap({"table": "float32"}, POLICY)
    model, ids = jmp.with_policy(TiedHead(), policy), jnp.arange(8)[None]
    variables = model.init(jax.random.key(0), ids)
    clips = quant.calibrate(model, [ids], variables=variables)
    assert list(clips) == ["layer"]
    quantized = quant.quantize(variables, policy, input_clips=clips)
    assert model.apply(quantized, ids).dtype == jnp.float32


def calibrated(where: str = "linen"):
    """An 8 by 8 layer under `STATIC`, calibrated to 2, as a function of its inputs, and its kernel."""
    if where == "nnx":
        model = quant.quantize(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), STATIC, input_clips={"": 2.0})
        return model, model.kernel[...]
    kernel = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    quantized = quant.quantize({"kernel": kernel}, STATIC, input_clips={"": 2.0})
    model = jmp.with_policy(nn.Dense(8, use_bias=False), STATIC)
    return lambda x: model.apply({"params": quantized}, x), quantized["kernel"]


@pytest.mark.parametrize("where", ["linen", "nnx"])
def test_a_static_scale_is_one_constant_for_all_rows_and_no_input_is_measured(where):
    layer, kernel = calibrated(where)
    x = np.random.default_rng(1).normal(size=(16, 8)) * np.logspace(-1, 1, 16)[:, None]  # some beyond the edge
    x[0], x[1] = np.inf, 2.0
    x = x.astype(np.float32)
    assert "reduce_max" not in str(jax.make_jaxpr(layer)(x))
    integers = np.clip(np.rint(np.asarray(x, np.float64) / (2 / 127)), -127, 127)
    weight = np.asarray(kernel.values, np.float64) * np.asarray(kernel.scale, np.float64)
    # A quotient within a float32 rounding error of a tie may round to the other integer: one step of one input.
    step = 2 / 127 * np.abs(weight).max()
    out = np.asarray(jax.jit(layer)(x))
    assert np.allclose(out, integers @ weight * (2 / 127), rtol=1e-5, atol=step * 1.01)
    assert (out[0] == out[1]).all()  # an infinity is clipped as well


def test_a_static_scale_without_calibration_is_an_error_that_names_the_weight():
    params = {"mlp": {"kernel": jnp.ones((8, 8))}}
    with pytest.raises(ValueError, match=r"'int8\(min_size=0,act_scale=static\)' .* weight 'mlp/kernel' has none"):
        quant.quantize(params, STATIC)
    dynamic = quant.quantize(params["mlp"], POLICY)
    with pytest.raises(ValueError, match="by a calibrated magnitude, and the weight 'kernel' has none"):
        jmp.with_policy(nn.Dense(8, use_bias=False), STATIC).apply({"params": dynamic}, jnp.ones((1, 8)))
    layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="the weight 'kernel' has none"):
        jmp.with_policy(quant.quantize(layer, POLICY), STATIC)
    with pytest.raises(ValueError, match="the weight has none"):
        quant.einsum("bi,io->bo", jnp.ones((1, 8)), jnp.ones((8, 8)), quantization="int8(act_scale=static)")


def test_a_static_scale_is_saved_and_restored_and_other_weights_are_scaled_dynamically():
    _, kernel = calibrated()
    abstract = quant.quantize({"kernel": jax.ShapeDtypeStruct((8, 8), jnp.float32)}, STATIC)
    target = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)
    saved = serialization.to_bytes({"kernel": kernel})
    assert serialization.from_bytes(target, saved)["kernel"].input_clip == 2.0
    model, x = jmp.with_policy(nn.Dense(8, use_bias=False), STATIC), jnp.ones((1, 8))
    floating = {"params": {"kernel": np.ones((8, 8), np.float32)}}  # not stored yet: in training, and to calibrate
    dynamic = jmp.with_policy(nn.Dense(8, use_bias=False), POLICY)
    assert str(jax.make_jaxpr(model.apply)(floating, x)) == str(jax.make_jaxpr(dynamic.apply)(floating, x))
    table = quant.quantize({"embedding": jax.ShapeDtypeStruct((8, 8), jnp.float32)}, STATIC)["embedding"]
    assert str(table.format) == "int8(min_size=0)"
    assert "int8(min_size=0,act_scale=static)" in str(jmp.explain(model, x))
