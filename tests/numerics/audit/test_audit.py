"""The report of an audit: what it counts where, in whatever the operations are nested, and what it says."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax import lax
from planted import bf16, f16, f32, ints

import jmp_policy as jmp
from jmp_policy.numerics import audit

W = f32(8, 8)
MESH = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
SPEC = jax.sharding.PartitionSpec()


@jax.custom_vjp
def custom_vjp(x):
    return jnp.cumsum(x)


custom_vjp.defvjp(lambda x: (jnp.cumsum(x), None), lambda _, g: (g,))


@jax.custom_jvp
def custom_jvp(x):
    return jnp.cumsum(x)


custom_jvp.defjvp(lambda primals, tangents: (custom_jvp(*primals), tangents[0]))

NESTED = {
    "jit": jax.jit(lambda x: jnp.cumsum(x)),
    "while": lambda x: lax.while_loop(lambda c: c[0] < 1, lambda c: jnp.cumsum(c), x),
    "remat": jax.checkpoint(lambda x: jnp.cumsum(x)),
    "vmap": lambda x: jax.vmap(lambda x: jnp.cumsum(x))(x[None]),
    "shard_map": jax.shard_map(lambda x: jnp.cumsum(x), mesh=MESH, in_specs=SPEC, out_specs=SPEC),
    "custom_vjp": custom_vjp,
    "custom_jvp": custom_jvp,
    "jit of scan of cond": jax.jit(
        lambda x: lax.scan(lambda c, _: (lax.cond(c[0] > 0, jnp.cumsum, lambda c: c, c), None), x, None, length=2)[0]
    ),
}


@pytest.mark.parametrize("name", NESTED)
def test_operations_are_found_in_whatever_they_are_nested(name):
    report = audit(jax.named_scope("outside")(NESTED[name]))(bf16(8))
    [finding] = report.findings
    assert (finding.id, finding.path, finding.dtypes) == ("half-cumulative", "outside", ("bfloat16",))
    assert "test_audit.py" in finding.source


def loss(w, x):
    with jax.named_scope("layer"):
        y = x @ w.astype(x.dtype)
    return jnp.sum(y.astype(jnp.float32) ** 2)


def test_forward_and_backward_are_apart():
    report = audit(jax.value_and_grad(loss))(W, bf16(4, 8))
    dots = [row for row in report.rows if row.operation == "dot_general"]
    assert [(row.path, row.backward, row.dtype, row.count) for row in dots] == [
        ("layer", False, "bfloat16", 1),
        ("layer", True, "bfloat16", 1),
    ]
    casts = {row.dtype for row in report.rows if row.operation == "convert_element_type"}
    assert casts == {"float32->bfloat16", "bfloat16->float32"}


def test_nothing_is_run_and_dead_code_and_results_that_are_no_arrays_do_not_count():
    def fun(x):
        jax.debug.callback(lambda: pytest.fail("it ran"))
        jnp.cumsum(x)
        return {"y": x @ x, "name": "net", "none": None}

    assert audit(fun)(f32(10**6, 10**6)).flops == 2 * 10**18


def test_scan_multiplies_and_while_is_counted_once_and_said_so():
    report = audit(lambda x: lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c @ c, x))(f32(8, 8))
    assert [matmul.flops for matmul in report.matmuls] == [2 * 8**3]
    assert len(report.uncounted_loops) == 1
    shown = " ".join(str(report).split())  # as one line
    assert re.search(r"test_audit.py:\d+ .*: the body of this while loop counts once", shown)
    assert audit(lambda x: lax.fori_loop(0, 5, lambda _, c: c @ c, x))(f32(8, 8)).uncounted_loops == ()


def test_second_call_of_a_cached_function_of_jax_has_its_own_line():
    def fun(x):
        x = jnp.where(x > 0, x, -1e9)
        return jnp.where(x < 1, x, 1e9)  # traced by JAX once for both

    lines = [int(re.search(r":(\d+) ", finding.source)[1]) for finding in audit(fun)(f16(3)).findings]
    assert lines == [fun.__code__.co_firstlineno + 1, fun.__code__.co_firstlineno + 2]


def test_shares_of_matmuls_are_of_their_flops():
    report = audit(lambda a, b, c, d: (a @ b, c @ d))(f16(2, 3), f16(3, 4), f32(2, 3), f32(3, 1))
    assert report.matmul_shares == {"float16": 48 / 60, "float32": 12 / 60}
    assert audit(lambda x: x + 1)(f32()).matmul_shares == {}


def test_region_in_full_precision_and_a_program_in_float32_are_meant():
    report = audit(jmp.force_full_precision(lambda x: x @ x))(bf16(8, 8))
    assert report.matmuls[0].dtype == "float32"
    assert report.findings == audit(jax.grad(loss))(W, f32(4, 8)).findings == ()


MIXED = "params=float32,compute=bfloat16,output=float32"


def test_what_autocast_widens_is_no_accident():
    def power(x, y):
        return (x @ x) ** y

    with jax.numpy_dtype_promotion("standard"):
        assert audit(jmp.autocast(power, MIXED))(f32(4, 4), f32(4)).findings == ()
        assert [finding.id for finding in audit(power)(bf16(4, 4), f32(4)).findings] == ["accidental-promotion"]


def test_what_a_loop_counts_in_half_numbers_is_not_made_of_nothing_else():
    def scaled(x):
        last, _ = lax.fori_loop(0, 3, lambda i, counts: (counts[1], jnp.sum(x > i.astype(x.dtype))), (0, 0))
        return x * jnp.log(last.astype(jnp.float32))

    with jax.numpy_dtype_promotion("standard"):
        assert audit(scaled)(bf16(4)).findings == ()


def test_half_psum_of_gradients_in_a_shard_map():
    def step(w, x):
        grads = jax.grad(loss)(w, x)
        return lax.psum(grads.astype(jnp.bfloat16), "data")

    mapped = jax.shard_map(step, mesh=MESH, in_specs=(SPEC, jax.sharding.PartitionSpec("data")), out_specs=SPEC)
    found = [finding for finding in audit(mapped)(W, bf16(4, 8)).findings if not finding.backward]
    assert [finding.id for finding in found] == ["half-all-reduce"]
    assert "of a gradient in bfloat16" in found[0].message


def test_autocast_sums_no_gradient_of_a_weight_in_half():
    """A residual stream forks at each block, and its gradients meet there in half, but those of weights do not."""

    def loss(params, tokens):
        x = params["embed"][tokens] + params["positions"]
        for weight in params["blocks"]:
            x = x + jnp.tanh(x @ weight)
        return jnp.mean((x @ params["embed"].T) ** 2)

    params = {"embed": f32(16, 8), "positions": f32(4, 8), "blocks": [f32(8, 8)] * 3}
    report = audit(jax.grad(jmp.autocast(loss, jmp.Policy("float32", "bfloat16", None))))(params, ints(2, 4))
    report.assert_matmuls_in("bfloat16")
    report.assert_no()
    assert repr(report).startswith(f"<AuditReport: {len(report.rows)} rows, 12 matmuls, 0 findings; print it for")


def test_report_goes_to_json_and_back():
    report = audit(jax.grad(loss))(W, bf16(4, 8))
    plain = report.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["flops"] == report.flops == sum(row["flops"] for row in plain["rows"])
    assert plain["bytes"] == report.bytes
    assert plain["matmuls"][0]["dtypes"] == ["bfloat16"]


def test_text_has_the_tables_and_the_findings(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    report = audit(lambda w, x: jax.nn.log_softmax(x @ w.astype(x.dtype)))(W, bf16(4, 8))
    text = str(report)
    assert re.search(r"^bfloat16 +1 +0 +512 +100.0%$", text, re.MULTILINE)
    assert re.search(r"^ +dot_general +bf16 +forward +1 +512 +256 B$", text, re.MULTILINE)
    assert str(report.findings[0]) in re.sub(r"\n +", " ", text)

    def fun(x):
        for i in range(70):
            with jax.named_scope(f"layer{i}"):
                x = jnp.sin(x) if i else x @ x
        return x

    text = str(audit(fun)(f32(4, 4)))  # without the rows of least work
    assert "10 rows of less work are left out" in text
    assert "layer0 " in text


def test_assertions_of_a_report_name_the_lines_that_they_fail_for():
    report = audit(jax.value_and_grad(loss))(W, bf16(4, 8))
    mixed = audit(lambda w, x: (x @ w.astype(x.dtype), x.astype(w.dtype) @ w, jnp.cumsum(x, 1)))(W, bf16(4, 8))
    for spelling in ("bfloat16", "bf16", jnp.bfloat16, np.dtype(jnp.bfloat16)):
        report.assert_matmuls_in(spelling)
    report.assert_no()
    mixed.assert_no("half-logits", "float16-exp")
    line = r"\n  \S+test_audit.py:\d+ .*: "
    for check, message in [
        (lambda: mixed.assert_matmuls_in("bf16"), rf"1 of 2 matmuls are not in bfloat16:{line}dot_general reads flo.*"),
        (lambda: report.assert_matmuls_in("float16"), r"2 of 2 matmuls are not in float16:\n.*\n.*: backward dot.*"),
        (lambda: audit(jnp.sin)(f32(3)).assert_matmuls_in("bf16"), "neither a matmul nor a convolution, in bfloat.*"),
        (lambda: mixed.assert_no("half-logits", "half-cumulative"), rf"1 finding:{line}half-cumulative: .*"),
        (mixed.assert_no, r"2 findings:\n.*float32-matmul.*\n.*half-cumulative.*"),
    ]:
        with pytest.raises(AssertionError, match=f"{message}$"):
            check()
    with pytest.raises(ValueError, match=r"Unknown finding 'float32-matmuls'. Did you mean 'float32-matmul'\?"):
        report.assert_no("float32-matmuls")
    with pytest.raises(ValueError, match=r"Unknown dtype 'bflaot16'. Did you mean 'bfloat16'\?"):
        report.assert_matmuls_in("bflaot16")


@pytest.mark.parametrize("loop", ["python", "scan"])
def test_six_matmuls_of_one_line_in_a_loop_are_six(loop, monkeypatch):
    def layer(x, w):
        return x @ w, None

    def layers(x, ws):
        if loop == "scan":
            return lax.scan(layer, x, ws)[0].astype(jnp.bfloat16)
        for w in ws:
            x, _ = layer(x, w)
        return x.astype(jnp.bfloat16)

    monkeypatch.setenv("COLUMNS", "120")
    report = audit(layers)(f32(4, 8), f32(6, 8, 8))
    assert [(matmul.count, matmul.flops) for matmul in report.matmuls] == [(6, 6 * 2 * 4 * 8 * 8)]
    assert re.search(r"^float32 +6 +0 +3.07 k +100.0%$", str(report), re.MULTILINE)
    assert " 6 matmuls," in repr(report)
    with pytest.raises(AssertionError, match=r"^6 of 6 matmuls are not in bfloat16:\n.* reads float32, 6 times$"):
        report.assert_matmuls_in("bfloat16")


def test_an_outer_product_is_none_of_the_matmuls():
    """`autocast` leaves the tables of rotary embeddings in float32."""

    def rotate(weights, x, positions, frequencies):
        return (x @ weights) * jnp.cos(jnp.einsum("i,j->ij", positions, frequencies))

    report = audit(jmp.autocast(rotate, "mixed_bfloat16"))(f32(8, 8), f32(4, 8), f32(4), f32(8))
    report.assert_matmuls_in("bfloat16")
    assert [(matmul.dtype, matmul.count) for matmul in report.matmuls] == [("bfloat16", 1)]
    assert {row.dtype for row in report.rows if row.operation == "dot_general"} == {"float32", "bfloat16"}
    outer = audit(lambda x, y: (x[:, None] @ y[None], x.astype(jnp.bfloat16)))(f32(4), f32(5))
    assert (outer.matmuls, outer.findings) == ((), ())


def test_what_is_no_function_is_an_error_that_shows_one():
    linear = nnx.eval_shape(lambda: nnx.Linear(99, 99, rngs=nnx.Rngs(0)))
    for target, message in [
        (3, r"audit takes a function, got 3. For example: audit\(train_step\)\(state, batch\)."),
        (nn.Dense, "audit takes a function, got <class"),
        (nn.Dense(3), r"For example: audit\(model.apply\)\(variables, x\)."),
        (linear, r"\(a Linear\). For example: audit\(lambda model, x: model\(x\)\)"),
    ]:
        with pytest.raises(TypeError, match=message):
            audit(target)


@pytest.mark.slow
def test_what_jax_moves_out_of_a_scan_keeps_the_path_of_its_module():
    """The root of the width of a head does not depend on the carry."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.MultiHeadDotProductAttention(2, name="attention")(x, x), None

    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, x):
            blocks = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
            return blocks(name="block")(x)[0]

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Encoder(name="encoder")(x)

    variables = jax.eval_shape(Net().init, jax.random.key(0), f32(2, 4, 8))
    report = audit(jax.grad(lambda v, x: jnp.mean(Net().apply(v, x))))(variables, f32(2, 4, 8))
    assert {row.path for row in report.rows if row.operation == "sqrt"} == {"encoder/block/attention"}
    assert all(row.path.startswith("encoder") for row in report.rows if row.path)
    # A path that is no module's would be a rule that matches nothing, which warns.
    variables, x = jax.tree.map(lambda v: jnp.full(v.shape, 0.1), variables), jnp.ones((2, 4, 8))
    loss = lambda v, x: jnp.mean(Net().apply(v, x))
    tuning = jmp.numerics.tune(loss, (variables, x), "mixed_float16", tolerance=1e-9, budget=8)
    assert "block/attention" not in tuning.candidates


@pytest.mark.parametrize("index", [3, jnp.array([3])])
def test_the_gradient_of_one_row_is_not_a_sum(index):
    loss = lambda w: jnp.sum(jnp.sin(w.astype(jnp.bfloat16).at[index].get(mode="clip")).astype(jnp.float32))
    assert audit(jax.grad(loss))(f32(8, 4)).findings == ()


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (lambda w, x: (x @ w[0]) * (x @ w[1]), []),
        (lambda w, x: lax.scan(jax.checkpoint(lambda h, w: ((h @ w[0]) * (h @ w[1]), None)), x, w[None])[0], []),
        (lambda w, x: (x @ w[0, :, ::2]) * (x @ w[0, :, 1::2]), []),
        (lambda w, x: (x @ w[0, :, :4]) * (x @ w[0, :, 3:7]), ["half-gradient"]),
        (lambda w, x: (x @ w[0]) * (x @ w[1]) * (x @ w[0]), ["half-gradient"]),
        (lambda w, x: (x @ w[0]) * jnp.einsum("bi,nij->nbj", x, w), ["half-gradient"]),
    ],
    ids=["halves", "halves in a scan", "columns in turn", "columns that overlap", "one half twice", "half and whole"],
)
def test_the_gradient_of_parts_of_a_weight_is_a_sum_only_where_they_overlap(use, expected):
    loss = lambda w, x: jnp.sum(use(w.astype(jnp.float16), x).astype(jnp.float32))
    assert [finding.id for finding in audit(jax.grad(loss))(f32(2, 8, 8), f16(4, 8)).findings] == expected


@pytest.mark.slow
@pytest.mark.cpu("XLA for GPUs adds up these rows in float32")
def test_half_sums_that_are_found_lose_numbers_and_those_that_are_not_do_not():
    """XLA adds scattered rows in their own dtype, where a sum of ones stops at 256; it reduces in float32."""
    looked_up, broadcast = 1024, 1024

    def gradients(row):
        row = row.astype(jnp.bfloat16)
        added = row + jnp.zeros((broadcast, 1), row.dtype)
        return jnp.sum(row[jnp.zeros(looked_up, int)].astype("float32")), jnp.sum(added.astype("float32"))

    by_lookup, by_broadcast = (jax.grad(lambda row, i=i: gradients(row)[i]) for i in range(2))
    assert jax.jit(by_lookup)(jnp.ones(1)) == 256
    assert jax.jit(by_broadcast)(jnp.ones(1)) == broadcast
    assert [finding.id for finding in audit(by_lookup)(f32(1)).findings] == ["half-gradient"]
    assert audit(by_broadcast)(f32(1)).findings == ()


def train_by_hand(tx, loss):
    def step(params, state, x):
        updates, state = tx.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    return step


def train_by_scan(tx, loss):
    step = train_by_hand(tx, loss)
    return lambda params, state, x: lax.scan(lambda c, _: (step(*c, x), None), (params, state), length=3)


@pytest.mark.parametrize(
    ("tx", "train", "keep"),
    [
        (optax.sgd(0.1), train_by_hand, jmp.optim.master_weights),
        (optax.adamw(1e-3), lambda tx, loss: jmp.optim.minimize(loss, tx), jmp.optim.kahan),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3)), train_by_scan, jmp.optim.master_weights),
    ],
    ids=["sgd by hand", "adamw by minimize", "clipped lion by scan"],
)
def test_small_updates_of_half_parameters_are_lost_except_in_optimizers_that_keep_them(tx, train, keep):
    def find(tx, dtype):
        params = {"w": jnp.ones(4, dtype)}
        with jax.numpy_dtype_promotion("standard"):  # as optax needs
            report = audit(train(tx, loss))(params, tx.init(params), f32(4))
        return [finding.dtypes for finding in report.findings if finding.id == "half-update"]

    def loss(params, x):
        return jnp.sum(jnp.tanh(params["w"].astype(jnp.float32) * x))

    assert find(tx, jnp.bfloat16) == [("bfloat16",)]
    assert find(tx, jnp.float32) == find(keep(tx), jnp.bfloat16) == []


def test_what_a_step_changes_in_an_nnx_model_is_audited():
    @nnx.jit
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda model: jnp.sum(model(x)))(model))

    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    report = audit(step)(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), f32(2, 4))
    assert [matmul.backward for matmul in report.matmuls] == [True]  # the loss is not returned: no forward pass


def test_of_a_choice_by_platform_the_branch_of_this_one_counts():
    def choose(x):
        here, elsewhere = lambda x: jnp.sin(x), lambda x: jnp.cos(jnp.float16(x)).astype(jnp.float32)
        return lax.platform_dependent(x, cpu=here, cuda=here, rocm=here, default=elsewhere)

    def count(fun):
        return {row.operation: row.count for row in audit(fun)(f32(4)).rows}

    assert count(choose)["sin"] == 1
    assert "cos" not in count(choose)
    assert "sin" not in count(lambda x: lax.platform_dependent(x, tpu=jnp.sin, default=jnp.cos))


def test_a_step_that_may_be_skipped_counts_once():
    """It has a form for each kind of platform."""
    params = {"w": f32(8, 16)}

    def step_of(tx):
        return lambda params, grads: jmp.optim.step(tx, grads, tx.init(params), params)

    inner = optax.contrib.muon(1e-2)
    with jax.numpy_dtype_promotion("standard"):  # of optax's own
        skipping, plain = (audit(step_of(tx))(params, params) for tx in (jmp.optim.skip_nonfinite(inner), inner))
    assert sum(row.count for row in skipping.matmuls) == sum(row.count for row in plain.matmuls) > 0


@pytest.mark.parametrize(
    ("fun", "found", "detail"),
    [
        (lambda x, w: x * np.float64(1.5), "accidental-promotion", "float32 becomes float64 through a constant"),
        (lambda x, w: x + w, "accidental-promotion", "float32 becomes float64 through a parameter or argument"),
        (lambda x, w: x.astype("float64").astype("float32"), "round-trip-cast", "from float32 to float64 and back"),
        (lambda x, w: x + jnp.full(3, -1e300).astype("float32"), "infinite-constant", r"-1e\+300 in float32"),
        (lambda x, w: jax.nn.softmax(2.0 * x) + jnp.var(x), None, ""),
        (lambda x, w: x.astype("float64") + w, None, ""),
    ],
)
def test_float32_beside_float64_is_as_half_precision_beside_float32(fun, found, detail):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        findings = audit(fun)(jnp.ones(3, "float32"), jnp.ones(3, "float64")).findings
    assert [finding.id for finding in findings] == [found] * bool(found)
    assert all(re.search(rf"\({detail}\)", str(finding)) for finding in findings)
