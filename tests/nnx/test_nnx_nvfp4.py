"""NVFP4 in nnx: layers that a rule keeps in the compute dtype, and the streams of keys for stochastic rounding."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jmp_policy as jmp
from jmp_policy.nnx import QuantizedParam, set_rounding_rngs

POLICY = "nvfp4(min_size=0)_from_mixed_bfloat16"
NOISY = "nvfp4(min_size=0,stochastic_rounding=true,hadamard=true)_from_mixed_bfloat16"
KEPT = jmp.PolicyMap({"(.*/)?(stem|head)": "mixed_bfloat16"}, POLICY)
X = jax.random.normal(jax.random.key(0), (16, 32))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, x):
        return self.dense(x)


class Model(nnx.Module):
    """A first layer, two blocks and a head."""

    def __init__(self, rngs):
        self.stem = nnx.Linear(32, 32, rngs=rngs)
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.head = Block(rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = nnx.relu(block(x))
        return self.head(nnx.relu(self.stem(x)))


def make(policy, kind=Model):
    return jmp.with_policy(kind(nnx.Rngs(0)), policy)


def make_noisy(seed=0, kind=Model):
    model = make(NOISY, kind)
    set_rounding_rngs(model, nnx.Rngs(rounding=seed))
    return model


def loss_fn(model, x=X):
    return jnp.mean(model(x).astype(jnp.float32) ** 2)


def grad(model):
    return nnx.jit(nnx.grad(loss_fn))(model)


def reasons(model):
    return {row.path: row.quantization for row in jmp.explain(model, X).rows if row.quantization}


def kernel_of(grads):
    return grads["blocks"][0]["dense"]["kernel"][...]


def differ(a, b):
    return bool(jnp.any(a != b))


def count_of(model):
    return model.blocks[0].dense.rounding.count[...].item()


@pytest.mark.slow
def test_every_layer_is_quantized_but_those_that_a_rule_keeps():
    plain = "nvfp4(min_size=0)"
    blocks = dict.fromkeys(["blocks/0/dense", "blocks/1/dense"], plain)
    assert reasons(make(POLICY)) == blocks | {"stem": plain, "head/dense": plain}
    assert reasons(make(KEPT)) == blocks


def test_layers_of_equal_specs_share_a_class_whatever_their_place():
    model = make(POLICY)
    assert type(model.blocks[0].dense) is type(model.blocks[1].dense) is type(model.head.dense)


@pytest.mark.exhaustive
def test_a_module_that_is_assigned_later_is_kept_as_well():
    model = make(KEPT)
    model.head = Block(nnx.Rngs(1))
    model.blocks[0] = Block(nnx.Rngs(1))
    model(X)
    model.head.dense = nnx.Linear(32, 32, rngs=nnx.Rngs(2))
    model(X)
    assert reasons(model) == reasons(make(KEPT))


@pytest.mark.slow
def test_a_linen_module_in_a_kept_place_is_kept():
    class Bridged(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.bridge.ToNNX(linen.Dense(32), rngs=rngs).lazy_init(X)
            self.head = nnx.bridge.ToNNX(linen.Dense(32), rngs=rngs).lazy_init(X)

        def __call__(self, x):
            return self.head(self.inner(x))

    def count_products(policy):
        graphdef, state = nnx.split(make(policy, Bridged))
        return str(jax.make_jaxpr(lambda state: nnx.merge(graphdef, state)(X))(state)).count("scaled_dot")

    assert count_products(KEPT) == 1
    assert count_products(POLICY) == 2


@pytest.mark.slow
def test_quantize_stores_what_is_not_kept_and_computes_the_same():
    model = make(KEPT)
    quantized = jmp.quant.quantize(model, KEPT)
    assert isinstance(quantized.blocks[0].dense.kernel, QuantizedParam)
    assert isinstance(quantized.head.dense.kernel, nnx.Param)
    np.testing.assert_array_equal(quantized(X), model(X))


@pytest.mark.exhaustive
def test_each_call_draws_new_keys_from_the_state_of_the_model():
    model, other = make_noisy(), make_noisy()
    first, second = kernel_of(grad(model)), kernel_of(grad(model))
    assert differ(first, second)
    assert count_of(model) == 2
    np.testing.assert_array_equal(kernel_of(grad(other)), first)
    assert differ(kernel_of(grad(make_noisy(seed=1))), first)


@pytest.mark.exhaustive
def test_streams_are_state_that_outlives_copies_checkpoints_and_policies():
    model = make_noisy()
    grad(model)
    copies = {
        "clone": nnx.clone(model),
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "policy": jmp.with_policy(nnx.clone(model), NOISY),
    }
    expected = kernel_of(grad(model))
    for name, each in copies.items():
        np.testing.assert_array_equal(kernel_of(grad(each)), expected, err_msg=name)
    fresh = make_noisy(seed=5)
    nnx.update(fresh, nnx.state(model))
    np.testing.assert_array_equal(kernel_of(grad(fresh)), kernel_of(grad(model)))
    nnx.reseed(model, rounding=0)
    assert count_of(model) == 0


def test_kept_layers_have_no_stream():
    model = make(jmp.PolicyMap({"(.*/)?(stem|head)": "mixed_bfloat16"}, NOISY))
    set_rounding_rngs(model, nnx.Rngs(rounding=0))
    paths = {path[:-2] for path, _ in nnx.to_flat_state(nnx.state(model, nnx.RngCount))}
    assert paths == {("blocks", 0, "dense"), ("blocks", 1, "dense")}


@pytest.mark.slow
def test_after_eval_no_keys_are_drawn():
    model = make_noisy()
    noisy = model(X)
    model.eval()
    np.testing.assert_array_equal(jax.jit(lambda x: model(x))(X), noisy)
    assert count_of(model) == 1
    with pytest.raises(ValueError, match="is differentiated has no key"):
        grad(model)
    model.train()
    grad(model)
    assert count_of(model) == 2


@pytest.mark.exhaustive
def test_streams_are_split_for_vmap_and_scan():
    model = jmp.with_policy(nnx.vmap(Block)(nnx.Rngs(0).split(2)), NOISY)
    set_rounding_rngs(model, nnx.Rngs(rounding=0))

    @nnx.split_rngs(splits=2, only="rounding")
    def run(model, x):
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, model)

    grads = nnx.jit(nnx.grad(lambda model: jnp.mean(run(model, X.astype(jnp.bfloat16)).astype(jnp.float32) ** 2)))(
        model
    )
    assert grads["dense"]["kernel"][...].shape == (2, 32, 32)
    assert model.dense.rounding.count[...].shape == ()
    assert model.dense.rounding.count[...] > 0


@pytest.mark.slow
def test_a_missing_stream_is_an_error_that_says_how_to_make_one():
    model = make(NOISY)
    model(X)  # what is not differentiated draws nothing
    with pytest.raises(ValueError, match=r"nnx\.set_rounding_rngs\(model, nnx\.Rngs\(rounding=0\)\) in nnx"):
        grad(model)
    set_rounding_rngs(model, nnx.Rngs(0))
    grad(model)
    set_rounding_rngs(model, None)
    with pytest.raises(ValueError, match="is differentiated has no key"):
        grad(model)


@pytest.mark.parametrize("policy", [POLICY, "mixed_bfloat16", "nvfp4(stochastic_rounding=true)_from_mixed_bfloat16"])
def test_a_model_that_draws_nothing_takes_no_stream(policy):
    with pytest.raises(ValueError, match=r"No layer of the model rounds at random\. Give it such a policy first"):
        set_rounding_rngs(make(policy), nnx.Rngs(0))


@pytest.mark.exhaustive
def test_value_and_grad_and_optimizer_train_with_noise():
    model = make_noisy()
    optimizer = jmp.nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = jmp.nnx.value_and_grad(loss_fn, loss_scale=jmp.NoOpLossScale())(model)
        optimizer.update(model, grads)
        return loss

    losses = [step(model, optimizer).item() for _ in range(3)]
    assert losses[2] < losses[0]
    assert count_of(model) == 3
