"""The mixed-precision names of Keras 3 and of `tf.keras.mixed_precision.experimental`.

>>> import jmp_policy as jmp
>>> from jmp_policy.compat import keras
>>> keras.set_dtype_policy("mixed_bfloat16")
>>> keras.dtype_policy(), jmp.default_policy().name
(<DTypePolicy "mixed_bfloat16">, 'mixed_bfloat16')
>>> keras.set_dtype_policy("float32")

They are Keras's in name, attributes, errors and files, which `dtype_policies.serialize` writes and `deserialize` reads.
The tables list the differences.

| of policies              | in Keras                                     | here                                      |
|--------------------------|----------------------------------------------|-------------------------------------------|
| the global policy        | every layer made from then on has it         | what `with_policy` is applied to has it   |
| layers                   | Keras's take a policy as `dtype`             | Flax's, by `with_policy`; Keras's do not  |
| changing a policy        | possible; it has no hash                     | impossible, but for maps; it has a hash   |
| `"uint8"`, `"int32"`     | policies                                     | errors: integers are never cast           |
| `"p=f32,c=bf16,o=f32"`   | an error                                     | a policy, as for `jmp_policy.get_policy`  |
| `convert_input`          | makes a tensor of a NumPy array              | NumPy in, NumPy out                       |
| private names            | `_get_quantized_dtype_policy_by_str`         | `dtype_policies.get`                      |
| TensorFlow's `Policy`    | read without its loss scale                  | read with it                              |

| of maps                  | in Keras                                     | here                                      |
|--------------------------|----------------------------------------------|-------------------------------------------|
| a rule for `"block"`     | for the layer of that path alone             | once frozen, for all layers inside, too   |
| the dictionary given     | becomes the map                              | is copied                                 |
| a map as the default     | an error                                     | its own default                           |
| a bad name as a value    | "Cannot interpret the assigned value"        | the name's own error                      |
| `get_config`, no default | forgets the names of the map's policies      | keeps them, and changes nothing           |

| of quantization          | in Keras                                     | here                                      |
|--------------------------|----------------------------------------------|-------------------------------------------|
| `"int4"`                 | per channel; `model.quantize`: blocks of 128 | blocks of 128; per channel is `"int4/-1"` |
| `"int4/-1"`              | symmetric                                    | with a zero point, as all blocks have     |
| `"int4/100"` of 256      | the last block is padded                     | an error that names the sizes that divide |
| `"int4"` embeddings      | 4 bits                                       | 8; 4 with `"int4/128(table_bits=4)"`      |
| small layers             | quantized                                    | stay, below `min_size` weights            |
| `amax_history_length`    | any int, or a bool                           | a positive int                            |
| `"mxfp8"`, `"nvfp4"`     | errors: there is nothing like them           | modes, and `"mxfp4"`                      |
| `gptq`, `awq`            | `model.quantize` with a config calibrates    | `quant.gptq` does                         |
| `"gptq/2/64"`            | 2, 3, 4 or 8 bits, in groups                 | 4 bits; 8 bits with `"gptq/8/-1"` alone   |
| `ternary`                | a mode                                       | an error: there is nothing like it        |

| of loss scaling          | in Keras                                     | here                                      |
|--------------------------|----------------------------------------------|-------------------------------------------|
| `LossScaleOptimizer`     | an optimizer with variables, name, config    | an optax transformation with a state      |
| its other arguments      | a `ValueError`                               | a `TypeError`; the inner one takes them   |
| `dynamic=False`          | an error; in `tf.keras` a constant scale     | a constant scale                          |
| the second argument      | `initial_scale`; in `tf.keras` `dynamic`     | `initial_scale`; a bool is an error       |
| bounds of the scale      | none; in `tf.keras` a floor of 1             | a floor of 1, a ceiling of 2**24          |
| a skipped step           | in `tf.keras` counts as an iteration         | is not counted, as in Keras 3             |
| the scaled loss          | in `tf.keras` in the loss's own dtype        | in float32, which holds 2**15 times 2     |
| overwriting by gradient  | `variable.overwrite_with_gradient`           | state under `"_overwrite_with_gradient"`  |
"""

from ...loss_scale import LossScale as LossScale
from . import dtype_policies as dtype_policies
from ._dtype_policy import DTypePolicy as DTypePolicy, FloatDTypePolicy as FloatDTypePolicy
from ._dtype_policy_map import DTypePolicyMap as DTypePolicyMap
from ._global_policy import (
    dtype_policy as dtype_policy,
    global_policy as global_policy,
    set_dtype_policy as set_dtype_policy,
    set_global_policy as set_global_policy,
    set_policy as set_policy,
)
from ._loss_scale import LossScaleOptimizer as LossScaleOptimizer, Policy as Policy
from ._quantized_dtype_policy import (
    AWQDTypePolicy as AWQDTypePolicy,
    GPTQDTypePolicy as GPTQDTypePolicy,
    Int4DTypePolicy as Int4DTypePolicy,
    QuantizedDTypePolicy as QuantizedDTypePolicy,
    QuantizedFloat8DTypePolicy as QuantizedFloat8DTypePolicy,
)
