"""A residual stream forks at each block, and its gradients meet there in half: that of no weight is summed so."""

import jax
import jax.numpy as jnp

import jmp_policy as jmp


def loss(params, tokens):
    x = params["embed"][tokens] + params["positions"]
    for weight in params["blocks"]:
        x = x + jnp.tanh(x @ weight)
    return jnp.mean((x @ params["embed"].T) ** 2)


PARAMS = {"embed": jnp.ones((16, 8)), "positions": jnp.ones((4, 8)), "blocks": [jnp.ones((8, 8))] * 3}


def test_autocast_sums_no_gradient_of_a_weight_in_half():
    autocasted = jmp.autocast(loss, jmp.Policy("float32", "bfloat16", None))
    report = jmp.numerics.audit(jax.grad(autocasted))(PARAMS, jnp.ones((2, 4), int))
    report.assert_matmuls_in("bfloat16")
    report.assert_no()


def test_a_report_shows_itself_in_one_line():
    report = jmp.numerics.audit(loss)(PARAMS, jnp.ones((2, 4), int))
    assert repr(report) == f"<AuditReport: {len(report.rows)} rows, 4 matmuls, 0 findings; print it for the table>"
