"""What a user may write, and what pyright reveals of it: the text behind `# revealed:`, to the letter. It runs, too."""

import functools
from typing import Any, reveal_type

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn, nnx

import jmp_policy as jmp
from jmp_policy.autocast import AutocastRules

# fmt: off
# Policies.
half = jmp.get_policy("p=f32,c=bf16,o=f32")
rules = jmp.PolicyMap({"head": "float32", nn.LayerNorm: half, r"block_\d+": jnp.bfloat16}, default="mixed_bfloat16")
reveal_type(half)  # revealed: Policy
reveal_type(half.compute_dtype)  # revealed: dtype[Any] | None
reveal_type(half.loss_scale())  # revealed: LossScale
reveal_type(jmp.get_policy(np.float16))  # revealed: Policy
reveal_type(jmp.get_policy(np.dtype("float16")))  # revealed: Policy
reveal_type(jmp.get_policy(half))  # revealed: Policy
reveal_type(jmp.get_policy(jmp.compat.keras.DTypePolicy("mixed_float16")))  # revealed: Policy
reveal_type(jmp.get_policy(rules))  # revealed: PolicyMap
reveal_type(jmp.get_policy(None))  # revealed: Policy | PolicyMap
reveal_type(jmp.get_policy(half.get_config()))  # revealed: Policy | PolicyMap
reveal_type(rules["head"])  # revealed: Policy
reveal_type(jmp.PolicyMap({"head": "float32"}))  # revealed: PolicyMap
reveal_type(jmp.PolicyMap({nn.LayerNorm: "float32"}))  # revealed: PolicyMap
reveal_type(half.cast_to_compute({"kernel": jnp.ones(2)}))  # revealed: dict[str, Array]
reveal_type(jmp.cast_floating([jnp.ones(2)], "bfloat16"))  # revealed: list[Array]

# Linen: classes, instances, and what is decorated.
class Net(nn.Module):
    features: int
    dtype: Any = None
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(self.features, dtype=self.dtype)(x)
@jmp.with_policy
class Bare(Net):
    depth: int = 1
@jmp.with_policy("mixed_bfloat16")
class Called(Net):
    depth: int = 1
@jmp.with_policy(policy=half, no_cast=["x"])
class Kept(Net):
    depth: int = 1
x = jnp.ones((2, 4))
net = jmp.with_policy(Net(3), half)
reveal_type(net)  # revealed: Net
reveal_type(net.features)  # revealed: int
reveal_type(jmp.with_policy(Net(3)))  # revealed: Net
reveal_type(jmp.with_policy(Net, rules))  # revealed: type[Net]
reveal_type(jmp.with_policy(nn.Sequential([nn.Dense(3)]), jnp.bfloat16))  # revealed: Sequential
reveal_type(jmp.with_policy(half)(Net(3)))  # revealed: Net
reveal_type(jmp.with_policy(functools.partial(Net, dtype="float32"), half))  # revealed: partial[Net]
reveal_type(Bare(3).depth)  # revealed: int
reveal_type(Called)  # revealed: type[Called]
reveal_type(Kept(3).depth)  # revealed: int
reveal_type(jmp.policy_of(net))  # revealed: Policy | PolicyMap | None

# Nnx.
@jmp.with_policy("mixed_bfloat16")
class Encoder(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.dense = nnx.Linear(width, width, rngs=rngs)
    def encode(self, x: jax.Array) -> jax.Array:
        return self.dense(x)
encoder = Encoder(4, rngs=nnx.Rngs(0))
linear = jmp.with_policy(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), half)
reveal_type(encoder.encode(x))  # revealed: Array
reveal_type(linear)  # revealed: Linear
reveal_type(encoder.dense.out_features)  # revealed: int
reveal_type(jmp.with_policy(nnx.Dict(head=nnx.Linear(4, 3, rngs=nnx.Rngs(0)))))  # revealed: Dict[Linear]
reveal_type(jmp.nnx.cast_params(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), "bfloat16"))  # revealed: Linear

# Functions, methods and jitted functions.
def scale(x: jax.Array, *, factor: float = 0.5) -> jax.Array:
    return x * factor
@jmp.with_policy("mixed_bfloat16")
def add(x: jax.Array, y: jax.Array) -> jax.Array:
    return x + y
with jmp.use_policy("mixed_bfloat16"):
    reveal_type(jmp.default_policy())  # revealed: Policy | PolicyMap
    @jmp.autocast
    def double(x: jax.Array) -> jax.Array:
        return x + x
@jmp.autocast("p=f32,c=bf16", rules=AutocastRules(functions={"softmax": "full"}), custom_rules="inside")
def attend(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x @ x.T)
@jmp.force_full_precision
def total(x: jax.Array) -> jax.Array:
    return x.sum()
class Metrics:
    @jmp.with_policy("float32")
    def mean(self, x: jax.Array) -> jax.Array:
        return x.mean()
    @jmp.autocast("mixed_bfloat16")
    @staticmethod
    def norm(x: jax.Array) -> jax.Array:
        return (x * x).sum()
    @jmp.with_policy("float32")
    @classmethod
    def name(cls, x: jax.Array) -> str:
        return cls.__name__
reveal_type(jmp.with_policy(scale, half))  # revealed: (x: Array, *, factor: float = 0.5) -> Array
reveal_type(jmp.autocast(scale, policy=half))  # revealed: (x: Array, *, factor: float = 0.5) -> Array
reveal_type(jmp.autocast(np.float16)(scale))  # revealed: (x: Array, *, factor: float = 0.5) -> Array
reveal_type(jmp.with_policy(nnx.jit(scale), half))  # revealed: (x: Array, *, factor: float = 0.5) -> Array
reveal_type(jmp.autocast(functools.partial(scale, factor=2.0), half))  # revealed: partial[Array]
reveal_type(add)  # revealed: (x: Array, y: Array) -> Array
reveal_type(double)  # revealed: (x: Array) -> Array
reveal_type(attend)  # revealed: (x: Array) -> Array
reveal_type(total)  # revealed: (x: Array) -> Array
reveal_type(Metrics().mean)  # revealed: (x: Array) -> Array
reveal_type(Metrics.norm)  # revealed: (x: Array) -> Array
reveal_type(Metrics.name)  # revealed: (x: Array) -> str

# Training.
def loss_fn(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return (x * params["w"]).sum()
def loss_and_aux(params: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, int]:
    return loss_fn(params, x), 3
params = {"w": jnp.ones(4)}
tx = jmp.optim.loss_scaled(optax.chain(optax.clip(1.0), optax.sgd(0.1)), half.loss_scale())
accumulating = jmp.optim.skip_nonfinite(optax.MultiSteps(optax.sgd(0.1), 4))
opt_state = tx.init(params)
grad_fn = jmp.value_and_grad(loss_fn, loss_scale=opt_state)
loss, grads = grad_fn(params, x)
aux_fn = jmp.value_and_grad(loss_and_aux, has_aux=True, loss_scale=opt_state)
reveal_type(opt_state)  # revealed: LossScaledState
reveal_type(opt_state._replace(loss_scale=jmp.DynamicLossScale()))  # revealed: LossScaledState
reveal_type(grad_fn)  # revealed: (params: dict[str, Array], x: Array) -> tuple[Array, Any]
reveal_type(loss)  # revealed: Array
reveal_type(aux_fn(params, x))  # revealed: tuple[tuple[Array, int], Any]
reveal_type(jmp.grad(loss_and_aux, has_aux=True, loss_scale=opt_state)(params, x))  # revealed: tuple[Any, int]
reveal_type(jmp.optim.step(tx, grads, opt_state, params))  # revealed: tuple[dict[str, Array], LossScaledState]
train_step = jmp.optim.minimize(loss_fn, tx)
reveal_type(train_step(params, opt_state, x))  # revealed: tuple[dict[str, Array], Any, Array]
reveal_type(jmp.get_loss_scale(opt_state))  # revealed: LossScale
reveal_type(jmp.optim.accumulate(params, grads))  # revealed: dict[str, Array]
reveal_type(jmp.optim.global_norm(grads))  # revealed: Array
class State(jmp.linen.TrainState):
    batch_stats: Any = None
state = State.create(apply_fn=net.apply, params=params, tx=tx)
reveal_type(state.apply_gradients(grads=grads))  # revealed: State
optimizer = jmp.nnx.Optimizer(linear, tx, wrt=nnx.Param)
def linear_loss(model: nnx.Linear) -> jax.Array:
    return model(x).sum()
reveal_type(jmp.nnx.value_and_grad(linear_loss, loss_scale=optimizer))  # revealed: (model: Linear) -> tuple[Array, Any]

# Whether it worked, and quantization.
explanation = jmp.explain(net, x)
report = jmp.numerics.audit(scale)(jax.ShapeDtypeStruct((2,), "float32"))
reveal_type(explanation.rows)  # revealed: tuple[ModuleRow, ...]
reveal_type(report)  # revealed: AuditReport
reveal_type(report.rows)  # revealed: tuple[AuditRow, ...]
wide = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
kernels = {"dense": {"kernel": jnp.ones((64, 64))}}
reveal_type(jmp.quant.quantize(wide, "int8_from_float32"))  # revealed: Linear
reveal_type(jmp.quant.quantize(kernels, "int8_from_float32"))  # revealed: dict[str, Any]
