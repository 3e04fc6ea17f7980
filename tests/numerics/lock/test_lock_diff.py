"""Causes and fixes of differences, and the assertion that there are none."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import jmp_policy as jmp
from jmp_policy.numerics import Lock, assert_locked, lock
from jmp_policy.numerics._lock import UPDATE


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


F32, BF16 = (jax.ShapeDtypeStruct((4, 4), dtype) for dtype in (jnp.float32, jnp.bfloat16))


def explain(before, after, *args, then=None):
    """The causes and fixes of the differences between two functions, by scope and fact."""
    difference = lock(before)(*args).diff(lock(after)(*(then or args)))
    return {(row.path, row.fact): (row.cause, row.fix) for row in difference.rows}


def head(fun):
    """A function of `w` and `x` in the scope `head`."""
    return jax.named_scope("head")(fun)


product = head(lambda w, x: jnp.exp(x @ w["head"]))
WEIGHTS = {"head": F32}
NARROWER = "wrap the code in jmp.force_full_precision, or give its module or scope a float32 rule"
WIDER = "cast the float32 array, parameter or constant that promotes it, or set the dtype of the layer"


def test_the_dtype_of_a_parameter_is_the_cause_in_its_module():
    found = explain(product, product, WEIGHTS, BF16, then=({"head": BF16}, BF16))
    cause = "argument w/head is bfloat16, was float32", "cast the argument back"
    assert [text.startswith(start) for text, start in zip(found["head", "forward matmul"], cause, strict=True)]
    assert found["w/head", "argument"][0] == ""


def test_each_layer_has_the_cause_of_its_own():
    def layers(w, x):
        for name in ("expand", "contract", "contract2"):
            with jax.named_scope(name):
                x = jnp.tanh(x @ w[name])
        return x

    params = dict.fromkeys(("expand", "contract", "contract2"), F32)
    found = explain(layers, layers, params, F32, then=(params | {"expand": BF16, "contract": BF16}, F32))
    causes = {path: cause for (path, fact), (cause, _) in found.items() if fact == "forward matmul"}
    assert causes == {name: f"argument w/{name} is bfloat16, was float32" for name in ("expand", "contract")}


def test_a_moment_of_the_optimizer_is_perhaps_the_cause():
    step = lambda dtype: head(lambda w, mu, x: (jnp.exp(x.astype(dtype)), mu["head"] * 0.5))
    found = explain(step(jnp.float32), step(jnp.float16), WEIGHTS, WEIGHTS, F32, then=(WEIGHTS, {"head": BF16}, F32))
    assert found["head", "forward operation"][0] == "perhaps argument mu/head is bfloat16, was float32"


def test_an_argument_that_is_one_array_is_perhaps_the_cause():
    found = explain(product, product, WEIGHTS, F32, then=(WEIGHTS, BF16))
    assert found["head", "forward matmul"] == (
        "perhaps argument x is bfloat16, was float32",
        "cast the argument back, for example with jmp.cast_floating",
    )


OTHER = "find the operation that was added, removed, or runs in another dtype"
FIXES = {
    "narrower": (lambda x: jnp.exp(x), lambda x: jnp.exp(x.astype(jnp.bfloat16)), "forward operation", NARROWER),
    "wider": (lambda x: jnp.sin(x.astype(jnp.bfloat16)), jnp.sin, "forward operation", WIDER),
    "gone": (lambda x: jnp.exp(x), lambda x: x.astype(jnp.bfloat16), "forward operation", OTHER),
    "another half": (lambda x: jnp.exp(x.astype(jnp.float16)), lambda x: jnp.exp(x.astype(jnp.bfloat16)),
                     "forward operation", "set compute= of the policy, or the dtype of the layer"),
    "sum": (lambda x: x.sum(), lambda x: lax.reduce_sum(x.astype(jnp.bfloat16), (0, 1)), "forward sum", NARROWER),
    "more": (lambda x: x @ x, lambda x: x @ x @ x, "forward matmul", OTHER),
    "result of a matmul": (lambda x: x @ x, lambda x: jnp.matmul(x, x, preferred_element_type=jnp.bfloat16),
                           "forward matmul", "set preferred_element_type= of the matmul, or accumulate= of the policy"),
    "casts both ways": (jnp.sin, lambda x: jnp.sin(x.astype(BF16.dtype).astype(x.dtype)), "forward cast",
                        "remove the casts down and up again"),
    "result": (jnp.sin, lambda x: jnp.sin(x).astype(jnp.bfloat16), "result", "cast what the function returns"),
}  # fmt: skip


@pytest.mark.parametrize("name", FIXES)
def test_a_difference_says_how_to_undo_it(name):
    before, after, fact, fix = FIXES[name]
    [found] = [fix for (_, each), (_, fix) in explain(before, after, F32).items() if each == fact]
    assert found.startswith(fix)


def test_a_precision_is_the_cause_only_where_dtypes_stay():
    one = head(lambda x: x @ x @ x)
    assert explain(one, head(lambda x: jnp.dot(x @ x, x, precision="highest")), F32)["head", "forward matmul"] == (
        "its precision changed",
        "set precision= of the policy or of the call, or jax_default_matmul_precision",
    )
    half = head(lambda x: (x @ x).astype(jnp.bfloat16) @ x.astype(jnp.bfloat16))
    assert explain(one, half, F32)["head", "forward matmul"] == ("", NARROWER)


def test_the_shape_of_an_argument_is_the_cause_of_other_sizes():
    large = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    found = explain(jnp.cumsum, jnp.cumsum, F32, then=(large,))
    shape = "call the function with the shapes of the lock"
    assert found[".", "forward sum"] == ("perhaps argument a has shape 8x4, was shape 4x4", shape)
    assert found["a", "argument"] == ("", shape)


def test_a_scope_of_another_name_is_named():
    found = explain(product, jax.named_scope("tail")(product.__wrapped__), WEIGHTS, F32)
    assert found["head", "forward matmul"] == ("it is in tail now", "restore the old name, or regenerate the lock")
    assert found["tail", "forward matmul"] == ("it was in head", "restore the old name, or regenerate the lock")


def test_blocks_of_another_name_are_named_and_equal_facts_elsewhere_are_not():
    def blocks(name, x):
        for i in range(3):
            with jax.named_scope(f"{name}_{i}"):
                x = jnp.exp(x)
        return x

    found = explain(functools.partial(blocks, "layer"), functools.partial(blocks, "block"), F32)
    assert found["block_[0-2]", "forward operation"][0] == "it was in layer_[0-2]"
    assert found["layer_[0-2]", "forward operation"][0] == "it is in block_[0-2] now"
    one = lambda x: head(jnp.exp)(x) + jax.named_scope("tail")(jnp.sin)(x)
    two = lambda x: head(jnp.sin)(x) + jax.named_scope("tail")(jnp.exp)(x)
    assert {cause for cause, _ in explain(one, two, F32).values()} == {""}


def test_what_is_new_or_gone_is_said_to_be_so():
    deeper = lambda w, x: jax.named_scope("tail")(jnp.tanh)(product(w, x))
    found = explain(product, deeper, WEIGHTS, F32, then=(WEIGHTS | {"tail": F32}, F32))
    assert found["tail", "forward operation"] == (
        "the lock has no facts of tail",
        "regenerate the lock if that is meant",
    )
    assert found["w/tail", "argument"][0] == "the lock has no facts of w/tail"
    assert explain(deeper, product, WEIGHTS, F32)["tail", "forward operation"][0] == "tail has no facts now"
    assert explain(product, lambda w, x: jnp.exp(product(w, x)), WEIGHTS, F32) == {
        (".", "forward operation"): ("the lock has no facts of the root", "regenerate the lock if that is meant")
    }


def test_settings_of_a_scale_are_no_shape():
    def step(scale, x, *, again=False):
        grads = jmp.value_and_grad(lambda x: jnp.sum(x), loss_scale=scale)(x)
        return grads, jnp.exp(jnp.exp(x)) if again else jnp.exp(x)

    scales = [jmp.DynamicLossScale(jnp.float32(8.0), period=period) for period in (10, 20)]
    found = explain(step, functools.partial(step, again=True), scales[0], F32, then=(scales[1], F32))
    assert found["scale", "argument scale"] == ("", "restore the settings of the loss scale")
    assert found[".", "loss scale"] == ("", "restore the settings of the loss scale")
    assert found[".", "forward operation"] == ("", OTHER)


def test_a_change_inside_of_a_remat_is_no_change_of_the_remat():
    def loss(dtype):
        inside = jax.checkpoint(lambda w, x: jnp.sin((x @ w).astype(dtype).astype(jnp.float32)))
        return jax.value_and_grad(head(lambda w, x: inside(w["head"], x).sum()))

    found = explain(loss(jnp.float32), loss(jnp.bfloat16), WEIGHTS, F32)
    assert found["head", "recomputed cast"][0] == "the forward pass of this scope differs"


def test_recomputing_is_a_cause():
    loss = head(lambda w, x: jnp.sin(jnp.tanh(x @ w["head"])).sum())
    found = explain(jax.grad(loss), jax.grad(jax.checkpoint(loss)), WEIGHTS, F32)
    assert found["head", "recomputed operation"][0] == "more is recomputed in the backward pass"


def test_the_backward_pass_follows_the_forward_pass():
    loss = lambda dtype: jax.grad(
        head(lambda w, x: jnp.sum(jnp.tanh(x.astype(dtype) @ w["head"].astype(dtype)).astype(jnp.float32)))
    )
    found = explain(loss(jnp.float32), loss(jnp.bfloat16), WEIGHTS, F32)
    assert found["head", "forward matmul"] == ("", NARROWER)
    assert found["head", "backward matmul"] == (
        "the forward pass of this scope differs",
        "fix the forward pass of this scope first",
    )


def test_a_policy_a_rule_and_a_loss_scale_are_causes():
    make = lambda rules: jmp.with_policy(
        nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 4, rngs=nnx.Rngs(0))), rules
    )
    call = lambda model, x: model(x)
    low = make(jmp.PolicyMap({r"layers/\d": "mixed_bfloat16"}, default="float32"))
    half = make(jmp.PolicyMap({r"layers/\d": "mixed_float16"}, default="float32"))
    found = explain(call, call, low, F32, then=(half, F32))
    cause, fix = found["layers/[0-1]", "forward matmul"]
    old, new = (str(jmp.get_policy(f"mixed_{dtype}")) for dtype in ("bfloat16", "float16"))
    assert cause == rf"rule 'layers/\\d' of the policy is {new}, was {old}"
    assert fix == "change the policy back"
    cast = lambda policy: jmp.autocast(jnp.dot, policy)
    cause, fix = explain(cast("mixed_bfloat16"), cast("mixed_float16"), F32, F32)[".", "forward matmul"]
    assert cause == f"the policy is {new}, was {old}"
    scaled = lambda scale: jmp.value_and_grad(lambda x: jnp.sum(x), loss_scale=jmp.StaticLossScale(scale))
    found = explain(scaled(2.0**15), scaled(2.0**10), F32)
    assert found == {(".", "loss scale"): ("", "restore the settings of the loss scale")}


def test_another_platform_is_the_cause_of_everything():
    locked, now = (lock(jnp.dot, platform=platform)(F32, F32) for platform in ("cpu", "tpu"))
    [row] = locked.diff(now).rows
    assert row.cause == "platform: cpu, now tpu"
    other = lock(lambda x, y: jnp.exp(x @ y), platform="tpu")(F32, F32)
    assert locked.diff(other).rows[0].cause == "platform: cpu, now tpu"
    assert locked.diff(other).rows[1].cause == "perhaps platform: cpu, now tpu"
    assert locked.diff(now).notes == ("platform: cpu, now tpu",)
    older = dataclasses.replace(locked, versions=(("jax", "0.9"),))
    assert f"jax: 0.9, now {jax.__version__}" in older.diff(locked).notes
    assert not older.diff(locked)
    [difference] = older.diff(lock(lambda x, y: x @ y @ y, platform="cpu")(F32, F32)).rows[:1]
    assert difference.cause.startswith(f"perhaps jax {jax.__version__}, was 0.9")


def test_a_difference_is_read_as_lines():
    text = str(lock(lambda x: jnp.exp(x))(F32).diff(lock(lambda x: jnp.exp(x.astype(jnp.bfloat16)))(F32)))
    head, *rows = text.split("\n\n")
    assert head == "3 differences in <lambda>"
    assert rows[1].splitlines()[0].startswith(". | forward operation | ")
    assert rows[1].splitlines()[1:] == [
        "  - exp in float32: 1 time", "  + exp in bfloat16: 1 time", f"  fix: {NARROWER}",
    ]  # fmt: skip


def test_layers_that_differ_alike_are_one_difference():
    def step(dtype, params, x):
        for name, w in sorted(params.items()):
            with jax.named_scope(name):
                x = jnp.tanh(x.astype(dtype) @ w.astype(dtype)).astype(jnp.float32)
        return x

    params = {f"block_{i}": F32 for i in range(12)}
    locked, now = (lock(functools.partial(step, dtype))(params, F32) for dtype in (jnp.float32, jnp.bfloat16))
    assert {row.path for row in locked.diff(now).rows} == {"block_[0-11]"}


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.delenv(UPDATE, raising=False)
    return tmp_path / "locks" / "step.lock"


def test_an_assertion_writes_the_file_only_where_it_is_told_to(path, monkeypatch):
    check = assert_locked(path, jnp.dot, platform="tpu")
    with pytest.raises(AssertionError, match=rf"step\.lock is missing or empty\. Create it: {UPDATE}=1 pytest$"):
        check(F32, F32)
    monkeypatch.setenv(UPDATE, "0")
    with pytest.raises(AssertionError, match="is missing or empty"):
        check(F32, F32)
    monkeypatch.setenv(UPDATE, "1")
    check(F32, F32)
    monkeypatch.delenv(UPDATE)
    check(F32, F32)
    assert_locked(path, jnp.dot)(F32, F32)  # on the platform of the file
    with pytest.raises(AssertionError) as error:
        assert_locked(path, jnp.dot)(F32, BF16)
    first, second, *_, last = str(error.value).splitlines()
    assert first == f"{path} differs."
    assert second == "2 differences in dot"
    assert last == f"If you meant to change it: {UPDATE}=1 pytest"
    assert_locked(path, jnp.dot, update=True)(BF16, BF16)
    assert Lock.load(path).platform == "tpu"
    assert_locked(path, jnp.dot)(BF16, BF16)


def test_a_missing_file_is_named_with_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match=f"^{re.escape(str(tmp_path / 'step.lock'))} is missing or empty"):
        assert_locked("step.lock", jnp.dot, update=False)(F32, F32)


def test_an_empty_file_counts_as_missing(path):
    assert_locked(path, jnp.cumsum, update=True)(F32)
    for text in ("", "\n\n", "\ufeff"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(AssertionError, match=r"step\.lock is missing or empty"):
            assert_locked(path, jnp.cumsum)(F32)
        with pytest.raises(FileNotFoundError, match="The file is empty"):
            Lock.load(path)
        assert_locked(path, jnp.cumsum, update=True)(F32)
        assert_locked(path, jnp.cumsum)(F32)


def test_the_example_of_an_assertion_has_a_path(path):
    with pytest.raises(TypeError) as error:
        assert_locked(path, None)  # pyright: ignore[reportArgumentType]
    example = 'assert_locked("numerics.lock", train_step)(state, batch)'
    assert str(error.value) == f"assert_locked takes a function, got None. For example: {example}."


def test_the_lock_of_another_function_is_noted_and_is_no_difference():
    locked, now = (lock(fun)(F32) for fun in (jnp.sin, jnp.cos))
    assert locked.diff(now).notes == ("function: sin, now cos",)
    difference = locked.diff(dataclasses.replace(locked, function="renamed"))
    assert not difference
    assert str(difference) == "no differences in sin\nfunction: sin, now renamed"


def test_only_locks_are_compared():
    with pytest.raises(TypeError) as error:
        lock(jnp.sin)(F32).diff(3)  # pyright: ignore[reportArgumentType]
    example = "locked.diff(lock(train_step)(state, batch))"
    assert str(error.value) == f"diff takes a Lock, got 3. For example: {example}."


def test_a_damaged_file_fails_and_is_replaced_where_that_is_asked_for(path):
    check = functools.partial(assert_locked, path, jnp.cumsum)
    check(platform="cuda", update=True)(F32)
    path.write_text(path.read_text().replace("float32", "float16"))
    with pytest.raises(ValueError, match="the digest does not match the lines"):
        check()(F32)
    check(update=True)(F32)
    check()(F32)
    assert Lock.load(path).platform == "cuda"


REFUSED = {
    "precious": "is not a lock",
    "format: 2": "update it",
    "platform: cuda\nplatform: tpu": "has platform cuda and tpu. Delete the wrong line, and regenerate it.",
    "platform: rocm": "step.lock is damaged, and has platform 'rocm'. Name the platform to regenerate it.",
    "platform cuda": "step.lock is damaged, and has platform ''. Name the platform to regenerate it.",
    "<<<<<<< HEAD": "is not a lock: it starts with '<<<<<<< HEAD'",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_file_that_may_be_of_somebody_else_is_not_replaced(path, text):
    check = functools.partial(assert_locked, path, jnp.cumsum)
    check(platform="cuda", update=True)(F32)
    header = re.split("[: ]", text)[0]
    lines = path.read_text().splitlines()
    has_header = header in ("format", "platform")
    lines = [text if line.startswith(f"{header}:") else line for line in lines] if has_header else [text]
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=REFUSED[text]):
        check(update=True)(F32)
    assert path.read_text() == "\n".join(lines)
    if "platform" in text:
        check(platform="gpu", update=True)(F32)
        assert Lock.load(path).platform == "cuda"


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_file_that_begins_with_a_merge_conflict_is_regenerated(path, platform):
    check = functools.partial(assert_locked, path, jnp.cumsum)
    check(platform="cuda", update=True)(F32)
    text = path.read_text()
    other = text.replace("platform: cuda", f"platform: {platform}")
    path.write_text(f"<<<<<<< HEAD\n{text}=======\n{other}>>>>>>> branch\n")
    with pytest.raises(ValueError, match=r"step\.lock has a merge conflict\. Regenerate it\. For example: "):
        check()(F32)
    if platform != "cuda":
        with pytest.raises(ValueError, match="has platform cuda and tpu"):
            check(update=True)(F32)
    check(update=True, platform=None if platform == "cuda" else "cuda")(F32)
    assert path.read_text() == text


def test_a_compiled_file_is_compared_with_a_compiled_program(path):
    assert_locked(path, jnp.cumsum, compiled=True, update=True)(F32)
    assert_locked(path, jnp.cumsum)(F32)
    with pytest.raises(AssertionError, match=r"cause: perhaps compiled for: .*, now nothing"):
        assert_locked(path, jnp.cumsum, compiled=False)(F32)


def test_a_function_that_returns_nothing_warns():
    with pytest.warns(UserWarning, match="lock found no floating-point operation or result in <lambda>"):
        lock(lambda x: None)(F32)


def test_a_lock_that_would_check_nothing_is_not_written(path):
    with (
        pytest.warns(UserWarning, match="lock found no floating-point"),
        pytest.raises(
            ValueError, match=r"lock of <lambda> was not written: it has no floating-point operation or result"
        ),
    ):
        assert_locked(path, lambda x: None, update=True)(F32)
    assert not path.exists()
