"""The contexts of JAX's that packages use which are loaded when they are first needed.

Each context is part of the key of every jit cache, and so is their number: one more makes every function that was
compiled before compile again. So they are made when the library is imported, and not when a package is: a training step
does not compile again because somebody asked `explain` for a table.
"""

import jax

ACTIVE_POLICY = jax.make_user_context(None)
"""What refers to the policy whose linen modules are running."""

IN_FULL_PRECISION = jax.make_user_context(False)
"""Whether a call of `force_full_precision` runs. A policy inside computes in float32."""

INFERRED = jax.make_user_context(None)
"""The policy of the innermost nnx call that inferred a dtype, and the dtype.

A context, because a call may not write on modules that other threads call at the same time: each thread has its own,
and a jitted function inside the call is traced for each dtype."""

OBSERVING = jax.make_user_context(None)
"""What stands for the observation that is being made, to which it does not refer, as JAX never lets go of a key.

A context, because a function that was traced before would not call its modules again, and none would be seen."""

REDUCING = jax.make_user_context(None)
"""The reduce dtype that the innermost function that takes gradients knows of, by name; `""` while it knows none.

A context, because a jitted function that was traced before would not meet its policies again."""

TRACING = jax.make_user_context(None)
"""The token of the register of the function that is being traced by its scopes.

A context, because a jitted function that was traced before would not call its modules again, and none would be entered.
"""
