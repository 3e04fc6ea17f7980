"""Rules by scope: name stacks, module paths, and the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from programs import products, trace

import jmp_policy as jmp
from jmp_policy import AutocastRules, PolicyMap, autocast

LOW = "params=float32,compute=bfloat16,output=none"
X = jnp.ones((2, 3))


def layer(name, x):
    with jax.named_scope(name):
        return jnp.tanh(x @ jnp.full((3, 3), 0.5))


def net(x):
    return layer("head", layer("body", x))


def dtypes(fun, *args):
    """The dtype of the matrix products by the last name in their name stack."""
    return {stack.rpartition("/")[2]: dtype for stack, dtype in products(trace(fun)(*args))}


def results(fun, *args):
    """The last equation of a traced program: its name and dtype."""
    eqn = trace(fun)(*args).eqns[-1]
    return eqn.primitive.name, str(eqn.outvars[0].aval.dtype)


def test_a_rule_of_a_map_holds_in_a_named_scope():
    assert dtypes(autocast(net, PolicyMap({"head": "float32"}, LOW)), X) == {"body": "bfloat16", "head": "float32"}


def test_a_rule_holds_in_what_is_inside_and_may_be_low_in_a_float32_function():
    inner = jax.named_scope("decoder")(jax.jit(net))
    rules = PolicyMap({"decoder/head": "float16", "decoder": "mixed_bfloat16"}, "float32")
    assert dtypes(autocast(inner, rules), X) == {"body": "bfloat16", "head": "float16"}


def test_a_rule_of_the_rules_comes_before_those_of_the_map():
    rules = AutocastRules(scopes={"head": "float16"})
    fun = autocast(net, PolicyMap({"head": "float32"}, LOW), rules=rules)
    with pytest.warns(UserWarning, match=r"^policy rule 'head' decides nothing: the earlier rule 'head' hides it$"):
        assert dtypes(fun, X) == {"body": "bfloat16", "head": "float16"}


def test_a_float32_scope_is_full_and_what_follows_too():
    def scaled(x):
        return layer("head", x) * 2

    assert results(autocast(scaled, PolicyMap({"head": "float32"}, LOW)), X) == ("mul", "float32")
    narrowed = PolicyMap({"head": "params=float32,compute=float32,output=bfloat16"}, LOW)
    program = trace(autocast(scaled, narrowed))(X)
    assert [str(eqn.outvars[0].aval.dtype) for eqn in program.eqns if eqn.primitive.name == "mul"] == ["bfloat16"]


def test_the_output_dtype_of_a_scope_holds_outside_of_it_only():
    def nested(x):
        with jax.named_scope("outer"):
            return layer("inner", layer("first", x) * 2)

    rules = {"outer/inner": "float32", "outer": "params=float32,compute=float32,output=bfloat16"}
    program = trace(autocast(nested, PolicyMap(rules, LOW)))(X)
    assert "bf16" not in str(program.jaxpr)


def test_a_rule_that_repeats_the_policy_of_the_function_still_makes_a_boundary():
    policy = "params=float32,compute=bfloat16,output=float32"
    fun = autocast(lambda x: layer("head", x) * 2, PolicyMap({"head": policy}, policy))
    assert results(fun, X) == ("mul", "float32")


@pytest.mark.parametrize(("treatment", "dtype"), [("full", "float32"), ("narrow", "float32"), ("low", "bfloat16")])
def test_a_scope_may_be_treated_as_one_operation(treatment, dtype):
    def normalised(x):
        with jax.named_scope("norm"):
            return jnp.exp(x @ x.T)

    fun = autocast(lambda x: normalised(x) + 1, LOW, rules=AutocastRules(scopes={"norm": treatment}))
    program = trace(fun)(X)
    found = {eqn.primitive.name: str(eqn.outvars[0].aval.dtype) for eqn in program.eqns}
    assert found["exp"] == dtype
    assert found["add"] == ("float32" if treatment == "full" else "bfloat16")


@pytest.mark.usefixtures("no_default_precision")
@pytest.mark.parametrize("root", [LOW, f"{LOW},precision=high"])
def test_the_precision_of_a_scope_is_that_of_its_products_but_for_those_with_one(root):
    def written(x):
        with jax.named_scope("head"):
            return jnp.dot(x, x.T, precision="default")

    fun = autocast(lambda x: (net(x), written(x)), PolicyMap({"head": f"{LOW},precision=highest"}, root))
    eqns = [eqn for eqn in trace(fun)(X).eqns if eqn.primitive.name == "dot_general"]
    body, head, by_hand = (eqn.params["precision"] for eqn in eqns)
    assert body == (None if root == LOW else (jax.lax.Precision.HIGH,) * 2)
    assert head == (jax.lax.Precision.HIGHEST,) * 2
    assert by_hand == (jax.lax.Precision.DEFAULT,) * 2


def test_a_loop_in_a_scope_keeps_its_compute_dtype():
    def looped(x):
        with jax.named_scope("loop"):
            return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ jnp.eye(3)), x)

    program = trace(autocast(looped, PolicyMap({"loop": "float16"}, LOW)))(X)
    assert {dtype for _, dtype in products(program)} == {"float16"}
    assert "bf16" not in str(program.jaxpr)


class TestBackward:
    def test_it_can_be_addressed_on_its_own(self):
        step = autocast(jax.grad(lambda x: net(x).sum()), LOW, rules=AutocastRules(backward={"head": "float32"}))
        found = products(trace(step)(X))
        assert {stack.rpartition("/")[2] for stack, dtype in found if dtype == "float32"} == {"transpose(jvp(head))"}

    def test_one_policy_is_for_all_of_it(self):
        step = autocast(jax.grad(lambda x: net(x).sum()), LOW, rules=AutocastRules(backward="float32"))
        for stack, dtype in products(trace(step)(X)):
            assert (dtype == "float32") == ("transpose(" in stack)

    def test_a_rule_for_it_says_where_it_reaches(self):
        fun = autocast(net, LOW, rules=AutocastRules(backward="float32"))
        with pytest.warns(UserWarning, match=r"^the backward rules decide nothing: .* autocast\(grad\(f\)\) instead"):
            trace(fun)(X)


class TestWarnings:
    def test_an_unused_rule_is_named_with_the_nearest_path_at_the_call(self):
        text = r"^policy rule 'haed' matches no module; the closest path is 'head'$"
        with pytest.warns(UserWarning, match=text) as caught:
            jax.eval_shape(lambda x: autocast(net, PolicyMap({"haed": "float32"}, LOW))(x), X)
        assert caught[0].filename == __file__

    def test_they_point_at_the_call_with_a_module_of_nnx(self):
        fun = autocast(lambda model, x: model(x), PolicyMap({"haed": "float32"}, LOW))
        with pytest.warns(UserWarning, match="haed") as caught:
            nnx.eval_shape(lambda: fun(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), X))
        assert caught[0].filename == __file__


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        return self.encode(x)

    @nn.compact
    def encode(self, x):
        return nn.Dense(3, name="fc")(x)


class Turn(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(3, name="fc")(x), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = Encoder(name="first")(x)
        scanned = nn.scan(Turn, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = scanned(name="blocks")(x, None)
        x = nn.remat(Encoder)(name="remat")(x)
        x = nn.jit(Encoder)(name="jit")(x)
        x = nn.vmap(Encoder, variable_axes={"params": None}, split_rngs={"params": False})(name="vmap")(x)
        return nn.Dense(2, name="head")(x)


@pytest.fixture(scope="module")
def params():
    shapes = jax.eval_shape(Model().init, jax.random.key(0), X)
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["first", "blocks/fc", "remat/fc", "jit/fc", "vmap/fc", "head", Turn])
def test_linen_modules_have_the_path_of_their_module(params, key):
    def loss(params):
        return Model().apply(params, X).sum()

    step = autocast(jax.value_and_grad(loss), PolicyMap({key: "float32"}, LOW))
    found = products(trace(step)(params))
    place = "blocks" if key is Turn else key.partition("/")[0]
    assert {place in stack for stack, dtype in found if dtype == "float32"} == {True}
    assert {place in stack for stack, dtype in found if dtype == "bfloat16"} == {False}
    assert {"transpose(" in stack for stack, dtype in found if dtype == "float32"} == {True, False} or "jit" in place


@pytest.mark.slow
def test_a_warm_jitted_model_still_tells_its_modules(params):
    apply = jax.jit(Model().apply)
    jax.eval_shape(apply, params, X)
    for _ in range(2):
        fun = autocast(apply, PolicyMap({Turn: "float32", "first": "float32"}, LOW))
        found = products(trace(fun)(params, X))
        assert [dtype for _, dtype in found].count("float32") == 2


class Pair(nn.Module):
    def setup(self):
        self.fc = nn.Dense(3)
        self.pair = nn.Dense(3)

    def __call__(self, x):
        return self.both(x)

    def both(self, x):
        return self.pair(self.fc(x))


class Borrowing(nn.Module):
    lent: nn.Module

    def __call__(self, x):
        return self.lent(x)


class Setup(nn.Module):
    def setup(self):
        self.pair = Pair()
        self.embed = nn.Dense(3)
        self.borrowing = Borrowing(self.embed)

    def __call__(self, x):
        return self.borrowing(self.embed(self.pair.both(x)))

    def features(self, x):
        return self.pair(x)


@pytest.mark.parametrize(
    ("method", "key", "expected"),
    [
        (None, "pair", [1, 1, 0, 0]),
        (None, "embed", [0, 0, 1, 1]),
        ("features", "pair/pair", [0, 1]),
        (lambda module, x: module.pair.fc(x), "pair/fc", [1]),
    ],
)
def test_methods_and_modules_of_others_have_the_path_of_their_module(method, key, expected):
    model = Setup(name="named")
    shapes = jax.eval_shape(model.init, jax.random.key(0), X)
    fun = autocast(lambda params: model.apply(params, X, method=method), PolicyMap({key: "float32"}, LOW))
    found = products(trace(fun)(shapes))
    assert [dtype for _, dtype in found] == [("bfloat16", "float32")[full] for full in expected]


class Block(nnx.Module):
    def __init__(self, rngs):
        self.fc = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return self.inner(x)

    def inner(self, x):
        return jnp.tanh(self.fc(x))


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.enc = Block(rngs)
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.head = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        x = self.enc(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + self.enc.fc(x)


def nnx_products(fun, model):
    graphdef, state = nnx.split(model)
    return products(trace(lambda state: fun(nnx.merge(graphdef, state), X))(state))


@pytest.mark.parametrize(
    ("key", "count"), [("enc", 2), ("enc/fc", 2), ("blocks", 2), ("blocks/1/fc", 1), (Block, 4), ("", 5)]
)
def test_nnx_modules_have_the_path_of_their_module(key, count):
    model = Tied(nnx.Rngs(0))
    found = nnx_products(autocast(lambda model, x: model(x), PolicyMap({key: "float32"}, LOW)), model)
    assert [dtype for _, dtype in found].count("float32") == count
    assert len(found) == 5


def test_without_rules_a_program_at_two_scopes_is_one():
    @jax.jit
    def shared(x):
        return jnp.tanh(x @ x.T)

    def twice(x):
        with jax.named_scope("a"):
            first = shared(x)
        with jax.named_scope("b"):
            return first + shared(x)

    def bodies(fun):
        return len({id(eqn.params["jaxpr"]) for eqn in trace(fun)(X).eqns if eqn.primitive.name == "jit"})

    assert bodies(autocast(twice, LOW)) == 1
    assert bodies(autocast(twice, PolicyMap({"a": "float32"}, LOW))) == 2


def test_a_float32_region_survives_in_jit_scan_and_grad():
    @jmp.force_full_precision
    def region(x):
        return jax.jit(lambda x: x @ jnp.eye(3))(x)

    def scanned(x):
        return jax.lax.scan(lambda x, _: (region(x), None), x @ jnp.eye(3), length=2)[0]

    programs = [autocast(f, LOW) for f in (scanned, jax.grad(lambda x: scanned(x).sum()))]
    for fun in programs:
        found = products(trace(fun)(X))
        assert {dtype for stack, dtype in found if "force_full_precision" in stack} == {"float32"}
        assert {dtype for stack, dtype in found if "force_full_precision" not in stack} == {"bfloat16"}
    assert results(autocast(lambda x: region(x) * 2, LOW), X) == ("mul", "float32")


def test_a_float32_region_survives_in_a_low_scope():
    @jax.named_scope("low")
    def scope(x):
        return jmp.force_full_precision(jnp.exp)(x @ jnp.eye(3))

    fun = autocast(scope, LOW, rules=AutocastRules(scopes={"low": "low"}))
    program = trace(fun)(X)
    assert [str(eqn.outvars[0].aval.dtype) for eqn in program.eqns if eqn.primitive.name == "exp"] == ["float32"]


def test_the_mark_of_a_float32_region_is_no_part_of_the_program():
    marked = jax.jit(jmp.force_full_precision(jnp.cumsum)).lower(jnp.ones(3, jnp.float32)).as_text()
    assert "force_full_precision" not in marked
    assert np.array_equal(jmp.force_full_precision(jnp.cumsum)(jnp.ones(3)), [1, 2, 3])


def test_an_autocast_inside_another_decides_for_itself():
    inner = autocast(net, PolicyMap({"head": "float16"}, "params=float32,compute=float32,output=none"))
    program = trace(autocast(lambda x: layer("outer", inner(layer("outer", x))), LOW))(X)
    assert [dtype for _, dtype in products(program)] == ["bfloat16", "float32", "float16", "bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize("outer", [jmp.numerics.audit, lambda fun: autocast(fun, PolicyMap({nnx.Linear: LOW}))])
def test_rules_by_type_reach_modules_of_nnx_inside_another_look_at_them(outer):
    net = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.LayerNorm(4, rngs=nnx.Rngs(0)))
    inner = autocast(lambda net, x: net(x), PolicyMap({nnx.Linear: LOW}, "float32"))
    programs = []

    def call(net, x):
        programs.append(trace(inner)(net, x))
        return inner(net, x)

    outer(call)(net, jnp.ones((2, 3)))  # a rule that reached nothing would be a warning
    assert programs
    for program in programs:
        dtypes = {eqn.primitive.name: str(eqn.outvars[0].aval.dtype) for eqn in program.eqns}
        assert (dtypes["dot_general"], dtypes["rsqrt"]) == ("bfloat16", "float32")
