"""The two forms of a skip, which platforms choose between, on the one platform that runs the tests."""

import contextlib
import types
from unittest import mock

from jax import lax

from jmp_policy.optim import _loss_scaled

FORMS = ("branch", "select")


@contextlib.contextmanager
def forced(form):
    """Gives every step that is traced inside this form, whatever the platform. Optimizers must be made inside, too."""

    def platform_dependent(*operands, cpu, default, **others):
        return {"branch": cpu, "select": default}[form](*operands)

    ours = types.SimpleNamespace(**vars(lax) | {"platform_dependent": platform_dependent})
    with mock.patch.object(_loss_scaled, "lax", ours):
        yield
