"""Replacements for the matmul in the fields of Flax layers."""

from .._attention import attention_format_of as attention_format_of, multiply_padded as multiply_padded
from .._operations import multiplies_8_bits as multiplies_8_bits
from .._ragged_dot import wide_ragged_dot as wide_ragged_dot
from ._cache import (
    CACHED as CACHED,
    SCALE as SCALE,
    CacheSlot as CacheSlot,
    attend_to_slots as attend_to_slots,
    explain_unused_cache as explain_unused_cache,
)
from ._layer import (
    LayerProduct as LayerProduct,
    Multiply as Multiply,
    Promote as Promote,
    WeightedLayer as WeightedLayer,
    attend as attend,
    find_layer_row as find_layer_row,
    has_fewer_bits as has_fewer_bits,
    is_own as is_own,
    multiply_wide as multiply_wide,
)
from ._plan import (
    LayerFacts as LayerFacts,
    LayerPlan as LayerPlan,
    find_accumulate_dtype as find_accumulate_dtype,
    plan_layer as plan_layer,
    spell_format as spell_format,
)
