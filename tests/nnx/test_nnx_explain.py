"""`explain` for nnx, where nnx alone can do it."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn, nnx
from flax_apis import NNX

import jmp_policy as jmp

X = jax.ShapeDtypeStruct((2, 4), "float32")
MIXED = "mixed_bfloat16"


@NNX.module(block=NNX.dense, head=NNX.dense)
class Net:
    def encode(self, x):
        self.entered = str(x.dtype)
        return self.block(x)


def test_module_that_is_not_called_has_parameters_alone_and_a_bound_method_is_called_on_the_copy():
    model = NNX.under(Net, MIXED)
    for method in ("encode", model.encode):
        found = jmp.explain(model, X, method=method)
        assert found["block"].output_dtypes == ("bfloat16",)
        idle = found["head"]
        assert (idle.param_bytes, idle.input_dtypes, idle.compute_dtypes, idle.output_dtypes) == (80, (), (), ())


def test_rule_for_a_type_of_container_holds_inside():
    class Contained(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List([nnx.Sequential(NNX.dense())])

        def __call__(self, x):
            return self.blocks[0](x)

    found = jmp.explain(NNX.under(Contained, jmp.PolicyMap({nnx.List: "float32"}, MIXED)), X)
    rules = {path: rule for path, rule in {row.path: row.rule for row in found.rows}.items() if path}
    assert rules == dict.fromkeys(["blocks/0", "blocks/0/layers/0"], "List")
    assert found.unused == ()


def test_own_and_tied_parameters_are_counted_once_and_read_in_compute_dtype():
    class Tied(nnx.Module):
        def __init__(self):
            self.one, self.two = (NNX.dense(use_bias=False) for _ in range(2))
            self.two.kernel = self.one.kernel
            self.scale = nnx.Param(jnp.ones(4))

        def __call__(self, x):
            return self.two(self.one(x)) * self.scale

    found = jmp.explain(NNX.under(Tied, MIXED), X)
    assert {row.path: row.param_bytes for row in found.rows} == {"": 16, "one": 64, "two": 0}
    assert found[""].compute_dtypes == ("bfloat16",)


@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat], ids=["jit", "remat"])
def test_module_under_a_transform_is_seen_under_its_path(transform):
    @NNX.module(block=NNX.dense)
    class Transformed:
        def __call__(self, x):
            return transform(lambda block, x: block(x))(self.block, x)

    row = jmp.explain(NNX.under(Transformed, MIXED), X)["block"]
    assert (row.compute_dtypes, row.output_dtypes) == (("bfloat16",), ("bfloat16",))


def test_linen_module_in_a_bridge_is_one_row():
    bridge = nnx.bridge.ToNNX(nn.Dense(3), rngs=nnx.Rngs(0)).lazy_init(jnp.ones((2, 4)))
    row = jmp.explain(jmp.with_policy(bridge, MIXED), X)[""]
    assert (row.type, row.param_bytes, row.compute_dtypes) == ("ToNNX", 60, ("bfloat16",))


def test_model_stays_as_it_is():
    model = NNX.under(Net, MIXED)
    before = {path: (type(module), set(vars(module))) for path, module in nnx.iter_modules(model)}
    jmp.explain(model, X, method="encode")
    assert {path: (type(module), set(vars(module))) for path, module in nnx.iter_modules(model)} == before


def test_rngs_are_handed_on_and_not_drawn_from():
    class Noise(nnx.Module):
        def __call__(self, x, *, rngs):
            return x if rngs is None else x + jax.random.normal(rngs.noise(), x.shape, x.dtype)

    streams = nnx.Rngs(noise=0)
    for rngs in (streams, None):
        assert jmp.explain(Noise(), X, rngs=rngs)[""].output_dtypes == ("float32",)
    assert int(streams.noise.count[...]) == 0
