"""In which dtype a compiled program multiplies matrices, read from XLA's text of it.

That text is for people, and XLA promises nothing about it. So whatever is not understood is left out, and who asks
must do without an answer.
"""

import re

from jax.stages import Compiled

_DTYPES = {
    "f64": "float64",
    "f32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "s8": "int8",
    "s32": "int32",
}

_VALUE = re.compile(r"%?([\w.-]+) = (\w+)\[")
_PRODUCT = re.compile(r" (?:dot|convolution|custom-call)\((?:\w+\[[^ ]* )?%?([\w.-]+), (?:\w+\[[^ ]* )?%?([\w.-]+)")
_LIBRARY = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul)[^"]*"')  # of cuBLAS, hipBLASLt, oneDNN


def list_products(compiled: Compiled) -> list[str]:
    """The dtype that each matrix product of a compiled program reads, where the program tells.

    >>> import jax, jax.numpy as jnp
    >>> matrix = jnp.ones((64, 64))
    >>> list_products(jax.jit(jnp.matmul).lower(matrix, matrix).compile())
    ['float32']
    """
    return read_products(compiled.as_text() or "")


def read_products(text: str) -> list[str]:
    """The dtypes that the matrix products of an HLO module read; a product of two dtypes is left out.

    >>> read_products("%a = bf16[8,8]{1,0} parameter(0)" + chr(10) + "ROOT %c = f32[8,8]{1,0} dot(%a, %a)")
    ['bfloat16']
    """
    dtypes = dict(_VALUE.findall(text))
    found = []
    for line in text.splitlines():
        match = _PRODUCT.search(line)
        if match is None or ("custom-call(" in line and not _LIBRARY.search(line)):
            continue
        operands = {_DTYPES.get(dtypes.get(name, "")) for name in match.groups()}
        if len(operands) == 1 and None not in operands:
            found += operands
    return [dtype for dtype in found if dtype is not None]
