"""Policies on linen modules: where they reach, what wins, and that no call runs without one."""

import copy
import pickle
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jmp_policy as jmp

KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
MIXED = "params=float32,compute=bfloat16,output=float32"
BF16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")


class Scale(nn.Module):
    """A module of the user's own, without a dtype."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        self.sow("dtypes", "scale", jnp.zeros((), scale.dtype))
        return x * scale.astype(x.dtype)


class Project(nn.Module):
    """A module of the user's own, with a dtype that it passes on."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, dtype=self.dtype, name="up")(x)
        return nn.Dense(4, dtype=self.dtype, name="down")(x)


class Net(nn.Module):
    """Submodules in setup, and several methods."""

    def setup(self):
        self.encoder = Project()
        self.scale = Scale()
        self.head = nn.Dense(3)

    def encode(self, x):
        self.sow("dtypes", "encode", jnp.zeros((), x.dtype))
        return self.scale(self.encoder(x))

    def __call__(self, x):
        return self.head(self.encode(x))


class Chain(nn.Module):
    """Methods that call each other, and tell the dtypes they see."""

    def encode(self, x):
        return x

    def __call__(self, x):
        return x.dtype, self.encode(x).dtype


def traced_dtypes(model, *inputs, method=None):
    """The dtypes that modules sowed, and those of every module's output, by path."""
    variables = model.init(KEY, *inputs)
    state = model.apply(
        variables, *inputs, method=method, mutable=["dtypes", "intermediates"], capture_intermediates=True
    )[1]
    paths = jax.tree_util.tree_leaves_with_path(state)
    return {
        "/".join(k.key for k in path[1:] if hasattr(k, "key")).removesuffix("/__call__"): leaf.dtype
        for path, leaf in paths
    }


def instance():
    return jmp.with_policy(Net(), MIXED)


def decorated():
    return jmp.with_policy(Net, MIXED)()


def by_decorator():
    @jmp.with_policy(MIXED)
    class Decorated(Net):
        pass

    return Decorated()


def subclass_of_decorated():
    class Sub(jmp.with_policy(Net, MIXED)):
        def __call__(self, x):
            return super().__call__(x)

    return Sub()


@pytest.mark.slow
@pytest.mark.parametrize("make", [instance, decorated, by_decorator, subclass_of_decorated])
def test_everything_inside_computes_in_compute_dtype(make):
    dtypes = traced_dtypes(make(), X)
    outer = dtypes.pop("__call__", None)
    assert outer in (BF16, F32)  # captured inside of the boundary, or outside of it
    assert {"encode", "encoder", "encoder/up", "encoder/down", "scale", "scale/scale", "head"} <= dtypes.keys()
    assert set(dtypes.values()) == {BF16}
    assert make().apply(make().init(KEY, X), X).dtype == F32


@pytest.mark.slow
def test_original_stays_as_it_is():
    original = Net()
    policied = jmp.with_policy(original, MIXED)
    assert type(original) is Net
    assert jmp.policy_of(original) is None
    assert jmp.policy_of(policied) is jmp.get_policy(MIXED)
    assert set(traced_dtypes(original, X).values()) == {F32}


def test_names_hash_and_fields_are_those_of_the_module():
    policied = jmp.with_policy(Project(dtype=None), MIXED)
    assert type(policied).__name__ == "Project"
    assert isinstance(policied, Project)
    assert policied == jmp.with_policy(Project(), MIXED)
    assert hash(policied) == hash(jmp.with_policy(Project(), MIXED))
    assert policied.clone(dtype="float16").dtype == "float16"


class Outer(nn.Module):
    policied_in: str

    def setup(self):
        if self.policied_in == "setup":
            self.inner = jmp.with_policy(Project(), MIXED)

    @nn.compact
    def __call__(self, x):
        if self.policied_in == "compact":
            return jmp.with_policy(Project(name="inner"), MIXED)(x)
        return self.inner(x)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["setup", "compact"])
def test_submodule_made_with_a_policy_keeps_names_and_computes_in_it(place):
    model = Outer(place)
    variables = model.init(KEY, X)
    assert set(variables["params"]["inner"]) == {"up", "down"}
    dtypes = traced_dtypes(model, X)
    assert dtypes["inner/up"] == BF16
    assert model.apply(variables, X).dtype == F32


@pytest.mark.slow
def test_submodules_own_policy_wins_over_the_one_around_it():
    model = jmp.with_policy(Outer("setup"), "float16")
    assert traced_dtypes(model, X)["inner/up"] == BF16


@pytest.mark.slow
def test_dtype_that_the_author_wrote_wins():
    class Mixed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, dtype=jnp.float32, name="exact")(nn.Dense(2, name="low")(x))

    dtypes = traced_dtypes(jmp.with_policy(Mixed(), "mixed_bfloat16"), X)
    assert (dtypes["low"], dtypes["exact"]) == (BF16, F32)


@pytest.mark.slow
def test_default_dtype_of_a_field_is_not_taken_for_the_authors():
    class Defaulted(nn.Module):
        dtype: Any = jnp.float32

        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, dtype=self.dtype, name="dense")(x)

    assert traced_dtypes(jmp.with_policy(Defaulted(), "mixed_bfloat16"), X)["dense"] == BF16
    explicit = jmp.with_policy(Defaulted(dtype=jnp.float16), "mixed_bfloat16")
    assert traced_dtypes(explicit, X)["dense"] == jnp.float16


@pytest.mark.slow
def test_fields_are_as_written_when_the_call_is_over():
    class Author(nn.Module):
        def setup(self):
            self.scale = Scale()
            self.dense = nn.Dense(4, param_dtype=jnp.float16)

        def __call__(self, x):
            return self.dense(self.scale(x))

    model = jmp.with_policy(Author(), MIXED)
    bound = model.bind(model.init(KEY, X))
    bound(X)
    assert bound.dense.dtype is None
    assert bound.dense.param_dtype is jnp.float16
    assert "param" not in vars(bound.scale)


@pytest.mark.slow
def test_rule_does_not_narrow_the_inputs_of_a_layer_whose_dtype_its_author_wrote():
    class Exact(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, dtype=jnp.float32, name="exact")(x.astype(jnp.float32) / 3)

    model = jmp.with_policy(Exact(), jmp.PolicyMap({"exact": "p=f32,c=bf16,o=f32"}, "float32"))
    variables = model.init(KEY, X)
    np.testing.assert_array_equal(model.apply(variables, X), Exact().apply(variables, X))


class TestMap:
    @pytest.mark.slow
    def test_rules_by_path_pattern_and_type_hold_inside_what_they_cover(self):
        rules = jmp.PolicyMap({"encoder": "float16", r".*caler?": "float32", nn.Dense: "float32"}, "mixed_bfloat16")
        dtypes = traced_dtypes(jmp.with_policy(Net(), rules), X)
        assert dtypes["encoder/up"] == dtypes["encoder"] == jnp.float16
        assert dtypes["scale"] == dtypes["scale/scale"] == F32
        assert dtypes["head"] == F32

    @pytest.mark.slow
    def test_rule_reaches_a_layer_whose_dtype_came_down_from_a_policied_module(self):
        rules = jmp.PolicyMap({"encoder/down": "float32"}, "mixed_bfloat16")
        dtypes = traced_dtypes(jmp.with_policy(Net(), rules), X)
        assert (dtypes["encoder/up"], dtypes["encoder/down"]) == (BF16, F32)

    @pytest.mark.slow
    def test_matched_module_casts_inputs_and_outputs_and_others_leave_them_alone(self):
        class Probe(nn.Module):
            @nn.compact
            def __call__(self, x, context):
                self.sow("dtypes", "inputs", [jnp.zeros((), x.dtype), jnp.zeros((), context["y"].dtype)])
                return x

        class Two(nn.Module):
            @nn.compact
            def __call__(self, x):
                wide = x.astype(jnp.float32)
                return Probe(name="ruled")(wide, context={"y": wide}), Probe(name="free")(wide, context={"y": wide})

        model = jmp.with_policy(Two(), jmp.PolicyMap({"ruled": "p=f32,c=f16,o=f32"}, "p=f32,c=bf16,o=none"))
        out, state = model.apply({}, X, mutable=["dtypes"])
        assert [x.dtype for x in out] == [F32, F32]
        dtypes = jax.tree.map(lambda x: str(x.dtype), state["dtypes"])
        assert dtypes["ruled"]["inputs"] == (["float16", "float16"],)
        assert dtypes["free"]["inputs"] == (["float32", "float32"],)

    @pytest.mark.slow
    def test_rule_that_matches_nothing_is_named_with_the_closest_path(self):
        model = jmp.with_policy(Net(), jmp.PolicyMap({"haed": "float32"}, "mixed_bfloat16"))
        with pytest.warns(UserWarning, match=r"policy rule 'haed' matches no module; the closest path is 'head'"):
            model.init(KEY, X)

    @pytest.mark.slow
    def test_hidden_rule_is_named_with_the_one_that_hides_it(self):
        model = jmp.with_policy(Net(), jmp.PolicyMap({"encoder": "float16", "encoder/up": "float32"}, "mixed_bfloat16"))
        with pytest.warns(UserWarning, match=r"policy rule 'encoder/up' decides nothing: the earlier rule 'encoder'"):
            model.init(KEY, X)

    @pytest.mark.slow
    def test_open_dtype_of_a_rule_is_that_of_the_inputs(self):
        model = jmp.with_policy(Net(), jmp.PolicyMap({"head": "infer"}, "infer"))
        variables = model.init(KEY, X)
        assert model.apply(variables, X.astype(jnp.float16)).dtype == jnp.float16
        assert model.apply(variables, X).dtype == F32


class TestMethods:
    ways = pytest.mark.parametrize(
        "method",
        ["encode", Net.encode, lambda m, x: m.encode(x), Net().encode, lambda m, x: m.scale(m.encoder(x))],
        ids=["by name", "unbound", "function", "bound to the original", "function of submodules"],
    )

    @pytest.mark.slow
    @ways
    def test_no_way_to_name_a_method_runs_without_the_policy(self, method):
        model = instance()
        variables = model.init(KEY, X)
        out = model.apply(variables, X, method=method)
        assert out.dtype == F32
        np.testing.assert_array_equal(out, out.astype(jnp.bfloat16).astype(jnp.float32))

    def test_methods_that_call_each_other_cast_once(self):
        model = jmp.with_policy(Chain(), "p=f32,c=bf16,o=f16")
        assert model.apply({}, X) == (BF16, BF16)
        assert model.apply({}, X, method="encode").dtype == jnp.float16

    def test_methods_of_a_matched_module_that_call_each_other_cast_once(self):
        class Outer(nn.Module):
            @nn.compact
            def __call__(self, x):
                chain = Chain(name="chain")
                return chain(x), chain.encode(x).dtype

        model = jmp.with_policy(Outer(), jmp.PolicyMap({"chain": "p=f32,c=bf16,o=f16"}, "float32"))
        assert model.apply({}, X) == ((BF16, BF16), jnp.float16)

    @pytest.mark.slow
    def test_bound_module_runs_with_the_policy(self):
        model = instance()
        bound = model.bind(model.init(KEY, X))
        assert bound(X).dtype == F32
        np.testing.assert_array_equal(bound.encode(X), model.apply(bound.variables, X, method="encode"))

    @pytest.mark.slow
    def test_private_and_nowrap_methods_run_inside(self):
        class Helpers(nn.Module):
            def setup(self):
                self.dense = nn.Dense(4)

            def _hidden(self, x):
                return self.dense(x)

            @nn.nowrap
            def width(self):
                return 4

            def __call__(self, x):
                return self._hidden(x) * self.width()

        assert traced_dtypes(jmp.with_policy(Helpers(), MIXED), X)["dense"] == BF16

    @pytest.mark.slow
    def test_method_that_a_subclass_adds_to_a_decorated_class_is_a_boundary(self):
        class Sub(jmp.with_policy(Net, MIXED)):
            def score(self, x):
                return self.encode(x) + x

        model = Sub()
        out = model.bind(model.init(KEY, X)).score(X)
        assert out.dtype == F32
        np.testing.assert_array_equal(out, out.astype(jnp.bfloat16).astype(jnp.float32))


class Table(nn.Module):
    """Its parameter is made in setup, and read by the module around it."""

    def setup(self):
        self.weights = self.param("weights", nn.initializers.normal(), (4,))

    def _product(self, x):
        return x * self.weights

    def __call__(self, x):
        return self._product(x)


class TestOwnPolicyOfASubmodule:
    """A policied module inside another: whatever is asked of it, it answers under its own policy."""

    @pytest.mark.slow
    @pytest.mark.parametrize("ask", [lambda t, x: t.weights, lambda t, x: t._product(x), lambda t, x: t(x)])
    def test_holds_for_setup_and_private_methods_too(self, ask):
        class Reader(nn.Module):
            def setup(self):
                self.table = jmp.with_policy(Table(), "p=bf16,c=f16,o=f16")

            def __call__(self, x):
                return ask(self.table, x.astype(jnp.float16)).dtype

        for model in (Reader(), jmp.with_policy(Reader(), "float32")):
            dtype, variables = model.init_with_output(KEY, X)
            assert variables["params"]["table"]["weights"].dtype == BF16
            assert dtype == jnp.float16


class TestKeep:
    def test_named_argument_enters_uncast(self):
        class Timestep(nn.Module):
            @nn.compact
            def __call__(self, x, t):
                return str(x.dtype), str(t.dtype)

        model = jmp.with_policy(Timestep(), MIXED, no_cast=["t"])
        assert model.apply({}, X, X) == model.apply({}, X, t=X) == ("bfloat16", "float32")

    def test_name_of_no_argument_is_an_error(self):
        with pytest.raises(ValueError, match=r"no_cast names 'timestep', but Net.__call__ has no such argument"):
            jmp.with_policy(Net(), MIXED, no_cast=["timestep"])


class TestJit:
    @pytest.mark.slow
    def test_one_jitted_apply_computes_with_each_models_policy(self):
        apply = jax.jit(lambda model, v, x: model.apply(v, x), static_argnums=0)
        variables = Net().init(KEY, X)
        outs = [apply(jmp.with_policy(Net(), spec), variables, X) for spec in ("float16", "bfloat16", "float32")]
        assert [out.dtype for out in outs] == [jnp.float16, BF16, F32]

    @pytest.mark.slow
    def test_jitted_submodule_is_traced_for_each_policy(self):
        inner = nn.jit(Project)

        class Jitted(nn.Module):
            @nn.compact
            def __call__(self, x):
                return inner(name="inner")(x)

        variables = Jitted().init(KEY, X)
        for spec in ("float16", "bfloat16", "float32", "float16"):
            assert jmp.with_policy(Jitted(), spec).apply(variables, X).dtype == jnp.dtype(spec)
        assert Jitted().apply(variables, X).dtype == F32

    @pytest.mark.slow
    @pytest.mark.parametrize("rule", ["first", "second", "second/up", ".*/down"])
    def test_jitted_siblings_of_equal_fields_each_have_the_policy_of_their_place(self, rule):
        inner = nn.jit(Project)

        class InCompact(nn.Module):
            @nn.compact
            def __call__(self, x):
                return [inner(name=name)(x).dtype for name in ("first", "second")]

        class InSetup(nn.Module):
            def setup(self):
                self.first, self.second = inner(), inner()

            def __call__(self, x):
                return [self.first(x).dtype, self.second(x).dtype]

        rules = jmp.PolicyMap({rule: "float16"}, "p=f32,c=bf16,o=none")
        expected = [jmp.PolicyMap.resolve(rules, f"{name}/down").compute_dtype for name in ("first", "second")]
        for model in (jmp.with_policy(InCompact(), rules), jmp.with_policy(InSetup(), rules)):
            out, variables = model.init_with_output(KEY, X)
            assert out == model.apply(variables, X) == expected

    @pytest.mark.slow
    def test_second_call_does_not_trace_again(self):
        model, traces = instance(), []

        @jax.jit
        def apply(variables, x):
            traces.append(1)
            return model.apply(variables, x)

        variables = model.init(KEY, X)
        apply(variables, X)
        apply(variables, X)
        assert len(traces) == 1


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(4)(x), None


class TestTransforms:
    @pytest.mark.slow
    @pytest.mark.parametrize("transform", [nn.remat, nn.jit, nn.checkpoint])
    def test_transformed_submodules_compute_in_compute_dtype(self, transform):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                return transform(Block)(name="block")(x)[0]

        model = jmp.with_policy(Model(), "p=f32,c=bf16,o=bf16")
        variables = model.init(KEY, X)
        plain = Model().init(KEY, X)
        assert jax.tree.structure(plain) == jax.tree.structure(variables)
        grads = jax.grad(lambda v: model.apply(v, X).astype(jnp.float32).sum())(variables)
        assert {g.dtype for g in jax.tree.leaves(grads)} == {F32}
        assert "dot_general" in (text := str(jax.make_jaxpr(model.apply)(variables, X)))
        assert "f32[2,4] = dot_general" not in text

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("policy", "out_dtype"),
        [("mixed_bfloat16", BF16), (jmp.PolicyMap({"blocks": "p=f32,c=bf16,o=f32"}, "p=f32,c=f32,o=none"), F32)],
        ids=["around the scan", "rule for the body"],
    )
    def test_carry_of_a_scan_keeps_its_dtype(self, policy, out_dtype):
        class Stack(nn.Module):
            @nn.compact
            def __call__(self, x):
                blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
                return blocks(name="blocks")(x, None)[0]

        model = jmp.with_policy(Stack(), policy)
        variables = model.init(KEY, X)
        assert variables["params"]["blocks"]["Dense_0"]["kernel"].shape == (3, 4, 4)
        assert model.apply(variables, X).dtype == out_dtype

    @pytest.mark.slow
    def test_vmapped_submodule(self):
        class Ensemble(nn.Module):
            @nn.compact
            def __call__(self, x):
                lifted = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
                members = nn.vmap(nn.Dense, **lifted, in_axes=None, axis_size=2)
                return members(3, name="members")(x)

        model = jmp.with_policy(Ensemble(), "mixed_bfloat16")
        assert model.apply(model.init(KEY, X), X).dtype == BF16


@pytest.mark.slow
def test_normalized_weights_are_left_to_the_layer_they_wrap():
    class Normalized(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.WeightNorm(nn.Dense(4), name="norm")(x)

    model = jmp.with_policy(Normalized(), "mixed_bfloat16")
    variables = model.init(KEY, X)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {F32}
    assert model.apply(variables, X).dtype == BF16


@pytest.mark.slow
def test_running_statistics_and_counters_are_never_narrowed():
    class Stateful(nn.Module):
        @nn.compact
        def __call__(self, x):
            count = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.float32))
            if not self.is_initializing():
                count.value += 1
            return nn.BatchNorm(use_running_average=False)(x)

    model = jmp.with_policy(Stateful(), "bfloat16")
    with jax.numpy_dtype_promotion("standard"):  # a norm with dtype=bfloat16 promotes its own float32 statistics
        variables = model.init(KEY, X)
        _, updated = model.apply(variables, X, mutable=["batch_stats", "counters"])
    assert {leaf.dtype for leaf in jax.tree.leaves(updated)} == {F32}
    assert {leaf.dtype for leaf in jax.tree.leaves(variables["params"])} == {BF16}


@pytest.mark.slow
@pytest.mark.usefixtures("no_default_precision")
def test_matmuls_run_at_the_policys_precision():
    model = jmp.with_policy(nn.Dense(2), "params=float32,precision=highest")
    variables = model.init(KEY, X)
    assert "HIGHEST" in str(jax.make_jaxpr(model.apply)(variables, X))
    assert "HIGHEST" not in str(jax.make_jaxpr(nn.Dense(2).apply)(variables, X))


@pytest.mark.slow
def test_default_policy_is_captured_when_the_policy_is_applied():
    with jmp.use_policy("mixed_bfloat16"):
        model = jmp.with_policy(nn.Dense(2))
    assert model.init_with_output(KEY, X)[0].dtype == BF16
    with jmp.use_policy("mixed_float16"):
        assert model.init_with_output(KEY, X)[0].dtype == BF16


@pytest.mark.slow
def test_applying_a_policy_again_replaces_it():
    model = jmp.with_policy(jmp.with_policy(nn.Dense(2), "float16"), "bfloat16")
    assert model.init_with_output(KEY, X)[0].dtype == BF16
    assert type(model) is type(jmp.with_policy(nn.Dense(2), "bfloat16"))


@jmp.with_policy(MIXED)
class Importable(nn.Module):
    """Found under its name, unlike the class of an instance that was given a policy."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles_keep_the_policy(again):
    for model in (jmp.with_policy(Project(dtype="float16"), MIXED), Importable()):
        assert again(model) == model
        assert jmp.policy_of(again(model)) is jmp.policy_of(model)


@pytest.mark.slow
def test_partitioned_parameters_stay_boxed():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    model = jmp.with_policy(nn.Dense(4, kernel_init=init), "bfloat16")
    kernel = model.init(KEY, X)["params"]["kernel"]
    assert kernel.names == (None, "model")
    assert kernel.value.dtype == BF16


class TestModelsOfOneClass:
    """Instances of one class may hold different modules: what was seen in one says nothing about another."""

    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.jit(nn.Dense)(2, name="project")(x)

    class Mixer(Attention):
        pass

    class Outer(nn.Module):
        kind: Any
        names: tuple[str, ...] = ("block",)

        @nn.compact
        def __call__(self, x):
            return [self.kind(name=name)(x).dtype for name in self.names]

    @pytest.mark.slow
    def test_type_rule_for_one_does_not_reach_the_other(self):
        rules = jmp.PolicyMap({self.Mixer: "float16"}, "p=f32,c=bf16,o=none")
        mixer, attention = (jmp.with_policy(self.Outer(kind), rules) for kind in (self.Mixer, self.Attention))
        assert mixer.init_with_output(KEY, X)[0] == [jnp.float16]
        with pytest.warns(UserWarning, match="policy rule .*Mixer matches no module"):
            assert attention.init_with_output(KEY, X)[0] == [BF16]

    @pytest.mark.slow
    def test_rule_that_matches_nothing_is_named_though_it_matched_in_the_other(self):
        rules = jmp.PolicyMap({"second": "float16"}, "p=f32,c=bf16,o=none")
        jmp.with_policy(self.Outer(self.Mixer, ("first", "second")), rules).init(KEY, X)
        with pytest.warns(UserWarning, match="policy rule 'second' matches no module"):
            jmp.with_policy(self.Outer(self.Mixer, ("first",)), rules).init(KEY, X)

    @pytest.mark.slow
    def test_rule_inside_a_jitted_module_is_not_taken_for_unused_when_its_program_is_found_again(self):
        jitted = nn.jit(Project)

        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                return jitted(name="jitted")(x)

        model = jmp.with_policy(Model(), jmp.PolicyMap({"jitted/up": "float16"}, "p=f32,c=bf16,o=none"))
        variables = model.init(KEY, X)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outs = [model.apply(variables, X) for _ in range(2)]
        assert not caught
        np.testing.assert_array_equal(*outs)
