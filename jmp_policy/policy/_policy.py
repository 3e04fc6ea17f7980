"""The policy class, and the JAX context of the default policy."""

import contextlib
import contextvars
import dataclasses
import threading
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._base import (
    DTypeLike,
    at_least_float32,
    cast_floating,
    check_x64,
    did_you_mean,
    first_floating_dtype,
    parse_dtype,
    quote,
)
from ..loss_scale import DynamicLossScale, LossScale, NoOpLossScale
from ._formats import Quantization, parse_quantization

T = TypeVar("T")

Precision = str | jax.lax.Precision | jax.lax.DotAlgorithmPreset | None

PRECISIONS = ("default", "high", "highest", "bfloat16", "tensorfloat32", "float32")
"""Names that `jax.default_matmul_precision` accepts, besides those of `jax.lax.DotAlgorithmPreset`."""


class _Default:
    """A default that follows another argument, with a readable signature."""

    def __init__(self, name: str):
        self._name = name

    def __repr__(self) -> str:
        return self._name


_LIKE_PARAMS: Any = _Default("param_dtype")
_LIKE_COMPUTE: Any = _Default("compute_dtype")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, init=False, eq=False, repr=False)
class Policy:
    """Dtypes of parameters, computation and outputs.

    Immutable, hashable and a pytree without leaves: a policy passes through `jit`, `vmap`, `scan` and `grad` as an
    argument, a result or a field. Equal policies are one object, however their dtypes were spelled.

    Args:
      param_dtype: dtype that parameters are stored in; `None` leaves them unchanged. Default: float32.
      compute_dtype: dtype that inputs and parameters are cast to for computation; `None` means the dtype of the first
        floating input, which `resolve` fills in. Default: the param dtype.
      output_dtype: dtype that outputs are cast to; `None` leaves them unchanged. Default: the compute dtype.
      precision: matmul precision, as for `jax.default_matmul_precision` (`"highest"`, `jax.lax.Precision.HIGHEST`,
        ...); `None` does not set it.
      quantization: format of the matmuls and the stored weights of Flax layers: `quant.Int8()`, `quant.Int4()`,
        `quant.E4M3()`, `quant.NF4()`, `quant.Float8()`, `quant.MXFP8()`, `quant.MXFP4()`, `quant.NVFP4()`, a string
        such as `"int4/64"`, or `None`. It applies to modules; a plain function has no weights to quantize.
      reduce_dtype: dtype in which gradients are summed over devices; `None` leaves that to the function.
        `value_and_grad` and `grad`, also in `jmp_policy.nnx`, and `optim.minimize` read it from the policies of the
        function that they trace. `jax.grad` does not.
      accumulate_dtype: output dtype of matmuls and convolutions in Flax layers and in `autocast`, as
        `preferred_element_type`. The bias is added in it. The result is then cast once: to the compute dtype inside the
        model, to the output dtype at its boundary. A head under `"p=f32,c=bf16,o=f32,a=f32"` returns logits that were
        never rounded to bfloat16, and its float32 weight gets a float32 gradient. `None` means the compute dtype. A
        `jnp.dot` in a module's own code is not affected, except in `autocast`. Forward mode is not supported.
      cache: dtype in which Flax's attention layers store keys and values in decode mode: `"int8"`, `"float8_e4m3fn"`
        (or `"float8"`), or `None` for the compute dtype. Each head at each position has a float32 scale, and is rounded
        once, when it is written. Attention reads the stored values in the compute dtype.

    Raises:
      ValueError: a dtype is not floating, the accumulate dtype cannot represent all values of the compute dtype, or the
        precision, quantization or cache is unknown.

    >>> import jax, numpy as np, jmp_policy as jmp
    >>> policy = jmp.Policy("float32", "bfloat16", "float32")
    >>> policy is jmp.Policy(np.float32, "bf16", jax.numpy.float32)
    True
    >>> jmp.Policy(compute_dtype="bfloat16") is jmp.get_policy("mixed_bfloat16")
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
    cache: np.dtype | None

    def __new__(
        cls,
        param_dtype: DTypeLike | None = "float32",
        compute_dtype: DTypeLike | None = _LIKE_PARAMS,
        output_dtype: DTypeLike | None = _LIKE_COMPUTE,
        *,
        precision: Precision = None,
        quantization: Quantization | str | None = None,
        reduce_dtype: DTypeLike | None = None,
        accumulate_dtype: DTypeLike | None = None,
        cache: DTypeLike | None = None,
    ) -> "Policy":
        """Returns the interned policy of these fields."""
        compute_dtype = param_dtype if compute_dtype is _LIKE_PARAMS else compute_dtype
        output_dtype = compute_dtype if output_dtype is _LIKE_COMPUTE else output_dtype
        fields = (
            _parse_optional_dtype(param_dtype, "param_dtype"),
            _parse_optional_dtype(compute_dtype, "compute_dtype"),
            _parse_optional_dtype(output_dtype, "output_dtype"),
            _parse_precision(precision),
            parse_quantization(quantization, where=" for quantization"),
            _parse_optional_dtype(reduce_dtype, "reduce_dtype"),
            _parse_optional_dtype(accumulate_dtype, "accumulate_dtype"),
            _parse_cache(cache),
        )
        _check_accumulate_dtype(fields[-2], fields[1])
        new = object.__new__(cls)
        vars(new).update(zip(_FIELDS, fields, strict=True))
        return _INTERNED.setdefault(fields, new)

    def cast_to_param(self, tree: T) -> T:
        """Casts the floating arrays of a tree to `param_dtype`."""
        return cast_floating(tree, self.param_dtype)

    def cast_to_compute(self, tree: T) -> T:
        """Casts the floating arrays of a tree to `compute_dtype`."""
        return cast_floating(tree, self.compute_dtype)

    def cast_to_output(self, tree: T) -> T:
        """Casts the floating arrays of a tree to `output_dtype`."""
        return cast_floating(tree, self.output_dtype)

    def with_output_dtype(self, output_dtype: DTypeLike | None) -> "Policy":
        """Returns this policy with another output dtype."""
        return self.replace(output_dtype=output_dtype)

    def replace(self, **fields: Any) -> "Policy":
        """Returns this policy with some fields replaced.

        Raises:
          ValueError: a Policy has no field of that name.
        """
        for name in fields:
            if name not in _FIELDS:
                raise ValueError(
                    f"Unknown field {quote(name)} of a Policy. {did_you_mean(name, _FIELDS)} "
                    "For example: policy.replace(output_dtype='float32')."
                )
        return Policy(**vars(self) | fields)

    def resolve(self, *inputs: Any) -> "Policy":
        """Fills in a missing compute dtype from the first floating array of the inputs, else float32.

        Raises:
          ValueError: the accumulate dtype cannot represent all of its values.

        >>> import numpy as np, jmp_policy as jmp
        >>> str(jmp.Policy("float32", None, None).resolve(3, np.ones(2, np.float16)))
        'params=float32,compute=float16,output=none'
        """
        if self.compute_dtype is not None:
            return self
        return self.replace(compute_dtype=first_floating_dtype(inputs) or np.float32)

    def loss_scale(self) -> LossScale:
        """Returns a dynamic loss scale if the compute dtype is float16, else a no-op."""
        return DynamicLossScale() if self.compute_dtype == np.float16 else NoOpLossScale()

    @property
    def full_dtype(self) -> np.dtype:
        """The dtype of operations that need a wide one: float64 if parameters or the compute dtype are, else float32.

        >>> import jmp_policy as jmp
        >>> jmp.get_policy("params=float64,compute=float32,output=float64").full_dtype
        dtype('float64')
        """
        return np.dtype(np.float64 if _FLOAT64 & {self.param_dtype, self.compute_dtype} else np.float32)

    @property
    def name(self) -> str:
        """The shortest string that `get_policy` reads back as this policy.

        >>> import jmp_policy as jmp
        >>> jmp.Policy("float32", "float16", "float16").name
        'mixed_float16'
        """
        if self.quantization is not None:
            return f"{self.quantization}{FROM}{self.replace(quantization=None).name}"
        param, compute, output = (_spell_value(d) for d in (self.param_dtype, self.compute_dtype, self.output_dtype))
        options = (self.precision, self.reduce_dtype, self.accumulate_dtype, self.cache)
        has_options = any(option is not None for option in options)  # `np.dtype("float64") == None` is True
        if not has_options and compute == output:
            if param == compute:
                return "infer" if param == "none" else param
            if param == "float32" and compute in ("float16", "bfloat16"):
                return f"mixed_{compute}"
        return str(self)

    def get_config(self) -> dict[str, str | None]:
        """Returns the three dtypes, and the other fields that are set, as strings and `None`, for JSON.

        >>> import jmp_policy as jmp
        >>> jmp.Policy("float32", "float16", None).get_config()
        {'param_dtype': 'float32', 'compute_dtype': 'float16', 'output_dtype': None}
        """
        config = {name: None if value is None else str(value) for name, value in vars(self).items()}
        return {name: value for name, value in config.items() if value is not None or name not in _OPTIONAL}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Policy":
        """Returns the policy of a `get_config()`.

        Raises:
          ValueError: a field is missing, unknown, or has a bad value.
        """
        required = set(_FIELDS) - set(_OPTIONAL)
        if not isinstance(config, Mapping) or not required <= config.keys() <= set(_FIELDS):
            got = quote(sorted(config, key=str) if isinstance(config, Mapping) else config)
            raise ValueError(
                f"A policy's config has the keys {sorted(required)}, and optionally 'precision', 'quantization', "
                f"'reduce_dtype', 'accumulate_dtype' and 'cache', got {got}. "
                f"For example: {Policy('float32', 'bfloat16', 'float32').get_config()}."
            )
        return cls(**config)

    def __str__(self) -> str:
        dtypes = {"params": self.param_dtype, "compute": self.compute_dtype, "output": self.output_dtype}
        options = {
            "accumulate": self.accumulate_dtype,
            "reduce": self.reduce_dtype,
            "precision": self.precision,
            "cache": self.cache,
        }
        given = dtypes | {key: value for key, value in options.items() if value is not None}
        plain = ",".join(f"{key}={_spell_value(value)}" for key, value in given.items())
        return plain if self.quantization is None else f"{self.quantization}{FROM}{plain}"

    def __repr__(self) -> str:
        return f"Policy({', '.join(f'{name}={value!r}' for name, value in self.get_config().items())})"

    def __reduce__(self) -> tuple:  # copies and pickles are the interned object again
        return Policy.from_config, (self.get_config(),)


def check_policy_x64(policy: Policy) -> None:
    """Raises a `ValueError` if a policy has float64 and JAX would make float32 of it."""
    wide = [name for name, value in vars(policy).items() if value in _FLOAT64]
    if not set(wide).isdisjoint(_FIELDS[:3]):
        example = policy.replace(**dict.fromkeys(wide, "float32")).name
        check_x64(vars(policy)[wide[0]], f"The policy {policy.name!r}", repr(example))


_FLOAT64 = frozenset({np.dtype(np.float64)})  # `np.dtype("float64") == None` is True
FROM = "_from_"  # between the quantization and the rest of a policy's name
_FIELDS = tuple(field.name for field in dataclasses.fields(Policy))
_OPTIONAL = ("precision", "quantization", "reduce_dtype", "accumulate_dtype", "cache")
_CACHES = ("int8", "float8_e4m3fn")
_INTERNED: dict[tuple, Policy] = {}


def _spell_value(value: object) -> str:
    return "none" if value is None else str(value)


def _parse_optional_dtype(spec: DTypeLike | None, field: str) -> np.dtype | None:
    return None if spec is None else parse_dtype(spec, where=f" for {field}", example=f"{field}='bfloat16'")


def _check_accumulate_dtype(accumulate_dtype: np.dtype | None, compute_dtype: np.dtype | None) -> None:
    if accumulate_dtype is None or compute_dtype is None:
        return
    wide, narrow = jnp.finfo(accumulate_dtype), jnp.finfo(compute_dtype)
    if wide.nmant < narrow.nmant or wide.maxexp < narrow.maxexp or wide.minexp > narrow.minexp:
        raise ValueError(
            f"Products of {str(compute_dtype)!r} cannot be accumulated in {str(accumulate_dtype)!r}, which cannot "
            f"represent all values of compute_dtype={str(compute_dtype)!r}. "
            f"For example: accumulate_dtype={str(at_least_float32(compute_dtype))!r}."
        )


def _parse_cache(cache: DTypeLike | None) -> np.dtype | None:
    if cache is None:
        return None
    try:
        name = cache.strip().lower() if isinstance(cache, str) else np.dtype(cache).name
    except TypeError:  # not a dtype
        name = str(cache)
    name = "float8_e4m3fn" if name == "float8" else name
    if name not in _CACHES:
        raise ValueError(f"Unknown cache {quote(cache)}. {did_you_mean(name, _CACHES)} For example: cache='int8'.")
    return np.dtype(name)


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
class _KeyedDefault:
    """A default policy and the object that it was made from, whose `__jmp_key__()` is part of jit keys."""

    policy: Any
    key: Hashable
    origin: Any = dataclasses.field(compare=False)


# A ContextVar or a module global would not be part of the `jit` key.
_CONTEXT = jax.make_user_context(Policy("float32", "float32", "float32"))

# JAX contexts belong to a thread, and asyncio runs many tasks in one thread: a task could see and restore the default
# of another task. This ContextVar, which belongs to a task, has the last default that `use_policy` set, and its thread.
_SCOPED: contextvars.ContextVar[tuple[int, Any] | None] = contextvars.ContextVar("_SCOPED", default=None)
_GLOBAL = [_CONTEXT.value]
_LOCK = threading.RLock()  # between the two places of the default, also for signal handlers


def default_origin() -> Any:
    """Returns the object that the default policy was made from, or None if there is none or it has changed since."""
    value: Any = _CONTEXT.value
    is_origin_kept = isinstance(value, _KeyedDefault) and value.origin.__jmp_key__() == value.key
    return value.origin if is_origin_kept else None


def set_default(policy: Hashable, spec: Any) -> None:
    value = _key_by_origin(policy, spec)
    with _LOCK:
        _GLOBAL[0] = value
        _CONTEXT.set_global(value)


@contextlib.contextmanager
def temporarily_set_default(policy: Hashable, spec: Any) -> Iterator[None]:
    read_default()
    value = _key_by_origin(policy, spec)
    token = _SCOPED.set((threading.get_ident(), value))
    try:
        with _CONTEXT(value):
            yield
    finally:
        _SCOPED.reset(token)


def read_default() -> Any:
    """Returns the default policy or map. Raises if another asyncio task of this thread is inside `use_policy`."""
    with _LOCK:  # other threads may set the default
        value, everywhere = _CONTEXT.value, _GLOBAL[0]
    scoped = _SCOPED.get()
    expected = scoped[1] if scoped is not None and scoped[0] == threading.get_ident() else everywhere
    if value != expected:
        raise RuntimeError(
            f"The default policy is {quote(value)}, which another asyncio task of this thread has set "
            "by use_policy. JAX keeps it for the whole thread, so leave use_policy before the next await, or pass the "
            "policy itself. For example: jmp.with_policy(model, 'mixed_bfloat16')."
        )
    return value.policy if isinstance(value, _KeyedDefault) else value


def _key_by_origin(policy: Hashable, spec: Any) -> Any:
    return _KeyedDefault(policy, spec.__jmp_key__(), spec) if hasattr(spec, "__jmp_key__") else policy
