"""Law 11: what stands for a policy, and when the default is read."""

import asyncio
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_policy as jmp
from jmp_policy.policy._get_policy import is_policy_spec


@pytest.fixture
def restored_default():
    before = jmp.default_policy()
    yield
    jmp.set_default_policy(before)


class Carrier:
    """A policy of another library."""

    def __jmp_policy__(self):
        return "mixed_bfloat16"


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("bf16", "bfloat16"),
        (jnp.bfloat16, "bfloat16"),
        (np.float16, "float16"),
        (np.dtype("float64"), "float64"),
        (Carrier(), "mixed_bfloat16"),
        (None, "float32"),
        ("mixed_float16", "mixed_float16"),
        (jmp.get_policy("mixed_float16").get_config(), "mixed_float16"),
    ],
)
def test_everything_that_stands_for_a_policy_is_read(spec, name):
    assert is_policy_spec(spec)
    assert jmp.get_policy(spec).name == name
    assert jmp.get_policy(jmp.get_policy(spec)) is jmp.get_policy(spec)


@pytest.mark.parametrize("spec", [3, 1.5, object(), lambda x: x, float, [], np.ones(2), jnp.sin, dict])
def test_anything_else_is_an_error_that_shows_a_policy(spec):
    assert not is_policy_spec(spec)
    with pytest.raises(
        ValueError, match=r" is not a policy or a floating dtype\. For example: .* 'mixed_bfloat16'\)\.$"
    ):
        jmp.get_policy(spec)


@pytest.mark.parametrize("rules", [{"head": "float32"}, {dict: "float32"}], ids=["path", "type"])
def test_the_config_of_a_map_is_read_with_the_default_filled_in(rules):
    with jmp.use_policy("bfloat16"):
        assert jmp.get_policy(jmp.PolicyMap(rules).get_config()) == jmp.PolicyMap(rules, "bfloat16")


@pytest.mark.parametrize("spec", [{}, {"head": "float32"}])
def test_a_mapping_that_is_no_config_is_an_error_that_names_maps(spec):
    assert not is_policy_spec(spec)
    with pytest.raises(ValueError, match=r"is not the config of a policy or map\. For rules .*: PolicyMap\({'head'"):
        jmp.get_policy(spec)


def test_a_misspelt_string_is_a_policy_spec_so_that_its_error_is_that_of_a_policy():
    assert is_policy_spec("bflaot16")
    with pytest.raises(ValueError, match=r"^Unknown dtype or policy 'bflaot16'"):
        jmp.with_policy("bflaot16")


def _fails_under(name):
    assert jmp.default_policy().name == name
    raise KeyError


def test_use_policy_is_scoped_nests_and_is_undone_by_an_error():
    with jmp.use_policy("bfloat16"):
        with pytest.raises(KeyError), jmp.use_policy("mixed_float16"):
            _fails_under("mixed_float16")
        assert jmp.default_policy().name == "bfloat16"
    assert jmp.default_policy().name == "float32"


def test_use_policy_holds_in_its_own_thread_and_the_default_in_every_thread(restored_default):
    jmp.set_default_policy("float16")
    inside, seen = threading.Barrier(3), {}

    def run(name):
        with jmp.use_policy(name):
            inside.wait(timeout=10)  # all threads are in their scopes now
            seen[name] = jmp.default_policy().name
        seen[name + ", after"] = jmp.default_policy().name

    threads = [threading.Thread(target=run, args=(name,)) for name in ("bfloat16", "float64")]
    for thread in threads:
        thread.start()
    inside.wait(timeout=10)
    for thread in threads:
        thread.join()
    assert seen == {
        "bfloat16": "bfloat16",
        "bfloat16, after": "float16",
        "float64": "float64",
        "float64, after": "float16",
    }
    assert jmp.default_policy().name == "float16"


def test_default_is_captured_where_a_policy_is_applied(restored_default):
    jmp.set_default_policy("bfloat16")
    applied = jmp.with_policy(lambda x: x)
    decorator = jmp.with_policy(None)
    jmp.set_default_policy("float16")
    decorated = decorator(lambda x: x)
    with jmp.use_policy("float16"):
        assert applied(jnp.ones(2)).dtype == jnp.bfloat16
        assert decorated(jnp.ones(2)).dtype == jnp.bfloat16
    assert jmp.policy_of(applied).name == "bfloat16"


def test_a_jitted_function_that_reads_the_default_is_never_stale(restored_default):
    read = jax.jit(lambda x: jmp.get_policy(None).cast_to_compute(x))
    x = jnp.ones(2)
    seen = [read(x).dtype]
    with jmp.use_policy("bfloat16"):
        seen.append(read(x).dtype)
    jmp.set_default_policy("float16")
    seen += [read(x).dtype]
    with jmp.use_policy("bfloat16"):
        seen.append(read(x).dtype)
    assert seen == [jnp.float32, jnp.bfloat16, jnp.float16, jnp.bfloat16]


def test_entering_the_same_policy_again_does_not_trace_again():
    traces = []

    @jax.jit
    def f(x):
        traces.append(x)
        return x

    for _ in range(3):
        with jmp.use_policy("mixed_bfloat16"):
            f(jnp.ones(2))
        with jmp.use_policy(jmp.Policy("float32", "bf16", jnp.bfloat16)):
            f(jnp.ones(2))
    assert len(traces) == 1


def test_a_default_that_another_thread_sets_is_no_error(restored_default):
    is_done, interval = threading.Event(), sys.getswitchinterval()

    def set_defaults():
        while not is_done.is_set():
            jmp.set_default_policy("bfloat16")
            jmp.set_default_policy("float32")

    setter = threading.Thread(target=set_defaults)
    sys.setswitchinterval(1e-6)
    setter.start()
    try:
        assert {jmp.default_policy().name for _ in range(20_000)} == {"bfloat16", "float32"}
    finally:
        sys.setswitchinterval(interval)
        is_done.set()
        setter.join()


@pytest.mark.parametrize("setter", [jmp.set_default_policy, jmp.use_policy])
def test_a_bad_default_is_refused_when_it_is_set(setter):
    with pytest.raises(ValueError, match=r"^Unknown dtype or policy 'nope'"):
        setter("nope")
    assert jmp.default_policy().name == "float32"


class Endless:
    def __jmp_policy__(self):
        return self


def test_a_policy_that_stands_for_itself_is_an_error_that_says_so():
    with pytest.raises(ValueError, match=r"^__jmp_policy__\(\) of <.*Endless object.* returns the object itself\."):
        jmp.get_policy(Endless())


@pytest.mark.parametrize("count", [2, 3, 2000])
def test_a_policy_that_is_quantized_many_times_is_an_error_that_says_so(count):
    text = "int8_from_" * count + "f32"
    with pytest.raises(ValueError, match=r"^'int8_from_.*f32' is quantized already in policy 'int8_from_int8.*f32'\. "):
        jmp.get_policy(text)


LONG = "x" * 100_000
LONG_SPECS = [
    LONG, f"c={LONG}", f"{LONG}=f32", f"mixed_{LONG}", f"{LONG}_with_float32_vars", f"int8 {LONG}",
    f"int8_from_{LONG}", f"{LONG}_from_bf16", f"int8({LONG}=1)_from_bf16", f"int8(min_size={LONG})_from_bf16",
    f"float8(recipe={LONG})_from_bf16", f"c=f32,precision={LONG}", "c=f32," * 10_000, "int8_from_" * 10_000,
    {LONG: 1}, [LONG], {"rules": [{LONG: "f32"}], "default": None},
    {"rules": [[{"type": LONG}, "float32"]], "default": None},
]  # fmt: skip


@pytest.mark.parametrize(
    "spec",
    [
        "int8" + " " * 50_000 + "x_from_bf16", "gptq" + " " * 50_000 + "x_from_bf16", " " * 50_000 + "x",
        "int4/" + " " * 50_000 + "x(y_from_bf16", "int8_from_" + " " * 50_000 + "x", "int8(" * 20_000 + "_from_bf16",
        "p=" + " " * 50_000 + "x",
    ],
    ids=lambda spec: " ".join(spec.split())[:20],
)  # fmt: skip
def test_a_string_of_many_spaces_is_refused_at_once(spec):
    start = time.thread_time()
    with pytest.raises(ValueError, match=r"^(Unknown|In policy|'x\(y')"):
        jmp.get_policy(spec)
    assert time.thread_time() - start < 5  # 0.01, and minutes with a pattern that backtracks


@pytest.mark.parametrize("spec", LONG_SPECS, ids=range(len(LONG_SPECS)))
def test_an_error_does_not_repeat_a_long_input(spec):
    with pytest.raises((ValueError, TypeError)) as raised:
        jmp.get_policy(spec)
    assert "... " in str(raised.value)
    assert len(str(raised.value)) < 3000


@pytest.mark.parametrize(
    "make",
    [
        lambda: jmp.Policy(LONG, None, None),
        lambda: jmp.Policy(None, None, None, precision=LONG),
        lambda: jmp.Policy(None, None, None).replace(**{LONG: 1}),
        lambda: jmp.PolicyMap({"head": LONG}),
        lambda: jmp.PolicyMap({f"{LONG}(": "float32"}),
        lambda: jmp.PolicyMap([LONG]),
        lambda: jmp.quant.Int8(min_size=LONG),
        lambda: jmp.quant.Int8(activations=LONG),
        lambda: jmp.quant.Float8(recipe=LONG),
        lambda: jmp.StaticLossScale(LONG),
        lambda: jmp.DynamicLossScale(period=LONG),
        lambda: jmp.cast_floating(1.0, LONG),
    ],
)
def test_no_constructor_repeats_a_long_input_either(make):
    with pytest.raises((ValueError, TypeError)) as raised:
        make()
    assert len(str(raised.value)) < 3000


def test_use_policy_of_one_asyncio_task_is_an_error_in_another_and_leaves_no_default_behind():
    async def hold():
        with jmp.use_policy("mixed_bfloat16"):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert jmp.default_policy().name == "mixed_bfloat16"

    async def interleave():
        message = r"The default policy is Policy.* which another asyncio task .* by use_policy.*jmp\.with_policy"
        with pytest.raises(RuntimeError, match=message):
            jmp.default_policy()
        with pytest.raises(RuntimeError, match=message), jmp.use_policy("float16"):
            await asyncio.sleep(0)

    async def run():
        await asyncio.gather(hold(), interleave())

    before = jmp.default_policy()
    asyncio.run(run())
    assert jmp.default_policy() is before


def test_asyncio_tasks_inside_use_policy_have_its_policy():
    async def nest():
        assert jmp.default_policy().name == "mixed_bfloat16"
        with jmp.use_policy("float16"):
            assert jmp.default_policy().name == "float16"
        return await asyncio.to_thread(lambda: jmp.default_policy().name)

    with jmp.use_policy("mixed_bfloat16"):
        assert asyncio.run(nest()) == "float32"  # in another thread: the default of the process
