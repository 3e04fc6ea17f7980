"""What `import jmp_policy` loads, and what it costs."""

import importlib
import subprocess
import sys

import pytest

import jmp_policy as jmp


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.slow
def test_only_its_own_few_modules_are_loaded():
    code = "import sys, jax; before = set(sys.modules)\nimport jmp_policy\nprint(*(set(sys.modules) - before))"
    loaded = run(code).split()
    assert [name for name in loaded if not name.startswith("jmp_policy")] == []
    assert len(loaded) <= 33


MOST_MODULES = {"optim": 40, "quant": 55, "sharding": 48, "numerics": 34, "linen": 42, "nnx": 44}


@pytest.mark.slow
@pytest.mark.parametrize("package", MOST_MODULES)
def test_a_package_loads_no_more_of_our_modules_than_this(package):
    code = f"import sys, jmp_policy.{package}\nprint(sum(name.startswith('jmp_policy') for name in sys.modules))"
    assert int(run(code)) <= MOST_MODULES[package]


LATER = ("_jaxpr", "numerics", "quant", "report", "linen._adapter", "nnx._products")
LATER += ("optim._half_parameters", "optim._moment", "optim._quantize", "optim._state_report")


@pytest.mark.slow
def test_optimizers_and_train_states_load_no_layers_searches_or_formats():
    loaded = run("import sys, jmp_policy.optim, jmp_policy.linen, jmp_policy.nnx\nprint(*sys.modules)").split()
    prefixes = tuple(f"jmp_policy.{name}" for name in LATER)
    assert [name for name in loaded if name.startswith(prefixes)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "modules",
    ["flax.serialization, jmp_policy.quant", "jmp_policy.quant, jmp_policy.linen", "jmp_policy.quant, jmp_policy.nnx"],
)
def test_quantized_weights_are_registered_with_flax_in_any_order_of_imports(modules):
    code = f"import {modules}, flax\nprint(flax.serialization.is_serializable(jmp_policy.quant.QuantizedArray))"
    assert run(code).split() == ["True"]


@pytest.mark.slow
def test_everything_can_be_loaded_where_jit_is_disabled():
    run(
        "import jax; jax.config.update('jax_disable_jit', True)\n"
        "import jmp_policy as jmp, jax.numpy as jnp\n"
        "jmp.linen, jmp.nnx, jmp.optim, jmp.quant, jmp.numerics, jmp.sharding, jmp.tune\n"
        "assert jmp.autocast(lambda w: w @ w, 'bfloat16')(jnp.ones((2, 2))).dtype == jnp.bfloat16"
    )


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'jmp_policy' has no attribute 'polcy'$"):
        jmp.polcy  # noqa: B018


@pytest.mark.parametrize("name", jmp._LAZY)
def test_a_package_is_loaded_when_it_is_first_asked_for(name):
    assert jmp.__getattr__(name) is importlib.import_module(f"jmp_policy.{name}")  # as before anything has loaded it


def test_lazy_names_are_listed():
    assert {"compat", "linen", "nnx", "optim", "Policy", "with_policy"} <= set(dir(jmp))


def test_star_imports_have_names_that_are_loaded_lazily():
    names: dict[str, object] = {}
    exec("from jmp_policy.optim import *", names)
    assert {"kahan", "quantize_state", "state_report", "step"} <= names.keys()


FIRST = {
    "collect": "jmp.numerics.collect(fun)",
    "autocast by paths": "jmp.autocast(fun, jmp.PolicyMap({'a': 'float32'}, 'mixed_bfloat16'))",
    "kahan": "lambda x: jmp.optim.kahan(optax.sgd(1.0)).init(fun(x).astype('bfloat16'))",
    "quantize_state": "lambda x: jmp.optim.quantize_state(optax.adam(1.0)).init(fun(x))",
    "first_nonfinite": "jmp.numerics.first_nonfinite(fun)",
    "quantize_array": "lambda x: jmp.quant.quantize_array(fun(x), 'int8').dequantize()",
    "cast_params": "lambda x: nnx.state(jmp.nnx.cast_params(nnx.Dict(w=nnx.Param(fun(x))), 'bfloat16'))",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST)
def test_the_first_function_of_a_process_is_traced_once(name):
    """What is loaded while JAX traces may change what its caches depend on."""
    printed = run(
        "import flax.linen, jax, optax, jmp_policy as jmp\n"
        "from flax import nnx\n"
        "traces = []\n"
        "fun = lambda x: traces.append(1) or 2 * x\n"
        f"jitted = jax.jit({FIRST[name]})\n"
        "x = jax.numpy.ones((64, 64))\n"
        "jitted(x), jitted(x)\n"
        "print(len(traces))"
    )
    assert printed.split() == ["1"]


@pytest.mark.slow
def test_what_is_loaded_in_a_trace_adds_nothing_to_it_and_compiles_nothing_again():
    """The number of JAX's contexts is part of the key of every jit cache: see `_base/_memory.py`."""
    assert run(
        """
import importlib, pkgutil
import flax.linen, flax.nnx, jax, optax  # Flax makes contexts of its own when it is loaded
import jmp_policy

traces = []

@jax.jit
def step(x):
    traces.append(1)
    return x + 1

step(1.0)
@jax.make_jaxpr
def load(x):
    for info in pkgutil.walk_packages(jmp_policy.__path__, "jmp_policy."):
        if info.name.split(".")[1] not in ("__main__", "cli", "doctor"):
            importlib.import_module(info.name)
    return x

program = load(1.0)
step(1.0)
print(len(traces), len(program.eqns))
"""
    ).split() == ["1", "0"]
