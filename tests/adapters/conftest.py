"""A law that takes `api` holds for linen and for nnx."""

import pytest
from flax_apis import APIS


@pytest.fixture(params=APIS, ids=lambda api: api.name)
def api(request: pytest.FixtureRequest):
    return request.param
