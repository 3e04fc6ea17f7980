"""A certificate is found, or the analysis gives up, for whatever the interpreter reads."""

import jax
import jax.numpy as jnp
import pytest
from zoo import ZOO

from jmp_policy.contrib import certify


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ZOO)
def test_a_program_is_certified_or_not_without_an_error(name):
    specimen = ZOO[name]
    args = jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, int | float) else leaf, specimen.args)
    with specimen.context():
        certificate = certify(specimen.fun, (0, 1))(*args)
    assert bool(certificate) == (str(certificate)[:6] == "proved")
    if certificate.holds is False:
        assert jax.tree.structure(certificate.counterexample) == jax.tree.structure(args)


def test_control_flow_is_followed():
    for name in ("scan_over_layers", "while_loop", "remat_in_scan", "switch_in_vmap", "custom_vjp_in_vmap_and_scan"):
        assert certify(ZOO[name].fun, (0, 1))(*ZOO[name].args).holds, name
