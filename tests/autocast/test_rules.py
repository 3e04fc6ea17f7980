"""`AutocastRules`: what a user moves in the tables."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from programs import trace

from jmp_policy import AutocastRules, autocast
from jmp_policy.numerics import audit

LOW = "params=float32,compute=bfloat16,output=none"
X = jnp.ones((2, 2))

EXAMPLES = [
    AutocastRules(),
    AutocastRules(primitives={"exp": "low", "add": "full"}),
    AutocastRules(functions={"jax.nn.softmax": "low", "my_norm": "narrow"}),
    AutocastRules(scopes={"head": "float32", r"norm_\d+": "narrow", dict: "mixed_float16"}),
    AutocastRules(backward="float32"),
    AutocastRules(backward={"head": "full"}),
    AutocastRules(residuals="half"),
]


def dtypes(fun, rules):
    """The dtype of the last equation of each primitive."""
    program = trace(autocast(fun, LOW, rules=rules))(X)
    eqns = [*program.eqns]
    for eqn in program.eqns:
        eqns += eqn.params["jaxpr"].eqns if "jaxpr" in eqn.params else []
    return {eqn.primitive.name: str(eqn.outvars[0].aval.dtype) for eqn in eqns}


@pytest.mark.parametrize("rules", EXAMPLES, ids=repr)
def test_equal_rules_are_equal_and_hash_alike(rules):
    rows = {field.name: dict(getattr(rules, field.name)) for field in dataclasses.fields(rules)[:-1]}
    again = AutocastRules(**rows, residuals=rules.residuals)
    assert again is not rules
    assert (again, hash(again)) == (rules, hash(rules))
    assert all(rules != other for other in EXAMPLES if other is not rules)
    assert pickle.loads(pickle.dumps(rules)) == rules
    with pytest.raises(dataclasses.FrozenInstanceError):
        rules.scopes = ()


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("low", "bfloat16"), ("full", "float32"), ("wide", "bfloat16"), ("infer", "bfloat16"), ("traced", "float32")],
)
def test_a_primitive_can_be_moved(precision, dtype):
    found = dtypes(lambda x: jnp.exp(x @ x) + 1, AutocastRules(primitives={"exp": precision}))
    assert found["exp"] == ("float32" if precision == "wide" else dtype)
    assert found["add"] == dtype


def my_softmax(x):
    e = jnp.exp(x)
    return e / e.sum()


@pytest.mark.parametrize(
    ("treatment", "inside", "after"),
    [
        ("full", "float32", "float32"),
        ("narrow", "float32", "bfloat16"),
        ("infer", "bfloat16", "bfloat16"),
        ("low", "bfloat16", "bfloat16"),
    ],
)
def test_a_function_can_be_moved(treatment, inside, after):
    for name in ("my_softmax", f"{__name__}.my_softmax"):
        found = dtypes(lambda x: my_softmax(x @ x) * 2, AutocastRules(functions={name: treatment}))
        assert (found["exp"], found["mul"]) == (inside, after)


@pytest.mark.parametrize("name", ["softmax", "jax.nn.softmax"])
def test_a_function_of_the_tables_can_be_moved(name):
    def fun(x):
        return jax.nn.softmax(x @ x) * 2

    assert dtypes(fun, AutocastRules())["mul"] == "bfloat16"
    assert dtypes(fun, AutocastRules(functions={name: "full"}))["mul"] == "float32"
    assert dtypes(fun, AutocastRules(functions={name: "low"}))["exp"] == "bfloat16"


def test_a_primitive_of_the_users_own_can_be_named():
    own = Primitive("own_scale")
    own.def_abstract_eval(lambda x: x)
    rules = AutocastRules(primitives={own: "low"})
    assert dtypes(lambda x: own.bind(x @ x), AutocastRules())["own_scale"] == "float32"
    assert dtypes(lambda x: own.bind(x @ x), rules)["own_scale"] == "bfloat16"


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_a_warning_of_an_idle_rule_is_at_the_users_line_through_transforms(transform):
    fun = transform(autocast(jnp.sum, LOW, rules=AutocastRules(functions={"my_sotfmax": "low"})))
    with pytest.warns(
        UserWarning, match=r"^function rule 'my_sotfmax' decides nothing: no operation is in a function"
    ) as caught:
        fun(X[0])
    assert caught[0].filename == __file__


def stream(params, x):
    with jax.named_scope("embed"):
        x = params["table"][x]
    for _ in range(2):
        x = x + jnp.tanh(x @ params["weight"] + params["bias"])
    return x


PARAMS = {"table": jnp.ones((5, 2)), "weight": jnp.ones((2, 2)), "bias": jnp.ones(2)}


@pytest.mark.parametrize(
    ("rules", "dtype"),
    [
        (AutocastRules(), "float32"),
        (AutocastRules(residuals="half"), "bfloat16"),
        (AutocastRules(scopes={"embed": "narrow"}), "bfloat16"),
    ],
    ids=["promote", "half", "narrow"],
)
def test_a_rule_puts_the_residual_stream_in_half_and_the_audit_names_its_line(rules, dtype):
    ours = autocast(stream, LOW, rules=rules)
    tokens = jnp.arange(3)
    report = audit(ours)(PARAMS, tokens)
    assert {row.dtype for row in report.rows if row.operation == "add" and row.flops} == {"bfloat16", dtype}
    found = [finding for finding in report.findings if finding.id == "rounded-by-rule"]
    assert [finding.count for finding in found] == ([] if dtype == "float32" else [1])
    assert all("(stream)" in finding.source and finding.dtypes == ("float32", "bfloat16") for finding in found)


@pytest.mark.parametrize(("treatment", "is_half"), [("wide", True), ("wide", False), ("narrow", False)])
def test_a_wide_function_returns_what_came_in_and_a_narrow_one_half(treatment, is_half):
    def norm(x):
        return x / jnp.sqrt(jnp.mean(x**2))

    rules = AutocastRules(functions={"norm": treatment})
    fun = lambda x: jnp.tanh(norm(x @ X if is_half else x) * 2.0)
    expected = "bfloat16" if is_half or treatment == "narrow" else "float32"
    assert dtypes(fun, rules)["mul"] == expected
