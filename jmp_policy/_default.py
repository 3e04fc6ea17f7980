"""Where the default policy is kept: a context that is part of the key of every `jit` cache."""

import jax

from ._grammar import parse_policy

# Not a ContextVar or a module global: either, read while tracing, goes stale at the second call of a jitted function.
DEFAULT = jax.make_user_context(parse_policy("float32"))
