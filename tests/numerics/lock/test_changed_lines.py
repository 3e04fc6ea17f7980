"""One line of a model changes: the lock shows where. A refactoring shows nothing."""

import fnmatch
import re

import changed_lines
import jax
import pytest


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def diff(model, *changes):
    if model == "equinox":
        pytest.importorskip("equinox")
    if model == "mesh" and len(jax.devices()) < 2:
        pytest.skip("one device")
    locked = changed_lines.lock_model(model)
    return locked.diff(changed_lines.lock_model(model, *changes))


def name_scope(row):
    """The path of a row, with `N` for a range of numbers."""
    return re.sub(r"\[[-,\d]+\]", "N", row.path)


def state_of(parameter):
    """The paths of a parameter of the linen model and of its moments, as arguments and as results.

    Whether Adam returns the moments in the dtype that they had depends on the version of optax.
    """
    found = f"params/params/{parameter} result/0/params/{parameter} state/0/[mn]u/params/{parameter}"
    return f"{found} ~result/1/0/[mn]u/params/{parameter}"


CHANGES, REFACTORINGS = [], []


def plant(model, name, old, new, scope, also=""):
    """Adds a change of one line. A row has the path `scope`, one each pattern of `also`, and none is elsewhere.

    A pattern after `~` may match none.
    """
    assert "\n" not in old + new
    marks = () if model == "linen" else pytest.mark.slow
    CHANGES.append(pytest.param(model, old, new, scope, also.split(), id=f"{model}: {name}", marks=marks))


def rewrite(model, name, *changes):
    """Adds a refactoring, of one line or more."""
    marks = () if model == "linen" else pytest.mark.slow
    REFACTORINGS.append(pytest.param(model, changes, id=f"{model}: {name}", marks=marks))


# ------------------------------------------------------------------------------------------------- changes in linen

plant(
    "linen",
    "dtype of a layer",
    'nn.Dense(16, dtype=HALF, name="expand")',
    'nn.Dense(16, dtype=jnp.float32, name="expand")',
    "blocks_N/mlp/expand",
    "blocks_N/mlp blocks_N/mlp/contract",
)
plant(
    "linen",
    "dtype forgotten",
    'nn.Dense(8, dtype=HALF, name="contract")',
    'nn.Dense(8, name="contract")',
    "blocks_N/mlp/contract",
    "blocks_? blocks_1/norm blocks_1/mlp/expand norm",  # whatever reads the residual stream
)
plant(
    "linen",
    "constant that promotes",
    'name="mlp")(x)',
    'name="mlp")(x) * jnp.float32(0.5)',
    "blocks_N",
    "blocks_? blocks_1/norm blocks_1/mlp/expand norm",
)
plant("linen", "constant before a cast", "/ 8**0.5", "/ jnp.float32(8**0.5)", "blocks_N/attention")
plant("linen", "softmax in half", "scores.astype(jnp.float32)", "scores", "blocks_N/attention")
plant("linen", "precision of an einsum", "query, key) /", 'query, key, precision="highest") /', "blocks_N/attention")
plant(
    "linen",
    "precision of a layer",
    'nn.Dense(32, dtype=jnp.float32, name="head")',
    'nn.Dense(32, dtype=jnp.float32, precision="highest", name="head")',
    "head",
)
plant(
    "linen",
    "preferred_element_type",
    "query, key) /",
    "query, key, preferred_element_type=jnp.float32) /",
    "blocks_N/attention",
)
plant(
    "linen",
    "remat",
    "= Block(name",
    "= nn.remat(Block)(name",
    "blocks_N",
    "blocks_N/norm blocks_N/attention blocks_N/attention/* blocks_N/mlp blocks_N/mlp/*",
)
plant(
    "linen",
    "dtype of moments",
    "adam(1e-3)",
    "adam(1e-3, mu_dtype=HALF)",
    "adam",
    "result/1/0/mu/params/* state/0/mu/params/*",
)
plant(
    "linen",
    "cast moved before a division",
    "query, key) / 8**0.5",
    "query, key).astype(jnp.float32) / 8**0.5",
    "blocks_N/attention",
)
plant(
    "linen",
    "cast moved before a matmul",
    "(scores.astype(jnp.float32)).astype(HALF)",
    "(scores.astype(jnp.float32))",
    "blocks_N/attention",
    "blocks_N/attention/out",
)
plant("linen", "period of the loss scale", "period=100", "period=200", "scale", ".")
plant(
    "linen",
    "another loss scale",
    "jmp.DynamicLossScale(2.0**15, period=100)",
    "jmp.StaticLossScale(2.0**10)",
    "scale",
    ".",
)
plant("linen", "full precision", "nn.gelu(hidden)", "jmp.force_full_precision(nn.gelu)(hidden)", "blocks_N/mlp")
plant(
    "linen",
    "dtype of parameters",
    "nn.Embed(32, 8, dtype=HALF,",
    "nn.Embed(32, 8, dtype=HALF, param_dtype=HALF,",
    "embed",
    f"{state_of('embed/embedding')} adam .",  # the root unscales gradients
)
plant(
    "linen",
    "reductions of a norm in half",
    'nn.LayerNorm(dtype=HALF, name="norm")',
    'nn.LayerNorm(dtype=HALF, force_float32_reductions=False, name="norm")',
    "blocks_N/norm",
)
plant("linen", "gradients clipped in half", "grad * 0.5", "(grad.astype(HALF) * 0.5).astype(grad.dtype)", "clip")
plant(
    "linen",
    "sum in half",
    "jnp.sum(kernel * kernel)",
    "jnp.sum(kernel * kernel, dtype=HALF)",
    "metrics",
    "result/2/penalty",
)
plant("linen", "dtype of a result", '"loss": loss,', '"loss": loss.astype(HALF),', "metrics", "result/2/loss")
plant(
    "linen", "rounded and cast back", "kernel * kernel", "kernel.astype(HALF).astype(jnp.float32) * kernel", "metrics"
)
plant(
    "linen",
    "reduce_dtype",
    "loss_scale=scale)",
    "loss_scale=scale, reduce_dtype=jnp.float32)",
    "embed",
    "blocks_N/attention/* blocks_N/mlp/*",
)  # all layers in half that have parameters, but no norms
plant("linen", "a scale that is closed over", "loss_scale=scale)", "loss_scale=jmp.StaticLossScale(2.0**10))", ".")
plant("linen", "reduce_precision", "nn.gelu(hidden)", "jax.lax.reduce_precision(nn.gelu(hidden), 8, 3)", "blocks_N/mlp")

# --------------------------------------------------------------------------------------------------- changes in nnx

DOWNSTREAM = "blocks/0 blocks/1 blocks/1/norm blocks/1/mlp/expand"
plant(
    "nnx",
    "rule to float32",
    '"blocks/0/mlp": "mixed_bfloat16"',
    '"blocks/0/mlp": "float32"',
    "blocks/0/mlp",
    f"blocks/0/mlp/* {DOWNSTREAM} head",
)
plant("nnx", "rule to half", '"head": "float32"', '"head": "mixed_bfloat16"', "head", ".")  # its gradients in the root
FLOAT32 = "params=float32,compute=float32,output=float32"
plant("nnx", "rule with a precision", '"head": "float32"', f'"head": "{FLOAT32},precision=highest"', "head")
HALF = "params=float32,compute=bfloat16,output=bfloat16"
plant(
    "nnx",
    "rule with accumulate",
    '"blocks/0/mlp": "mixed_bfloat16"',
    f'"blocks/0/mlp": "{HALF},accumulate=float32"',
    "blocks/0/mlp/expand",
    "blocks/0/mlp/contract",
)
plant(
    "nnx",
    "rule with reduce",
    '"blocks/0/mlp": "mixed_bfloat16"',
    f'"blocks/0/mlp": "{HALF},reduce=float32"',
    "blocks/N/mlp/expand",
    "blocks/N/mlp/contract blocks/[01]/mlp/* blocks/N/attention/* blocks/N/norm embed",
)  # all gradients have one; the rule is perhaps the cause in block 1
plant(
    "nnx",
    "rule added",
    '"head": "float32"',
    r'"head": "float32", r"blocks/\d/norm": "float32"',
    "blocks/N/norm",
    "blocks/N/attention/qkv",
)
for name, format in {"int8": "int8(min_size=0)", "mxfp8": "mxfp8(min_size=0)"}.items():
    plant("nnx", f"quantized to {name}", '"head": "float32"', f'"head": "{format}_from_mixed_bfloat16"', "head", ".")
plant("nnx", "softmax in half", "scores.astype(jnp.float32)", "scores", "blocks/N/attention")
plant(
    "nnx",
    "precision",
    "jnp.matmul(weights, value)",
    'jnp.matmul(weights, value, precision="highest")',
    "blocks/N/attention",
)
plant("nnx", "remat", "= block(x)", "= nnx.remat(lambda block, x: block(x))(block, x)", "blocks/N", "blocks/N/*")
plant(
    "nnx",
    "dtype of a norm",
    "nnx.LayerNorm(8, rngs=rngs)",
    "nnx.LayerNorm(8, dtype=jnp.float32, rngs=rngs)",
    "blocks/N/norm",
    "blocks/N/attention/qkv",
)
plant(
    "nnx",
    "full precision",
    "nnx.relu(self.expand(x))",
    "jmp.force_full_precision(nnx.relu)(self.expand(x))",
    "blocks/N/mlp",
)
plant("nnx", "factor of the loss scale", "period=100", "period=100, factor=4", "optimizer/opt_state/loss_scale", ".")
plant(
    "nnx",
    "dtype of moments",
    "optax.adam(1e-3)",
    "optax.adam(1e-3, mu_dtype=jnp.bfloat16)",
    ".",
    "optimizer/opt_state/inner_state/0/mu/*",
)

# ----------------------------------------------------------------------------------------------- changes in Equinox

plant(
    "equinox",
    "dtype of a layer",
    "self.contract = eqx.nn.Linear(16, 8, dtype=jnp.float32",
    "self.contract = eqx.nn.Linear(16, 8, dtype=HALF",
    "mlp/contract",
    "adam model/mlp/contract/* result/*/mlp/contract/* state/*/mlp/contract/*",
)
plant(
    "equinox",
    "cast of a layer forgotten",
    "return cast(self.contract)(x)",
    "return self.contract(x)",
    "mlp/contract",
    "mlp/contract/eqx.nn.Linear mlp head",
)
plant(
    "equinox",
    "cast moved before a lookup",
    "self.embed[tokens].astype(HALF)",
    "self.embed.astype(HALF)[tokens]",
    "embed",
)
plant(
    "equinox",
    "rounded to another half",
    "self.embed[tokens].astype(HALF)",
    "self.embed[tokens].astype(jnp.bfloat16).astype(HALF)",
    "embed",
)
plant("equinox", "preferred_element_type dropped", ", preferred_element_type=jnp.float32)", ")", "attention")
plant(
    "equinox",
    "cast dropped before a matmul",
    "weights.astype(HALF), x)",
    "weights, x)",
    "attention",
    "mlp mlp/*/eqx.nn.Linear head",
)
plant(
    "equinox",
    "head in half",
    "jnp.dot(x.astype(jnp.float32), self.head)",
    "jnp.dot(x, self.head.astype(HALF)).astype(jnp.float32)",
    "head",
)
plant("equinox", "full precision", "jax.nn.gelu(x)", "jax.nn.gelu(x.astype(jnp.float32)).astype(HALF)", "mlp")
plant("equinox", "remat", "jax.vmap(self.mlp)(x)", "jax.vmap(jax.checkpoint(lambda x: self.mlp(x)))(x)", "mlp", "mlp/*")
plant(
    "equinox",
    "dtype of moments",
    "adam(1e-3)",
    "adam(1e-3, mu_dtype=jnp.bfloat16)",
    "adam",
    "result/1/0/mu/* state/0/mu/*",
)
plant(
    "equinox",
    "division moved before a cast",
    "jax.nn.softmax(scores / 8**0.5)",
    "jax.nn.softmax(jnp.dot(query / 8**0.5, key.T, preferred_element_type=jnp.float32))",
    "attention",
)

# ----------------------------------------------------------------------------------------------- changes on a mesh

plant(
    "mesh",
    "dtype of a reduction",
    'pmean(grad, "data")',
    'pmean(grad.astype(jnp.float32), "data")',
    "mean",
    "result/0/*",
)
plant(
    "mesh",
    "dtype of a gather",
    'all_gather(loss, "data")',
    'all_gather(loss.astype(HALF), "data")',
    "gather",
    "result/1",
)
plant(
    "mesh",
    "reduce_dtype",
    "loss_scale=jmp.NoOpLossScale())",
    'loss_scale=jmp.NoOpLossScale(), reduce_dtype="float32")',
    "second",
    "first",
)

# --------------------------------------------------------------------------------------------- changes in the example

for api, block, optimizer in (
    ("gpt_linen", "blocks_N", "state/opt_state result/0/opt_state"),
    ("gpt_nnx", "blocks/N", "optimizer/opt_state"),
):
    scale, _, results = optimizer.partition(" ")
    plant(api, "rule to half", '"norm": "float32"', '"norm": "mixed_bfloat16"', "norm", "embed")
    rule = block.replace("N", r"\d") + "/attention/project"
    plant(
        api,
        "rule added",
        '{"norm": "float32"}',
        f'{{"norm": "float32", r"{rule}": "params=float32,compute=float32,output=bfloat16"}}',
        f"{block}/attention/project",
    )
    plant(
        api,
        "softmax in float32",
        "jnp.finfo(scores.dtype).min))",
        "jnp.finfo(scores.dtype).min).astype(jnp.float32)).astype(values.dtype)",
        f"{block}/attention",
    )
    plant(
        api,
        "preferred_element_type",
        "queries, keys) /",
        "queries, keys, preferred_element_type=jnp.float32) /",
        f"{block}/attention",
        f"{block}/attention/project",
    )
    plant(
        api,
        "constant that promotes",
        "math.sqrt(queries.shape[-1])",
        "jnp.float32(math.sqrt(queries.shape[-1]))",
        f"{block}/attention",
        f"{block}/attention/project",
    )
    plant(
        api,
        "dtype of moments",
        "optax.adamw(schedule,",
        "optax.adamw(schedule, mu_dtype=jnp.bfloat16,",
        ".",
        " ".join(f"{path}/inner_state/inner_state/1/0/mu/*" for path in optimizer.split()),
    )
    plant(
        api,
        "loss scale",
        "heads=2, context=16)",
        "heads=2, context=16), loss_scale=jmp.StaticLossScale(64.0)",
        f"{scale}/loss_scale",
        ".",
    )
    plant(api, "loss in half", "losses.mean()", "losses.astype(jnp.bfloat16).astype(jnp.float32).mean()", ".")
    plant(
        api,
        "reduce_dtype",
        "reduce_dtype=config.reduce_dtype",
        'reduce_dtype="float32"',
        "embed",
        f". positions {block}/*",
    )

# ------------------------------------------------------------------------------------------------------ refactorings

LINEN_MLP = """        hidden = nn.Dense(16, dtype=HALF, name="expand")(x)
        return nn.Dense(8, dtype=HALF, name="contract")(nn.gelu(hidden))"""
LINEN_SETUP = """
    def setup(self):
        self.contract = nn.Dense(8, dtype=HALF)
        self.expand = nn.Dense(16, dtype=HALF)

    def __call__(self, x):
        return self.contract(nn.gelu(self.expand(x)))"""
LINEN_LOOP = """        for index in range(2):
            x = Block(name=f"blocks_{index}")(x)"""
CALL = "jmp.value_and_grad(loss_fn, loss_scale=scale)(params, tokens)"
QUERY, VALUE = (f'        {name} = nn.Dense(8, dtype=HALF, name="{name}")(x)\n' for name in ("query", "value"))

rewrite("linen", "name of a class", ("class Mlp(", "class Perceptron("), ("+ Mlp(", "+ Perceptron("))
rewrite("linen", "name of a function", ("def step(", "def train_step("), ("\nscale =", "\nstep = train_step\nscale ="))
rewrite("linen", "setup instead of compact", ("    @nn.compact\n    def __call__(self, x):\n" + LINEN_MLP, LINEN_SETUP))
rewrite(
    "linen",
    "layers made before they are called",
    (
        LINEN_MLP,
        """
        contract, expand = nn.Dense(8, dtype=HALF, name="contract"), nn.Dense(16, True, HALF, name="expand")
        return contract(nn.gelu(expand(x)))""",
    ),
)
rewrite("linen", "loop unrolled", (LINEN_LOOP, '        x = Block(name="blocks_1")(Block(name="blocks_0")(x))'))
rewrite(
    "linen",
    "loop as nn.Sequential",
    (LINEN_LOOP, '        x = nn.Sequential([Block(name=f"blocks_{index}") for index in range(2)])(x)'),
)
rewrite("linen", "a blank line and a comment", ("class Mlp(", "# a comment\n\n\nclass Mlp("))
rewrite("linen", "matmul by name", ("weights @ value", "jnp.matmul(weights, value)"))
rewrite("linen", "matmul as einsum", ("weights @ value", 'jnp.einsum("bts,bsd->btd", weights, value)'))
rewrite(
    "linen", "einsum as matmul", ('jnp.einsum("btd,bsd->bts", query, key)', "jnp.matmul(query, key.swapaxes(1, 2))")
)
rewrite("linen", "jit inside", ("nn.gelu(hidden)", "jax.jit(nn.gelu)(hidden)"))
rewrite("linen", "jit of a layer", ("= Block(name", "= nn.jit(Block)(name"))
rewrite("linen", "jit of the loss", (CALL, CALL.replace("loss_fn,", "jax.jit(loss_fn),")))
rewrite("linen", "jit of the step", ("def step(", "@jax.jit\ndef step("))
rewrite("linen", "jit of the optimizer", ("optimizer.update(grads", "jax.jit(optimizer.update)(grads"))
rewrite(
    "linen",
    "lambda that closes over an argument",
    (CALL, "jmp.value_and_grad(lambda params: loss_fn(params, tokens), loss_scale=scale)(params)"),
)
rewrite(
    "linen",
    "helper function",
    ("def loss_fn(", "def halve(grad):\n    return grad * 0.5\n\n\ndef loss_fn("),
    ("lambda grad: grad * 0.5", "halve"),
)
rewrite(
    "linen",
    "keyword arguments",
    ("params), scale, tokens\nkwargs = {}", "params)\nkwargs = {'tokens': tokens, 'scale': scale}"),
)
rewrite("linen", "functools.partial", ("\nscale =", "\nimport functools\nstep = functools.partial(step)\nscale ="))
rewrite(
    "linen",
    "order of keys",
    ('{"loss": loss, "penalty": penalty(params)}', '{"penalty": penalty(params), "loss": loss}'),
)
rewrite("linen", "dtype by name", ("HALF = jnp.bfloat16", 'HALF = "bfloat16"'))
rewrite(
    "linen",
    "constant closed over",
    ("def penalty(", "FACTOR = jnp.float32(0.5)\n\n\ndef penalty("),
    ("0.5 * jnp.sum", "FACTOR * jnp.sum"),
)
rewrite("linen", "square by name", ("jnp.sum(kernel * kernel)", "jnp.square(kernel).sum()"))
rewrite("linen", "parts of Adam", ("optax.adam(1e-3)", "optax.chain(optax.scale_by_adam(), optax.scale(-1e-3))"))
rewrite("linen", "order of independent layers", (QUERY, ""), (VALUE, VALUE + QUERY))
rewrite("linen", "einsum without an output", ("weights @ value", 'jnp.einsum("...as,...sd", weights, value)'))

rewrite(
    "nnx",
    "order of attributes",
    ("        self.norm = nnx.LayerNorm(8, rngs=rngs)\n", ""),
    (
        "        self.mlp = Mlp(rngs=rngs)\n",
        "        self.mlp = Mlp(rngs=rngs)\n        self.norm = nnx.LayerNorm(8, rngs=rngs)\n",
    ),
)
rewrite("nnx", "name of a class", ("class Mlp(", "class Perceptron("), (" Mlp(", " Perceptron("))
rewrite("nnx", "jit of the step", ("def step(", "@nnx.jit\ndef step("))
rewrite(
    "nnx",
    "order of rules",
    ('    "blocks/0/mlp": "mixed_bfloat16",\n', ""),
    ('    "head": "float32",\n', '    "head": "float32",\n    "blocks/0/mlp": "mixed_bfloat16",\n'),
)
rewrite("nnx", "policy in other words", ('"blocks/0/mlp": "mixed_bfloat16"', f'"blocks/0/mlp": "{HALF}"'))
rewrite("nnx", "rule that changes nothing", ('    "blocks/0/mlp": "mixed_bfloat16",\n', ""))
rewrite("nnx", "matmul as einsum", ("jnp.matmul(weights, value)", 'jnp.einsum("bts,bsd->btd", weights, value)'))
rewrite(
    "nnx",
    "relu as a function of one's own",
    ("nnx.relu(self.expand(x))", "jnp.where((hidden := self.expand(x)) > 0, hidden, 0)"),
)
rewrite("nnx", "first scale of training", ("DynamicLossScale(2.0**15", "DynamicLossScale(2.0**12"))

rewrite(
    "equinox",
    "order of fields",
    ("    query: jax.Array\n    key: jax.Array\n", "    key: jax.Array\n    query: jax.Array\n"),
)
rewrite("equinox", "no jit", ("@eqx.filter_jit\n", ""))
rewrite("equinox", "matmul by sign", ("jnp.dot(weights.astype(HALF), x)", "weights.astype(HALF) @ x"))
rewrite("equinox", "mean as a method", ("jnp.mean(losses)", "losses.mean()"))

for api in ("gpt_linen", "gpt_nnx"):
    rewrite(api, "jit inside", ("jax.nn.softmax(jnp.where", "jax.jit(jax.nn.softmax)(jnp.where"))
    rewrite(
        api,
        "matmul in place of einsum",
        ('jnp.einsum("bhqk,bkhd->bqhd", weights, values)', "jnp.matmul(weights, values.swapaxes(1, 2)).swapaxes(1, 2)"),
    )
    rewrite(api, "dtype by name", ("logits.astype(jnp.float32)", 'logits.astype("float32")'))


@pytest.mark.parametrize(("model", "old", "new", "scope", "also"), CHANGES)
def test_shows_a_change_and_nothing_else(model, old, new, scope, also):
    found = {name_scope(row) for row in diff(model, (old, new)).rows}
    matches = {each: set(fnmatch.filter(found, each.removeprefix("~"))) for each in also}
    assert scope in found
    assert found == {scope}.union(*matches.values())
    assert not [each for each, paths in matches.items() if not paths and each[0] != "~"]


@pytest.mark.parametrize(("model", "changes"), REFACTORINGS)
def test_shows_no_refactoring(model, changes):
    assert diff(model, *changes).rows == ()
