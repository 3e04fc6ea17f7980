"""What newcomers write by mistake, or by the habit of another library, and what the errors tell them to write."""

import inspect
import operator
import re
import warnings

import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn, nnx

import jmp_policy as jmp

POLICY = jmp.get_policy("mixed_bfloat16")
LINEN = nn.Sequential([nn.Dense(2), nn.relu])
NNX = nnx.Linear(2, 2, rngs=nnx.Rngs(0))


def loss_fn(w):
    return jnp.sum(w**2)


@pytest.mark.parametrize("make", [jmp.autocast, jmp.with_policy])
def test_a_decorator_after_with_is_an_error(make):
    text = r"^A policy is not a context manager: give it to the function .* For example: autocast\(loss_fn, 'params="
    with pytest.raises(TypeError, match=text), make("mixed_bfloat16"):
        pass


@pytest.mark.parametrize("fun", [jmp.autocast, jmp.with_policy])
def test_help_shows_the_arguments_that_there_are(fun):
    parameters = inspect.signature(fun).parameters.values()
    assert "policy" in {parameter.name for parameter in parameters}
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


@pytest.mark.parametrize("device", ["cuda", "CPU", "cuda:0"])
def test_device_in_place_of_a_function_shows_a_policy(device):
    with pytest.raises(ValueError, match=f"'{device}'.* For example: "):
        jmp.autocast(device)


@pytest.mark.parametrize(
    "give",
    [
        lambda: jmp.with_policy("mixed_bfloat16", LINEN),
        lambda: jmp.with_policy(POLICY, NNX),
        lambda: jmp.with_policy("float32", nn.Dense),
        lambda: jmp.with_policy({"head": "float32"}, LINEN),
        lambda: jmp.autocast("float16", loss_fn),
        lambda: jmp.quant.quantize("int8_from_float32", NNX),
    ],
)
def test_policy_before_its_target_shows_the_order(give):
    text = r" is not a policy or a floating dtype\. A policy comes after .* with_policy\(model, 'mixed_bfloat16'\)\.$"
    with pytest.raises(ValueError, match=text) as error:
        give()
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("decorate", [jmp.autocast, lambda fun: jmp.autocast()(fun)], ids=["autocast", "autocast()"])
def test_autocast_that_forgot_its_policy_is_warned_of_at_the_users_line(decorate):
    text = r"no policy, and computes in float32 .* nothing runs in half .* For example: autocast\(loss_fn, 'params"
    with pytest.warns(UserWarning, match=text) as record:
        decorate(loss_fn)
    assert record[0].filename == __file__
    with jmp.use_policy(jmp.PolicyMap({"head": "float32"}, "float32")), pytest.warns(UserWarning, match=text):
        decorate(loss_fn)


def test_autocast_that_casts_or_was_told_not_to_is_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jmp.autocast(loss_fn, "float32")
        jmp.autocast(loss_fn, rules=jmp.AutocastRules(scopes={"head": "bfloat16"}))
        for default in ("mixed_bfloat16", jmp.PolicyMap({"head": "bfloat16"}, "float32"), "infer"):
            with jmp.use_policy(default):
                jmp.autocast(loss_fn)


TX = jmp.optim.loss_scaled(optax.sgd(1.0), jmp.NoOpLossScale())


@pytest.mark.parametrize(
    ("given", "quoted"),
    [
        ("mixed_float16", "'mixed_float16'"),
        (1024.0, "1024.0"),
        (None, "None"),
        (POLICY, "Policy with 0"),
        (POLICY.loss_scale, "<bound method Policy.loss_scale"),
        (jmp.DynamicLossScale, "<class 'jmp_policy"),
        (TX, "GradientTransformationExtraArgs with 0"),
    ],
    ids=lambda x: repr(x)[:30],
)  # fmt: skip
def test_what_is_no_loss_scale_is_quoted_beside_one(given, quoted):
    for take in (jmp.get_loss_scale, jmp.metrics, lambda given: jmp.value_and_grad(loss_fn, loss_scale=given),
                 lambda given: jmp.nnx.value_and_grad(loss_fn, loss_scale=given)):  # fmt: skip
        text = f"^Expected a state that holds exactly one loss scale, got {quoted}.* such as policy.loss_scale"
        with pytest.raises(ValueError, match=text):
            take(given)
    if given is not TX:
        with pytest.raises(TypeError, match=r"loss_scale must be a LossScale, got .* For example: policy\.loss_scale"):
            jmp.optim.loss_scaled(optax.sgd(1.0), given)


@pytest.mark.parametrize("value_and_grad", [jmp.value_and_grad, jmp.nnx.value_and_grad])
def test_loss_in_place_of_a_loss_function_says_what_to_write(value_and_grad):
    text = r"^value_and_grad takes a function, got Array\(2\., .*\. For example: value_and_grad\(lambda params: loss"
    with pytest.raises(TypeError, match=text):
        value_and_grad(loss_fn(jnp.ones(2)), loss_scale=jmp.NoOpLossScale())


PARAMS = {"w": jnp.ones(2)}


def make_state():
    return jmp.linen.TrainState.create(apply_fn=None, params=PARAMS, tx=TX)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (lambda: jmp.optim.step(optax.adam, PARAMS, (), PARAMS), "tx must be an optax transformation, got <function "),
        (lambda: jmp.optim.step(optax.adam, PARAMS, (), PARAMS), "For example: adam(1e-3)."),
        (lambda: jmp.optim.step(PARAMS, TX, (), PARAMS), "tx must be an optax transformation, got {'w': Array("),
        (lambda: jmp.optim.find_origin(jnp.sum, make_state()), "(a TrainState). For example: its field tx, as in opt"),
        (lambda: jmp.optim.loss_scaled("adam", jmp.NoOpLossScale()), "got 'adam'. For example: optax.adamw(1e-3)."),
        (lambda: jmp.optim.step(TX, PARAMS, PARAMS, TX.init(PARAMS)),
         "got dict. It is made by opt_state = tx.init(params), and comes third: jmp_policy.optim.step(tx, grads,"),
    ],
)  # fmt: skip
def test_steps_of_what_is_no_optimizer_or_no_state_say_what_to_write(step, text):
    with pytest.raises(TypeError, match=re.escape(text)):
        step()


@pytest.mark.parametrize("tx", [TX, optax.sgd(1.0)], ids=["loss_scaled", "sgd"])
@pytest.mark.parametrize("grads", [{"params": PARAMS}, (1.0, PARAMS)], ids=["variables", "loss and grads"])
def test_gradients_of_another_tree_are_named_beside_the_error_of_jax(tx, grads):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - whose text is JAX's
        jmp.optim.step(tx, grads, tx.init(PARAMS), PARAMS)
    note = f"The gradients are a {type(grads).__name__} and the parameters a dict of another structure. Differentiate"
    assert any(note in text for text in error.value.__notes__)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"init_scale": 1024.0}, r"^DynamicLossScale\(\) has no argument 'init_scale'\. Its name is: loss_scale\.$"),
        ({"growth_interval": 100}, r"^DynamicLossScale\(\) has no argument 'growth_interval'\. Its name is: period\.$"),
        ({"enabled": False}, r"no argument 'enabled'\. A loss scale that does nothing is NoOpLossScale\(\)\.$"),
        ({"nothing": 1}, r"unexpected keyword argument 'nothing'"),
    ],
)
def test_arguments_of_other_loss_scales_lead_to_ours(given, message):
    with pytest.raises(TypeError, match=message):
        jmp.DynamicLossScale(**given)


@pytest.mark.parametrize("scale", [jmp.DynamicLossScale(), jmp.StaticLossScale(2.0), jmp.NoOpLossScale()])
def test_methods_of_a_grad_scaler_lead_to_ours(scale):
    for name, ours in [
        ("step", "optim.step(tx, "),
        ("unscale_", "unscale(grads) "),
        ("state_dict", "compat.torch.grad"),
    ]:
        text = f"^{type(scale).__name__} has no attribute '{name}'. A GradScaler's {name} is here: {re.escape(ours)}"
        with pytest.raises(AttributeError, match=text):
            getattr(scale, name)
    assert not hasattr(scale, "nothing")


@pytest.mark.parametrize("make", [jmp.DynamicLossScale, jmp.StaticLossScale])
def test_a_truth_value_is_no_loss_scale(make):
    for value in (True, False):
        with pytest.raises(ValueError, match=rf"^loss_scale must be a positive number, got {value}\. For exam"):
            make(value)


@pytest.mark.parametrize(("name", "where"), jmp._ELSEWHERE.items())
def test_names_that_stand_elsewhere_lead_there(name, where):
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}'\. It is jmp_policy\.{re.escape(where)}\.$"):
        getattr(jmp, name)
    assert operator.attrgetter(where.split(",")[0])(jmp) is not None


@pytest.mark.parametrize(
    ("package", "name", "where"),
    [
        (jmp.optim, "GradScaler", "optim.loss_scaled"),
        (jmp.compat.torch, "GradScaler", "DynamicLossScale"),
        (jmp.compat.torch, "autocast", "autocast"),
        (jmp.compat.keras, "mixed_precision", "compat.keras.set_global_policy"),
        (jmp.compat.keras, "config", "compat.keras.set_dtype_policy"),
    ],
)
def test_names_of_torch_and_keras_lead_to_ours(package, name, where):
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}'\. It is jmp_policy\.{re.escape(where)}\b"):
        getattr(package, name)
    assert operator.attrgetter(where)(jmp) is not None


@pytest.mark.parametrize(
    "read",
    [jmp.Policy, lambda name: jmp.get_policy(f"compute={name}"), lambda name: jmp.cast_floating(PARAMS, name)],
)
def test_a_policy_in_place_of_a_dtype_is_not_taken_for_a_dtype(read):
    text = r"^Unknown dtype 'mixed_float16'.*\. It is a policy: get_policy\('mixed_float16'\)\. For example: "
    with pytest.raises(ValueError, match=text):
        read("mixed_float16")


@pytest.mark.parametrize(("name", "ours"), [("O1", "mixed_float16"), ("O3", "float16"), ("amp", "mixed_float16")])
def test_names_of_apex_lead_to_ours(name, ours):
    with pytest.raises(ValueError, match=rf"^'{name}' is a name of PyTorch's and Apex's in .* Here it is '{ours}'\.$"):
        jmp.get_policy(name)


@pytest.mark.parametrize(
    ("name", "ours"),
    [("float16-mixed", "mixed_float16"), ("16-mixed", "mixed_float16"), ("float16_mixed", "mixed_float16"),
     ("bf16-mixed", "mixed_bfloat16"),
     ("bf16-true", "bfloat16"), ("32-true", "float32")],
)  # fmt: skip
def test_names_of_lightning_lead_to_ours(name, ours):
    with pytest.raises(ValueError, match=rf"is a name of Lightning's in policy '{name}'\. Here it is '{ours}'\.$"):
        jmp.get_policy(name)
    with pytest.raises(ValueError, match=r"^Unknown dtype or policy '32-mixed'\."):
        jmp.get_policy("32-mixed")


def test_a_rule_by_the_name_of_a_type_is_told_of_the_type():
    types = {"": nn.Sequential, "layers_0": nn.Dense, "layers_1": nn.LayerNorm}
    [message] = jmp.PolicyMap({"LayerNorm": "float32"}).explain_unused(types)
    assert message.endswith("of modules here, whose key is the type itself: nn.LayerNorm, without quotes")


def test_a_map_is_no_container():
    policies = jmp.PolicyMap({"head": "float32"})
    with pytest.raises(TypeError, match=r"^'head' is in every PolicyMap: all paths have a policy\. Ask map\.rules for"):
        "head" in policies  # noqa: B015
    with pytest.raises(TypeError, match=r"^A PolicyMap covers every path, so it is not iterable\. For its keys: "):
        list(policies)
    with pytest.raises(TypeError, match=r"^The rules of a PolicyMap are a mapping or pairs, got PolicyMap\("):
        jmp.PolicyMap(policies)


def test_parameters_in_place_of_a_policy_are_quoted_in_short():
    params = {"dense": {"kernel": jnp.ones((64, 64))}}
    text = r"is not the config of a policy or map\..* A policy comes after variables: quantize\(variables, 'int8"
    with pytest.raises(ValueError, match=text) as error:
        jmp.quant.quantize("int8_from_float32", params)
    assert len(str(error.value)) < 400


def test_use_policy_decorates_a_function():
    @jmp.use_policy("mixed_bfloat16")
    def read(depth=1):
        """Reads."""
        return [jmp.default_policy().name, *(read(depth - 1) if depth else [])]

    assert (read(), read.__doc__, jmp.default_policy().name) == (["mixed_bfloat16"] * 2, "Reads.", "float32")


def test_a_cache_in_the_policy_of_a_function_is_a_warning():
    text = r"^loss_fn is a function: cache='int8' of its policy has no effect.* with_policy\(model, 'params=float32,co"
    with pytest.warns(UserWarning, match=text):
        jmp.with_policy(loss_fn, "c=bf16,cache=int8")


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (
            "int8_from_mixed_bfloat16",
            r"'int8' of its policy has no effect, .* with_policy\(model, 'int8_from_mixed_bfloat16'\)",
        ),
        (
            "float8_from_mixed_bfloat16",
            r"'float8' of its policy has no effect, because only the layers of a model are quan",
        ),
        (
            jmp.PolicyMap({nn.LayerNorm: "float32"}, "mixed_bfloat16"),
            r"rule LayerNorm of its policy has no effect, because",
        ),
        (
            jmp.PolicyMap({"head": "float32"}, "mixed_bfloat16"),
            r"rule 'head' of its policy .*autocast\(loss_fn, policy\)",
        ),
    ],
)
def test_what_only_layers_do_in_the_policy_of_a_function_is_a_warning(policy, text):
    with pytest.warns(UserWarning, match=rf"^loss_fn is a function: {text}"):
        jmp.with_policy(loss_fn, policy)


@pytest.mark.parametrize("make", [jmp.optim.minimize, jmp.optim.find_origin], ids=lambda make: make.__name__)
def test_an_optimizer_in_the_place_of_the_loss_function_is_an_error(make):
    text = f"{make.__name__} takes the loss function, then the optimizer. For example: {make.__name__}(loss_fn, tx)."
    with pytest.raises(TypeError, match=re.escape(text)):
        make(TX, loss_fn)


@pytest.mark.parametrize("tx", [TX, optax.sgd(1.0)], ids=["loss_scaled", "sgd"])
def test_gradients_in_the_place_of_the_model_are_an_error(tx):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = jmp.nnx.Optimizer(model, tx, wrt=nnx.Param)
    with pytest.raises(TypeError, match=r"^update takes the model, then its gradients, got a State and a Linear\. For"):
        optimizer.update(nnx.state(model, nnx.Param), model)


def test_explain_of_a_policy_says_where_it_goes():
    with pytest.raises(TypeError, match=r"first input is a policy.* explain\(with_policy\(model, policy\), x\)\.$"):
        jmp.explain(nn.Dense(2), jmp.get_policy("mixed_bfloat16"), jnp.ones(2))


@pytest.mark.parametrize("name", ["assert_locked('numerics.lock', loss_fn)", "certify(loss_fn, ranges)"])
def test_a_check_that_is_not_called_has_no_truth_value_and_warns(name):
    make = lambda: (
        jmp.contrib.certify(loss_fn, [(-1, 1)])
        if name.startswith("certify")
        else jmp.numerics.assert_locked("numerics.lock", loss_fn)
    )
    text = re.escape(
        f"{name} checks nothing until it is called with the arguments of the function. For example: {name}(x)."
    )
    with pytest.raises(TypeError, match=text):
        assert make()
    with pytest.warns(UserWarning, match=text):
        make()
