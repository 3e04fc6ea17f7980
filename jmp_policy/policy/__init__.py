"""Policies, policies by path, their strings, and quantized formats as data."""

from ._block_formats import (
    MULTIPLE as MULTIPLE,
    MXFP4 as MXFP4,
    MXFP8 as MXFP8,
    NVFP4 as NVFP4,
    ODD_ROWS as ODD_ROWS,
    BlockFormat as BlockFormat,
    CurrentScaling as CurrentScaling,
    DelayedScaling as DelayedScaling,
    Float8 as Float8,
    needs_rng as needs_rng,
)
from ._formats import (
    E4M3 as E4M3,
    KINDS as KINDS,
    NF4 as NF4,
    PER_CHANNEL as PER_CHANNEL,
    Int4 as Int4,
    Int8 as Int8,
    NumberFormat as NumberFormat,
    Quantization as Quantization,
    StoredFormat as StoredFormat,
    find_format as find_format,
    find_operand_format as find_operand_format,
    parse_format as parse_format,
    parse_quantization as parse_quantization,
    stored_format_of as stored_format_of,
)
from ._get_policy import (
    Decorator as Decorator,
    F as F,
    FirstSpec as FirstSpec,
    Jitted as Jitted,
    PolicySpec as PolicySpec,
    get_policy as get_policy,
    is_policy_spec as is_policy_spec,
    set_default_policy as set_default_policy,
    use_policy as use_policy,
)
from ._grammar import parse_policy as parse_policy
from ._map_keys import (
    Key as Key,
    check_rule_key as check_rule_key,
    covers_path as covers_path,
    spell_key as spell_key,
)
from ._policy import (
    FROM as FROM,
    Policy as Policy,
    check_policy_x64 as check_policy_x64,
    default_origin as default_origin,
)
from ._policy_map import (
    MapRule as MapRule,
    Match as Match,
    PolicyMap as PolicyMap,
    assign_policies as assign_policies,
    default_policy as default_policy,
    list_policies as list_policies,
    make_map as make_map,
    match_policy as match_policy,
    spell_rules as spell_rules,
)
