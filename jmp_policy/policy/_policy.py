"""The policy: which dtype parameters are stored in, computed in, and returned in; and the default policy's context."""

import contextlib
import contextvars
import dataclasses
import functools
import threading
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._base import DTypeLike, cast_floating, did_you_mean, first_floating_dtype, parse_dtype, quote
from ..loss_scale import DynamicLossScale, LossScale, NoOpLossScale
from ._block_formats import KeptNVFP4
from ._formats import Quantization, parse_quantization

T = TypeVar("T")

Precision = str | jax.lax.Precision | jax.lax.DotAlgorithmPreset | None

PRECISIONS = ("default", "high", "highest", "bfloat16", "tensorfloat32", "float32")
"""The matmul precisions that `jax.default_matmul_precision` reads by name, beside `jax.lax.DotAlgorithmPreset`."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, init=False, eq=False, repr=False)
class Policy:
    """Says which dtype goes where, and casts trees accordingly.

    Immutable, hashable and a pytree without leaves: a policy passes through `jit`, `vmap`, `scan` and `grad` as an
    argument, a result or a field. Equal policies are one object, whatever spelling their dtypes had.

    Args:
      param_dtype: what parameters are stored in; `None` leaves them as they are.
      compute_dtype: what inputs and parameters are cast to for computing; `None` stands for the dtype of the first
        floating input, which `resolve` fills in.
      output_dtype: what results are cast to; `None` leaves them as they are.
      precision: the matmul precision inside what the policy is applied to, as `jax.default_matmul_precision` takes
        it (`"highest"`, `jax.lax.Precision.HIGHEST`, ...); `None` leaves it alone.
      quantization: in which format the products of Flax layers are computed, and in which their weights are stored:
        `quant.Int8()`, `quant.Int4()`, `quant.Float8()`, `quant.MXFP8()`, `quant.MXFP4()`, `quant.NVFP4()`, or a string
        such as `"int4/64"`; `None` for no other than the dtypes say. It holds in modules; a plain function has no
        weights to quantize.
      reduce_dtype: what gradients are summed over devices in; `None` leaves that to the program. `value_and_grad`,
        `grad`, those of `jmp_policy.nnx` and `optim.minimize` take it from the policies that they meet while they
        trace a function. `jax.grad` does not.
      accumulate_dtype: what the products of Flax layers, and those in `autocast`, hand their sums over in: the bias is
        added in it, and one cast makes the result one of the compute dtype inside of a model, and one of the output
        dtype where the module with the policy returns it. `"p=f32,c=bf16,o=f32,a=f32"` on a head gives logits that
        never were bfloat16. The weight's gradient is a sum in float32 too, and reaches a float32 weight as that.
        `None` leaves products in the compute dtype. What a module computes by `jnp.dot` of its own is left alone, as
        all of its operations are; `autocast` is for these. Such products have no forward-mode derivative.

    Raises:
      ValueError: a dtype is not a floating dtype, the accumulate dtype cannot hold the numbers of the compute dtype, or
        the precision or quantization is unknown.

    >>> import jax, numpy as np, jmp_policy as jmp
    >>> policy = jmp.Policy("float32", "bfloat16", "float32")
    >>> policy is jmp.Policy(np.float32, "bf16", jax.numpy.float32)
    True
    >>> policy.cast_to_compute((np.ones(2, np.float32), np.arange(2)))
    (array([1, 1], dtype=bfloat16), array([0, 1]))
    """

    param_dtype: np.dtype | None
    compute_dtype: np.dtype | None
    output_dtype: np.dtype | None
    precision: str | None
    quantization: Quantization | None
    reduce_dtype: np.dtype | None
    accumulate_dtype: np.dtype | None

    def __new__(
        cls,
        param_dtype: DTypeLike | None,
        compute_dtype: DTypeLike | None,
        output_dtype: DTypeLike | None,
        *,
        precision: Precision = None,
        quantization: Quantization | str | None = None,
        reduce_dtype: DTypeLike | None = None,
        accumulate_dtype: DTypeLike | None = None,
    ) -> "Policy":
        """The one policy of these dtypes."""
        fields = (
            _parse_optional_dtype(param_dtype, "param_dtype"),
            _parse_optional_dtype(compute_dtype, "compute_dtype"),
            _parse_optional_dtype(output_dtype, "output_dtype"),
            _parse_precision(precision),
            parse_quantization(quantization, where=" for quantization"),
            _parse_optional_dtype(reduce_dtype, "reduce_dtype"),
            _parse_optional_dtype(accumulate_dtype, "accumulate_dtype"),
        )
        _check_accumulate_dtype(fields[-1], fields[1])
        new = object.__new__(cls)
        vars(new).update(zip(_FIELDS, fields, strict=True))
        return _INTERNED.setdefault(fields, new)

    def cast_to_param(self, tree: T) -> T:
        """Casts the floating arrays of a tree to the dtype that parameters are stored in."""
        return cast_floating(tree, self.param_dtype)

    def cast_to_compute(self, tree: T) -> T:
        """Casts the floating arrays of a tree to the dtype of computation."""
        return cast_floating(tree, self.compute_dtype)

    def cast_to_output(self, tree: T) -> T:
        """Casts the floating arrays of a tree to the dtype of results."""
        return cast_floating(tree, self.output_dtype)

    def with_output_dtype(self, output_dtype: DTypeLike | None) -> "Policy":
        """The same policy with another output dtype.

        >>> import jmp_policy as jmp
        >>> str(jmp.Policy("float32", "float16", "float16").with_output_dtype("full"))
        'params=float32,compute=float16,output=float32'
        """
        return self.replace(output_dtype=output_dtype)

    def replace(self, **fields: Any) -> "Policy":
        """The same policy with other values of some fields.

        Raises:
          ValueError: a Policy has no field of that name.
        """
        for name in fields:
            if name not in _FIELDS:
                raise ValueError(
                    f"Unknown field {quote(name)} of a Policy. {did_you_mean(name, _FIELDS)} "
                    "For example: policy.replace(output_dtype='float32')."
                )
        return Policy(**self._fields() | fields)

    def resolve(self, *inputs: Any) -> "Policy":
        """Fills a missing compute dtype in from the first floating array of the inputs, or float32 if there is none.

        Raises:
          ValueError: the accumulate dtype cannot hold its numbers.

        >>> import numpy as np, jmp_policy as jmp
        >>> str(jmp.Policy("float32", None, None).resolve(3, np.ones(2, np.float16)))
        'params=float32,compute=float16,output=none'
        """
        if self.compute_dtype is not None:
            return self
        return self.replace(compute_dtype=first_floating_dtype(inputs) or np.float32)

    def loss_scale(self) -> LossScale:
        """A loss scale that fits: dynamic if the compute dtype is float16, whose range is small, else a no-op.

        >>> import jmp_policy as jmp
        >>> jmp.Policy("float32", "bfloat16", "float32").loss_scale()
        NoOpLossScale()
        """
        return DynamicLossScale() if self.compute_dtype == np.float16 else NoOpLossScale()

    @property
    def name(self) -> str:
        """The shortest string that `get_policy` reads back as this policy.

        >>> import jmp_policy as jmp
        >>> jmp.Policy("float32", "float16", "float16").name
        'mixed_float16'
        """
        if self.quantization is not None:
            return f"{self.quantization}{FROM}{self.replace(quantization=None).name}"
        param, compute, output = (_spell(d) for d in (self.param_dtype, self.compute_dtype, self.output_dtype))
        options = (self.precision, self.reduce_dtype, self.accumulate_dtype)
        has_options = any(option is not None for option in options)  # NumPy has float64 equal None
        if not has_options and compute == output:
            if param == compute:
                return "infer" if param == "none" else param
            if param == "float32" and compute in ("float16", "bfloat16"):
                return f"mixed_{compute}"
        return str(self)

    def get_config(self) -> dict[str, str | None]:
        """The fields as plain strings and `None`, for JSON; without those that came later, where they are `None`.

        >>> import jmp_policy as jmp
        >>> jmp.Policy("float32", "float16", None).get_config()
        {'param_dtype': 'float32', 'compute_dtype': 'float16', 'output_dtype': None, 'precision': None, 'quantization': None}
        """  # noqa: E501
        config = {name: None if value is None else str(value) for name, value in self._fields().items()}
        return {name: value for name, value in config.items() if value is not None or name not in _LATER}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Policy":
        """The policy that `get_config` described.

        Raises:
          ValueError: a field is missing, unknown, or has a bad value.
        """
        required = set(_FIELDS) - set(_OPTIONAL)
        if not isinstance(config, Mapping) or not required <= config.keys() <= set(_FIELDS):
            got = sorted(config) if isinstance(config, Mapping) else repr(config)
            raise ValueError(
                f"A policy's config has the keys {sorted(required)}, and 'precision', 'quantization', 'reduce_dtype' "
                f"and 'accumulate_dtype' if need be, got {got}. "
                f"For example: {Policy('float32', 'bfloat16', 'float32').get_config()}."
            )
        return cls(**config)

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FIELDS}

    def __str__(self) -> str:
        dtypes = {"params": self.param_dtype, "compute": self.compute_dtype, "output": self.output_dtype}
        options = {"accumulate": self.accumulate_dtype, "reduce": self.reduce_dtype, "precision": self.precision}
        given = dtypes | {key: value for key, value in options.items() if value is not None}
        plain = ",".join(f"{key}={_spell(value)}" for key, value in given.items())
        return plain if self.quantization is None else f"{self.quantization}{FROM}{plain}"

    def __repr__(self) -> str:
        given = [f"{n}={v!r}" for n, v in self.get_config().items() if n not in _OPTIONAL or v is not None]
        return f"Policy({', '.join(given)})"

    def __reduce__(self) -> tuple:  # copies and pickles are the interned object again
        if isinstance(self.quantization, KeptNVFP4):  # of a module that nnx pickles with its spec; no string has it
            plain = self.replace(quantization=self.quantization.plain)
            return functools.partial(plain.replace, quantization=self.quantization), ()
        return Policy.from_config, (self.get_config(),)


FROM = "_from_"
"""What stands between the quantization and the rest of a policy's name."""

_FIELDS = tuple(field.name for field in dataclasses.fields(Policy))
_LATER = ("reduce_dtype", "accumulate_dtype")  # than the first configs and pickles that users keep
_OPTIONAL = ("precision", "quantization", *_LATER)
_INTERNED: dict[tuple, Policy] = {}


def _spell(value: object) -> str:
    return "none" if value is None else str(value)


def _parse_optional_dtype(spec: DTypeLike | None, field: str) -> np.dtype | None:
    return None if spec is None else parse_dtype(spec, where=f" for {field}", example=f"{field}='bfloat16'")


def _check_accumulate_dtype(accumulate_dtype: np.dtype | None, compute_dtype: np.dtype | None) -> None:
    """Checks that sums of products hold every number of the dtype of these.

    Raises:
      ValueError: they are narrower.
    """
    if accumulate_dtype is None or compute_dtype is None:
        return
    wide, narrow = jnp.finfo(accumulate_dtype), jnp.finfo(compute_dtype)
    if wide.nmant < narrow.nmant or wide.maxexp < narrow.maxexp or wide.minexp > narrow.minexp:
        raise ValueError(
            f"Products of {str(compute_dtype)!r} cannot be accumulated in {str(accumulate_dtype)!r}, which does not "
            f"hold all numbers of compute_dtype={str(compute_dtype)!r}. For example: accumulate_dtype='float32'."
        )


def _parse_precision(precision: Precision) -> str | None:
    if precision is None:
        return None
    if isinstance(precision, jax.lax.Precision):
        return precision.name.lower()
    if isinstance(precision, jax.lax.DotAlgorithmPreset):
        precision = precision.name
    name = str(precision).strip()
    known = [*PRECISIONS, *(preset.name for preset in jax.lax.DotAlgorithmPreset)]
    for spelling in known:
        if name.lower() == spelling.lower():
            return spelling
    raise ValueError(
        f"Unknown precision {quote(precision)}. {did_you_mean(name, known)} For example: precision='highest'."
    )


@dataclasses.dataclass(frozen=True)
class KeyedDefault:
    """A default policy with the object of another library that it was made from.

    What is compiled while it holds is keyed by the object's `__jmp_key__()`, as it was then, and never by the object:
    one that is equal compiles nothing again, and one with another loss scale, say, is never answered for it.
    """

    policy: Any
    key: Hashable
    origin: Any = dataclasses.field(compare=False)


# Not a ContextVar or a module global: either, read while tracing, goes stale at the second call of a jitted function.
_CONTEXT = jax.make_user_context(Policy("float32", "float32", "float32"))

# JAX's contexts belong to a thread, and asyncio runs many tasks in one: a task would see, and restore, the default of
# another. So a ContextVar, which belongs to a task, holds what `use_policy` set last, and in which thread.
_SCOPED: contextvars.ContextVar[tuple[int, Any] | None] = contextvars.ContextVar("_SCOPED", default=None)
_GLOBAL = [_CONTEXT.value]


def read_default() -> Any:
    """The policy or map that is the default one."""
    value = _CONTEXT.value
    _check_task(value)
    return value.policy if isinstance(value, KeyedDefault) else value


def read_origin() -> Any:
    """The object that the default policy was made from; `None` if there is none, or if it has changed since."""
    value = _CONTEXT.value
    is_origin_kept = isinstance(value, KeyedDefault) and value.origin.__jmp_key__() == value.key
    return value.origin if is_origin_kept else None


def set_default(policy: Hashable, spec: Any) -> None:
    """Makes a policy, and what it was made from, the default one."""
    _GLOBAL[0] = _key_by_origin(policy, spec)
    _CONTEXT.set_global(_GLOBAL[0])


@contextlib.contextmanager
def temporarily_set_default(policy: Hashable, spec: Any) -> Iterator[None]:
    """A context manager in which a policy, and what it was made from, is the default one, in this thread."""
    _check_task(_CONTEXT.value)
    value = _key_by_origin(policy, spec)
    token = _SCOPED.set((threading.get_ident(), value))
    try:
        with _CONTEXT(value):
            yield
    finally:
        _SCOPED.reset(token)


def _check_task(value: Any) -> None:
    """Checks that the default policy of this thread is the one of this asyncio task.

    Raises:
      RuntimeError: another task is inside of `use_policy`.
    """
    scoped = _SCOPED.get()
    expected = scoped[1] if scoped is not None and scoped[0] == threading.get_ident() else _GLOBAL[0]
    if value != expected:
        raise RuntimeError(
            f"The default policy is {quote(value)}, which another asyncio task of this thread set by use_policy and "
            "has yet to leave. JAX keeps it for the whole thread, so leave use_policy before the next await, or hand "
            "the policy on. For example: jmp.with_policy(model, 'mixed_bfloat16')."
        )


def _key_by_origin(policy: Hashable, spec: Any) -> Any:
    return KeyedDefault(policy, spec.__jmp_key__(), spec) if hasattr(spec, "__jmp_key__") else policy
