"""What a user should not write, and the beginning of what pyright says of it, behind `# error:`."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jmp_policy as jmp
from jmp_policy import autocast, optm  # error: "optm" is unknown import symbol
from jmp_policy.autocast import AutocastRule  # error: "AutocastRule" is unknown import symbol


class Net(nnx.Module):
    def __init__(self, features: int):
        self.features = features

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def loss_fn(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return (x * params["w"]).sum()


print(optm, AutocastRule)
net, params, x = Net(3), {"w": jnp.ones(2)}, jnp.ones(2)
tx = jmp.optim.loss_scaled(optax.sgd(0.1), jmp.NoOpLossScale())

# Names that do not exist: of the package, of what it loads later, of what a policy was given to.
jmp.get_polcy("float32")  # error: "get_polcy" is not a known attribute of module "jmp_policy"
jmp.linnen.TrainState()  # error: "linnen" is not a known attribute of module "jmp_policy"
jmp.optim.loss_scald(optax.sgd(0.1))  # error: "loss_scald" is not a known attribute of module
jmp.quant.quantise(params)  # error: "quantise" is not a known attribute of module
jmp.numerics.audits(loss_fn)  # error: "audits" is not a known attribute of module
jmp.nnx.optimizer(net, tx)  # error: "optimizer" is not a known attribute of module
jmp.compat.keras.DTypePolice("float32")  # error: "DTypePolice" is not a known attribute of module
print(jmp.get_policy("float32").compute_dtyp)  # error: Cannot access attribute "compute_dtyp" for class "Policy"
print(jmp.with_policy(net).featurs)  # error: Cannot access attribute "featurs" for class "Net"
print(jmp.with_policy("float32")(net).featurs)  # error: Cannot access attribute "featurs" for class "Net"
jmp.with_policy(jax.jit(loss_fn)).lower(params, x)  # error: Cannot access attribute "lower"
tx.init(params).skiped_steps.item()  # error: Cannot access attribute "skiped_steps" for class "LossScaledState"

# A policy and its target in the wrong order, or one of them something else.
jmp.with_policy("mixed_bfloat16", net)  # error: No overloads for "with_policy" match
jmp.with_policy("mixed_bfloat16", Net)  # error: No overloads for "with_policy" match
jmp.with_policy("mixed_bfloat16", loss_fn)  # error: No overloads for "with_policy" match
jmp.with_policy([loss_fn, loss_fn], "mixed_bfloat16")  # error: No overloads for "with_policy" match
jmp.with_policy(net, 16)  # error: No overloads for "with_policy" match
jmp.with_policy(net, "mixed_bfloat16", "x")  # error: No overloads for "with_policy" match
jmp.with_policy(net, "mixed_bfloat16", keeps=["x"])  # error: No overloads for "with_policy" match
autocast("mixed_bfloat16", loss_fn)  # error: No overloads for "autocast" match
autocast(loss_fn, dtype="bfloat16")  # error: No overloads for "autocast" match
autocast(loss_fn, custom_rules="insid")  # error: No overloads for "autocast" match
jmp.force_full_precision("float32")  # error: No overloads for "force_full_precision" match
jmp.get_policy(16)  # error: No overloads for "get_policy" match
jmp.PolicyMap({16: "float32"})  # error: Argument of type "dict[int, str]" cannot be assigned to parameter "rules"
jmp.cast_floating(params, 16)  # error: Argument of type "Literal[16]" cannot be assigned to parameter "dtype"

# A call that does not fit the function that a policy was given to, or that is differentiated.
with autocast("mixed_bfloat16"):  # error: Object of type "Decorator" cannot be used with "with"
    pass
jmp.with_policy(loss_fn, "mixed_bfloat16")(params)  # error: Argument missing for parameter "x"
jmp.autocast("mixed_bfloat16")(loss_fn)(params, x, x)  # error: Expected 2 positional arguments
jmp.value_and_grad(loss_fn, loss_scale=tx.init(params))(params)  # error: Argument missing for parameter "x"
jmp.value_and_grad(loss_fn)(params, x)  # error: No overloads for "value_and_grad" match
jmp.optim.minimize(loss_fn, tx)(params, tx.init(params))  # error: Argument missing for parameter "x"
jmp.optim.loss_scaled(optax.sgd(0.1), "mixed_float16")  # error: Argument of type "Literal['mixed_float16']"
