"""Law 11: what stands for a policy, when the default is read, and what it was made from."""

import asyncio
import functools
import itertools
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_policy as jmp
from jmp_policy.policy import default_origin, is_policy_spec


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
        ValueError, match=r" is not a policy or a floating dtype\. A policy comes after .* 'mixed_bfloat16'\)\.$"
    ):
        jmp.get_policy(spec)


def test_a_value_is_not_printed_to_learn_that_it_is_not_a_policy():
    class Model:
        def __repr__(self):
            raise AssertionError("prints all parameters")

    assert not is_policy_spec(Model())
    assert not is_policy_spec({"params": Model()})


@pytest.mark.parametrize("rules", [{"head": "float32"}, {dict: "float32"}], ids=["path", "type"])
def test_the_config_of_a_map_is_read_with_the_default_filled_in(rules):
    with jmp.use_policy("bfloat16"):
        assert jmp.get_policy(jmp.PolicyMap(rules).get_config()) == jmp.PolicyMap(rules, "bfloat16")


@pytest.mark.parametrize("spec", [{}, {"head": "float32"}])
def test_a_mapping_that_is_no_config_is_an_error_that_names_maps(spec):
    assert not is_policy_spec(spec)
    with pytest.raises(ValueError, match=r"is not the config of a policy or map\. For rules .*: PolicyMap\({'head'"):
        jmp.get_policy(spec)


def test_use_policy_is_scoped_nests_and_is_undone_by_an_error():
    def fail():
        with jmp.use_policy("mixed_float16"):
            assert jmp.default_policy().name == "mixed_float16"
            raise KeyError

    with jmp.use_policy("bfloat16"):
        with pytest.raises(KeyError):
            fail()
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
    after = {"bfloat16, after": "float16", "float64, after": "float16"}
    assert seen == after | {"bfloat16": "bfloat16", "float64": "float64"}
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


@pytest.mark.slow
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
        assert {jmp.default_policy().name for _ in range(5_000)} == {"bfloat16", "float32"}
    finally:
        sys.setswitchinterval(interval)
        is_done.set()
        setter.join()


@pytest.mark.parametrize("read", [jmp.set_default_policy, jmp.use_policy, jmp.with_policy])
def test_a_misspelt_policy_is_refused_where_it_is_given(read):
    assert is_policy_spec("bflaot16")
    with pytest.raises(ValueError, match=r"^Unknown dtype or policy 'bflaot16'"):
        read("bflaot16")
    assert jmp.default_policy().name == "float32"


class Endless:
    def __jmp_policy__(self):
        return self


def test_a_policy_that_stands_for_itself_is_an_error_that_says_so():
    with pytest.raises(ValueError, match=r"^__jmp_policy__\(\) of <.*Endless object.* returns the object itself\."):
        jmp.get_policy(Endless())


@pytest.mark.parametrize("count", [2, 2000])
def test_a_policy_that_is_quantized_many_times_is_an_error_that_says_so(count):
    text = "int8_from_" * count + "f32"
    with pytest.raises(ValueError, match=r"^'int8_from_.*f32' is quantized already in policy 'int8_from_int8.*f32'\. "):
        jmp.get_policy(text)


LONG, SPACES = "x" * 100_000, " " * 50_000
LONG_SPECS = [
    LONG, f"c={LONG}", f"{LONG}=f32", f"mixed_{LONG}", f"{LONG}_with_float32_vars", f"{LONG}_from_bf16",
    f"int8({LONG}=1)_from_bf16", f"int8(min_size={LONG})_from_bf16", f"float8(recipe={LONG})_from_bf16",
    f"c=f32,precision={LONG}", "c=f32," * 10_000, "int8_from_" * 10_000, {LONG: 1}, [LONG],
    {"rules": [{LONG: "f32"}], "default": None}, {"rules": [[{"type": LONG}, "float32"]], "default": None},
]  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        *(functools.partial(jmp.get_policy, spec) for spec in LONG_SPECS),
        lambda: jmp.Policy(LONG, None, None),
        lambda: jmp.Policy(None, None, None).replace(**{LONG: 1}),
        lambda: jmp.PolicyMap({f"{LONG}(": "float32"}),
        lambda: jmp.PolicyMap([LONG]),
        lambda: jmp.quant.Int8(min_size=LONG),
        lambda: jmp.quant.Float8(recipe=LONG),
        lambda: jmp.StaticLossScale(LONG),
        lambda: jmp.cast_floating(1.0, LONG),
    ],
    ids=itertools.count(),
)
def test_an_error_does_not_repeat_a_long_input(make):
    with pytest.raises((ValueError, TypeError)) as raised:
        make()
    assert "..." in str(raised.value)
    assert len(str(raised.value)) < 3000


@pytest.mark.parametrize("kind", ["int8{}x_from_bf16", "int4/{}x(y_from_bf16", "int8({}_from_bf16", "p={}x"])
def test_a_string_of_many_spaces_is_refused_at_once(kind):
    start = time.thread_time()
    with pytest.raises(ValueError, match=r"^(Unknown|In policy|'x\(y')"):
        jmp.get_policy(kind.format(SPACES))
    assert time.thread_time() - start < 5  # 0.01, and minutes with a pattern that backtracks


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


class KeyedCarrier(Carrier):
    """One that is more than its policy; it is compared by its key alone."""

    def __init__(self, key):
        self.key = key

    def __jmp_key__(self):
        return self.key

    __eq__ = __hash__ = None


def test_the_default_policy_knows_the_object_with_a_key_that_it_was_made_from(restored_default):
    keyed = KeyedCarrier("a")
    with jmp.use_policy(keyed):
        assert default_origin() is keyed
        assert jmp.default_policy() is jmp.get_policy("mixed_bfloat16")
        with jmp.use_policy(Carrier()):
            assert default_origin() is None
        keyed.key = "changed"
        assert default_origin() is None
    jmp.set_default_policy(KeyedCarrier("b"))
    assert default_origin().key == "b"


def test_equal_keys_compile_once_and_other_keys_again():
    traced = []
    f = jax.jit(lambda x: traced.append(x) or x)
    for key in ("a", "b", "a", "b"):
        with jmp.use_policy(KeyedCarrier(key)):
            f(1.0)
    assert len(traced) == 2
