"""Autocast with float64 as the full dtype: of a policy with it, of rules by scope, forward and backward."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from programs import walk

import jmp_policy as jmp
from jmp_policy import PolicyMap, autocast

MIXED = "params=float64,compute=float32,output=float64"
HALF = "params=float64,compute=bfloat16,output=float64"


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def model(w, x):
    """A scope for each kind of operation: low, following, full, in a loop, in linear algebra."""
    with jax.named_scope("dense"):
        h = jnp.tanh(x @ w + 1.0)
    with jax.named_scope("soft"):
        s = jax.nn.softmax(h @ w)
    with jax.named_scope("loop"):
        c, _ = lax.scan(lambda c, _: (c + 0.1 * jnp.tanh(c @ w), None), s, length=3)
    with jax.named_scope("solve"):
        y = jnp.linalg.solve(w @ w.T + 8 * jnp.eye(len(w), dtype=w.dtype), c.T)
    with jax.named_scope("norm"):
        n = (y - y.mean()) / jnp.sqrt(jnp.var(y) + 1e-12)
    with jax.named_scope("loss"):
        return jnp.sum(jnp.exp(n) * 1e-3)


def draw():
    rng = np.random.default_rng()
    return rng.normal(size=(8, 8)) / 3, rng.normal(size=(4, 8))


def list_dtypes(policy, fun=model):
    """Returns the dtypes of operations in each scope."""
    w, x = draw()
    rows = jmp.numerics.audit(autocast(fun, policy))(w, x).rows
    return {(row.path, row.operation): row.dtype for row in rows if row.operation != "convert_element_type"}


@pytest.mark.parametrize(("policy", "low"), [(MIXED, "float32"), (HALF, "bfloat16")])
def test_matmuls_are_in_the_compute_dtype_and_full_operations_in_float64(policy, low):
    found = list_dtypes(policy)
    lows = ("dense", "dot_general"), ("dense", "tanh"), ("soft", "dot_general"), ("loop", "dot_general")
    assert {found[key] for key in lows} == {low}
    full = [("soft", "exp"), ("loop", "add"), ("solve", "lu"), ("norm", "reduce_sum"), ("loss", "exp")]
    assert {found[key] for key in full} == {"float64"}


FURTHER = ("vmap", "grad of autocast", "remat", "jvp")


@pytest.mark.parametrize("policy", [MIXED, HALF])
@pytest.mark.parametrize("transform", ["jit", "grad", *(pytest.param(t, marks=pytest.mark.slow) for t in FURTHER)])
def test_errors_are_those_of_the_compute_dtype(policy, transform):
    w, x = draw()
    cast = autocast(model, policy)
    transforms = {
        "jit": (jax.jit(cast), model),
        "vmap": (*(jax.vmap(lambda v, x=x, f=f: f(v, x)) for f in (cast, model)),),
        "grad": (jax.grad(cast), jax.grad(model)),
        "grad of autocast": (autocast(jax.grad(model), policy), jax.grad(model)),
        "remat": (jax.grad(jax.checkpoint(cast)), jax.grad(model)),
        "jvp": (*(lambda w, x, f=f: jax.jvp(f, (w, x), (w, x)) for f in (cast, model)),),
    }
    ours, exact = transforms[transform]
    args = (np.stack([w, 2 * w]),) if transform == "vmap" else (w, x)
    got, wanted = ours(*args), exact(*args)
    # A few thousand roundings of the compute dtype at most, and at least one: float64 throughout would show none.
    eps = float(jnp.finfo(jmp.get_policy(policy).compute_dtype).eps)
    pairs = [*zip(*map(jax.tree.leaves, (got, wanted)), strict=True)]
    errors = [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs]
    assert all(a.dtype == jnp.float64 for a, _ in pairs)
    assert 1e-4 * eps < max(errors) < 4096 * eps


@pytest.mark.parametrize("full", ["float64", "params=float64,compute=float64,output=none"])
def test_a_policy_that_computes_in_float64_changes_nothing(full):
    w, x = draw()
    cast, plain = (jax.make_jaxpr(jax.value_and_grad(f))(w, x) for f in (autocast(model, full), model))
    assert str(cast) == str(plain)


def test_scopes_by_map():
    found = list_dtypes(PolicyMap({"soft": "float64", "solve": "float32"}, MIXED))
    assert found["soft", "dot_general"] == "float64"
    assert found["dense", "dot_general"] == "float32"
    # A rule whose own parameters are float32 has float32 as its full dtype.
    assert {dtype for (path, _), dtype in found.items() if path == "solve" and "float" in dtype} == {"float32"}
    assert found["loss", "exp"] == "float64"
    found = list_dtypes(PolicyMap({"solve": "float64"}, "float32"))
    assert {found[key] for key in [("dense", "dot_general"), ("soft", "exp"), ("loss", "exp")]} == {"float32"}
    assert found["solve", "lu"] == "float64"
    found = list_dtypes(PolicyMap({"soft": "bfloat16"}, "float64"))
    assert (found["soft", "dot_general"], found["soft", "exp"]) == ("bfloat16", "float32")


@pytest.mark.parametrize(
    ("inside", "outside", "dtype"), [(HALF, "mixed_bfloat16", "float64"), ("mixed_bfloat16", HALF, "float32")]
)
def test_a_softmax_runs_in_the_full_dtype_of_its_rule(inside, outside, dtype):
    assert list_dtypes(PolicyMap({"soft": inside}, outside))["soft", "exp"] == dtype


@pytest.mark.parametrize("rule", ["float64", MIXED])
def test_the_rule_of_a_scope_widens_a_float32_program(rule):
    """Parameters in float32, a solve in float64, and float32 again where its result is used."""
    w, x = (a.astype(np.float32) for a in draw())
    fun = autocast(lambda w, x: model(w, x).astype(jnp.float32), PolicyMap({"solve": rule}, "float32"))
    found = {(row.path, row.operation): row.dtype for row in jmp.numerics.audit(fun)(w, x).rows}
    assert found["solve", "lu"] == "float64"
    assert found["solve", "dot_general"] == ("float64" if rule == "float64" else "float32")
    assert found["loss", "exp"] == found["norm", "reduce_sum"] == "float32"
    assert jax.grad(fun)(w, x).dtype == jnp.float32


NARROW_KEEP = {
    "carry of a loop": lambda keep, x: lax.fori_loop(0, 2, lambda _, x: keep(x), x),
    "carry of a while": lambda keep, x: lax.while_loop(lambda x: x[0] < 0, keep, keep(x)),
    "branch": lambda keep, x: lax.cond(x[0] > 0, keep, lambda x: x, x),
    "selection": lambda keep, x: jnp.where(x > 0.5, keep(x), x),
    "concatenation": lambda keep, x: jnp.concatenate([keep(x), x]),
    "reshape in jit": lambda keep, x: jax.jit(lambda x: keep(x).reshape(2, -1))(x),
    "update": lambda keep, x: jnp.asarray(x).at[1:3].set(keep(x)[1:3]),
}


@pytest.mark.parametrize("default", ["float32", "params=float32,compute=bfloat16,output=none"])
@pytest.mark.parametrize("move", NARROW_KEEP)
def test_values_of_a_float64_scope_keep_their_digits_where_they_are_only_moved(move, default):
    def keep(x):
        with jax.named_scope("keep"):
            return x * np.float64(1 + 2.0**-40)

    x = 1 + np.random.default_rng().uniform(size=4)
    fun = lambda x: NARROW_KEEP[move](keep, x)
    default = jmp.get_policy(default).replace(output_dtype=None)
    np.testing.assert_array_equal(autocast(fun, PolicyMap({"keep": "float64"}, default))(x), fun(x))


def test_the_default_float32_beside_float64_is_as_the_rule():
    def fun(x):
        with jax.named_scope("keep"):
            y = jnp.cos(x)
        return jnp.tanh(x) * x + y

    for policy in (PolicyMap({"keep": "float64"}, "float32"), PolicyMap({"keep": "float64", "": "float32"}, "float64")):
        found = jax.make_jaxpr(autocast(fun, policy))(np.ones(3))
        assert re.findall(r":(f\d+)\[3\] = (\w+)", str(found))[:3] != []
        dtypes = {name: dtype for dtype, name in re.findall(r":(f\d+)\[3\] = (\w+)", str(found))}
        assert {name: dtypes[name] for name in ("cos", "tanh", "mul", "add")} == {
            "cos": "f64", "tanh": "f32", "mul": "f32", "add": "f32",
        }  # fmt: skip


@pytest.mark.parametrize("policy", ["float32", PolicyMap({".*": "float32"}, "float32"), "mixed_bfloat16"])
def test_a_policy_without_float64_warns_that_it_leaves_float64(policy):
    text = (
        r"each one is in float64, which a policy with float32 .* For example: autocast\(fun, 'params=float64,compute="
    )
    with pytest.warns(UserWarning, match=text):
        found = list_dtypes(policy, lambda w, x: x @ w)
    assert found == {("", "dot_general"): "float64"}


def test_a_float64_function_without_matmuls_is_left_with_a_warning_too():
    x = np.ones(3)
    with pytest.warns(UserWarning, match=r"leaves float64 under 'float32', and all .*: autocast\(fun, PolicyMap\(\{''"):
        jax.eval_shape(autocast(jnp.sin, "float32"), x)
    found = jax.make_jaxpr(autocast(jnp.sin, PolicyMap({"": "float32"}, "float64")))(x)
    assert re.search(r":f32\[3\] = sin", str(found))
    jax.eval_shape(autocast(jnp.sin, "float32"), x.astype(np.float32))  # no warning


def test_a_loop_in_a_float32_scope_keeps_its_float64_state():
    def integrate(x):
        with jax.named_scope("steps"):
            return lax.fori_loop(0, 3, lambda _, x: x + 1e-9 * jnp.sin(x), x)

    found = jax.make_jaxpr(autocast(integrate, PolicyMap({"steps": "float32"}, "float64")))(np.ones(2))
    assert re.search(r":f32\[2\] = sin", str(found))
    assert re.search(r":f64\[2\] = scan|f64\[2\] = scan", str(found))


def test_a_weight_used_twice_sums_its_gradients_in_float64():
    def twice(w, x):
        return jnp.sum(jnp.sin(x @ w) + jnp.cos(x @ w))

    w, x = draw()
    gradient = jax.make_jaxpr(jax.grad(autocast(twice, MIXED)))(w, x)
    sums = [eqn for eqn in gradient.eqns if eqn.primitive.name == "add_any" and eqn.outvars[0].aval.shape == w.shape]
    assert [str(eqn.outvars[0].aval.dtype) for eqn in sums] == ["float64"]


@pytest.mark.parametrize("outside", [False, True])
def test_gradients_of_a_float64_scope_are_summed_in_float64(outside):
    def loss(w, x):
        with jax.named_scope("s"):
            return jnp.sum(jnp.tanh(x @ w) @ w)

    policy = PolicyMap({"s": "float64"}, "params=float32,compute=float32,output=none")
    cast = jax.grad(autocast(loss, policy)) if outside else autocast(jax.grad(loss), policy)
    w, x = draw()
    np.testing.assert_array_equal(cast(w, x), jax.grad(loss)(w, x))


def test_residuals_are_kept_in_the_compute_dtype():
    """A square of a float64 sum of matmuls is computed again in the backward pass, from the float32 operand."""
    big = lambda w, x: jnp.sum(lax.integer_pow(jnp.exp(x @ w), 2) * 2.0)
    sizes = [
        jax.jit(jax.grad(f))
        .lower(np.zeros((8, 512)), np.zeros((256, 8)))
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
        for f in (autocast(big, MIXED), big)
    ]
    assert sizes[0] <= sizes[1]


@pytest.mark.parametrize(("constant", "dtype"), [(1e-50, "float64"), (1.0, "float32"), (1e-9, "float32")])
def test_a_constant_that_float32_would_lose_keeps_an_operation_in_float64(constant, dtype):
    found = list_dtypes(MIXED, lambda w, x: jnp.sum(jnp.tanh((x @ w) * constant)))
    assert found["", "mul"] == dtype


def test_a_mask_of_float64_is_clamped_to_float32():
    w, x = draw()
    masked = lambda w, x: jax.nn.softmax((x @ w) + jnp.where(jnp.arange(8) < 3, 0.0, -1e300))
    out = autocast(masked, MIXED)(w, x)
    np.testing.assert_allclose(out, masked(w, x), atol=1e-5)
    assert np.isfinite(out).all()


def test_what_its_author_wrote_in_float32_stays():
    author = lambda w, x: (x.astype(jnp.float32) @ w.astype(jnp.float32)).astype(jnp.float64) + (x @ w)
    for policy in ("float64", MIXED):
        found = jax.make_jaxpr(autocast(author, policy))(*draw())
        products = re.findall(r":(f\d+)\[4,8\] = dot_general", str(found))
        assert [name.replace("f", "float") for name in products] == [
            "float32",
            "float64" if policy == "float64" else "float32",
        ]


def test_accumulated_sums_are_float32_beside_float64():
    policy = f"{HALF},accumulate=float32"
    w, x = draw()
    out = autocast(lambda w, x: x @ w, policy)(w, x)
    exact = x.astype(jnp.bfloat16).astype(np.float64) @ w.astype(jnp.bfloat16).astype(np.float64)
    bound = 8 * 2.0**-24 * (np.abs(x) @ np.abs(w)) * 1.02  # eight float32 additions of rounded operands
    assert (np.abs(out - exact) <= bound).all()
    assert out.dtype == np.float64


def test_nothing_to_do_is_a_warning():
    w, x = (a.astype(np.float32) for a in draw())
    text = r"casts no matmul to float32: each one is in float32 as it is; .*For example: get_policy\('params=float64,"
    with pytest.warns(UserWarning, match=text):
        jax.eval_shape(autocast(lambda w, x: x @ w, MIXED), w, x)


def test_tune_finds_the_scopes_that_need_float64():
    def fun(w, x):
        with jax.named_scope("features"):
            h = jnp.tanh(x @ w)
        with jax.named_scope("cancel"):  # a difference of two nearly equal products
            d = (h + 1e-6) @ w - h @ w
        with jax.named_scope("scale"):
            return 1e6 * d @ w

    tuning = jmp.tune(fun, draw(), MIXED, tolerance=1e-3)
    assert (tuning.scopes, tuning.kept, tuning.low, tuning.is_met) == (("cancel",), "float64", "float32", True)
    assert tuning.policy_map["cancel"].compute_dtype == np.float64
    assert repr(tuning).startswith("<Tuning: 1 of 4 scopes in float64")


def test_tune_tries_all_operations_in_float32():
    def fun(x):
        with jax.named_scope("cancel"):
            d = (jnp.exp(x) + 1e-6) - jnp.exp(x)
        with jax.named_scope("rest"):
            return jnp.sin(1e6 * d)

    x = draw()[1]
    tuning = jmp.tune(fun, (x,), "float32", tolerance=1e-5)
    assert (tuning.scopes, tuning.kept, tuning.low) == (("cancel",), "float64", "float32")
    assert tuning.policy_map["cancel"] == jmp.Policy("float64", "float64", None)
    all_low = jmp.tune(jnp.sin, (x,), "float32", tolerance=1e-5)
    assert (all_low.scopes, all_low.is_met) == ((), True)
    assert 0 < all_low.error < 2.0**-22
    # The map is one with which float64 arrays are computed in float32.
    error = autocast(jnp.sin, all_low.policy_map)(x) - jnp.sin(x)
    assert 0 < np.abs(error).max() < 2.0**-22
    with pytest.raises(ValueError, match=r"^Nothing to tune: the policy 'float32' computes in float32"):
        jmp.tune(jnp.sin, (x.astype(np.float32),), "float32", tolerance=1e-5)


def test_predict_finds_what_overflows_float32():
    def fun(w, x):
        with jax.named_scope("large"):
            h = (x @ w) * 1e30
        with jax.named_scope("square"):
            return jnp.sum(jnp.tanh(jnp.square(h @ (w * 1e10))))

    w, x = draw()
    _, stats = jmp.numerics.collect(fun, ["float32"], where="all")(w, x)
    prediction = jmp.numerics.predict(stats, MIXED)
    assert prediction.culprits == ("square",)
    reason = prediction.reasons[0]
    assert (reason.what, reason.format, reason.cure) == ("overflow", "float32", "float64")
    assert str(reason).endswith("It needs float64.")
    assert prediction.policy_map["square"].compute_dtype == np.float64
    assert np.isfinite(autocast(fun, prediction.policy_map)(w, x))


def test_diverge_proposes_a_map_of_float64_and_float32():
    w, x = draw()
    found = jmp.contrib.diverge(model, autocast(model, MIXED))(w, x)
    assert found.policy_map(1e-9).default.name == MIXED
    assert {rule.policy.compute_dtype for rule in found.policy_map(1e-9).rules} == {np.dtype(np.float64)}


@pytest.mark.parametrize(
    "policy", [MIXED, *(PolicyMap({"wide": MIXED, "narrow": "float32"}, r) for r in (MIXED, "float32"))]
)
def test_force_full_precision_keeps_float64(policy):
    def fun(w, x):
        with jax.named_scope("narrow"):
            y = jmp.force_full_precision(lambda w, x: jnp.sin(x) @ w)(w, x)
        with jax.named_scope("wide"):
            return jmp.force_full_precision(jnp.cumsum)(y)

    assert {*list_dtypes(policy, fun).values()} == {"float64"}


def test_layers_compute_in_float64_inside_force_full_precision():
    layer = jmp.with_policy(lambda x: x @ x, MIXED)
    found = jax.make_jaxpr(jmp.force_full_precision(layer))(np.ones((2, 2), np.float32))
    assert re.search(r":f64\[2,2\] = dot_general", str(found))


COMPLEX = {
    "FFT of real numbers": lambda x: jnp.fft.irfft(jnp.fft.rfft(x @ x), n=4),
    "eigenvalues": lambda x: jnp.sort(jnp.linalg.eigvals(x + x.T).real),
    "complex matmul": lambda x: jnp.abs(lax.complex(x, x.T) @ lax.complex(x, 0 * x)),
    "complex solve": lambda x: jnp.linalg.solve(lax.complex(x, jnp.eye(4)), lax.complex(x, x)).real,
}


@pytest.mark.parametrize(
    "policy", [MIXED, HALF, PolicyMap({"s": "float32"}, "float64"), PolicyMap({"s": "float64"}, "float32")]
)
@pytest.mark.parametrize("name", COMPLEX)
def test_operations_with_complex_numbers_run_in_the_traced_dtype(name, policy):
    def fun(x):
        with jax.named_scope("s"):
            return COMPLEX[name](x)

    x = np.random.default_rng().normal(size=(4, 4)) / 2
    eps = 2.0**-8 if policy is HALF else 2.0**-23
    scale = np.abs(fun(x)).max() * np.linalg.cond(x)
    np.testing.assert_allclose(jax.jit(autocast(fun, policy))(x), fun(x), atol=64 * eps * scale)


@pytest.mark.filterwarnings("ignore:autocast casts no matmul to float32. each one is in float32 as it is")
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("default", [MIXED, HALF, "float32", "params=float32,compute=bfloat16,output=none"])
def test_a_solver_runs_in_the_full_dtype_inside(default, wide):
    def fun(a, b):
        with jax.named_scope("s"):
            return jax.scipy.sparse.linalg.cg(lambda v: a @ v, b, tol=1e-12, maxiter=40)[0]

    matrix, b = draw()
    a, b = matrix @ matrix.T + 2 * np.eye(8), b[0]
    given = (a, b) if wide else (a.astype(np.float32), b.astype(np.float32))
    exact = np.linalg.solve(*map(np.float64, given))
    default = jmp.get_policy(default).replace(output_dtype=None)
    policy = default if default.full_dtype == np.float64 else PolicyMap({"s": "float64"}, default)
    out = np.float64(autocast(fun, policy)(*given))
    # Float32 arrays lose digits where they enter and leave alone.
    assert np.linalg.norm(out - exact) < (1e-10 if wide else 4 * 2.0**-24) * np.linalg.norm(exact)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32", PolicyMap({"a": "mixed_bfloat16"}, "float32")])
def test_without_float64_solvers_run_as_traced(policy):
    def fun(a, b):
        with jax.named_scope("a"):
            return jax.scipy.sparse.linalg.cg(lambda v: a @ v, b, maxiter=2)[0]

    a, b = (x.astype(np.float32) for x in draw())
    solvers = [
        str([step.eqn.params["jaxprs"] for step in walk(jax.make_jaxpr(each)(a, b[0]).jaxpr) if step.name == "link"
             and "jaxprs" in step.eqn.params])
        for each in (autocast(fun, policy), fun)
    ]  # fmt: skip
    assert solvers[0] == solvers[1] != "[]"
