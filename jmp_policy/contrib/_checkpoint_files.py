"""Folders in the style of Hugging Face: tensors in safetensors files, and the quantization that `config.json` names."""

import json
import math
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from .._base import hide_frames, is_array, quote
from ..policy import E4M3, MXFP4, NF4, Int4, Int8, Policy, PolicyMap, StoredFormat, get_policy
from ._checkpoint_arrays import Header
from ._checkpoint_layouts import FLOATS

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

_DTYPES = {
    name: np.dtype(dtype)
    for name, dtype in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U64": np.uint64,
        "U32": np.uint32,
        "U16": np.uint16,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}


class Source:
    """Tensors of a checkpoint: their headers, and the faults of its files. Tensors are read one by one."""

    def __init__(self, source: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        self.headers: dict[str, Header] = {}
        self.problems: list[str] = []
        self.config: dict[str, Any] = {}
        self._arrays: Mapping[str, Any] = {}
        self._places: dict[str, tuple[Path, int]] = {}  # of each tensor: its file, and its first byte
        if isinstance(source, Mapping):
            self.name = "the mapping"
            self._take_arrays(source)
        else:
            self.name = repr(os.fspath(source))
            self._open_folder(Path(source))

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor as a NumPy array, which reads its file where it is used."""
        if name in self._arrays:
            return np.asarray(self._arrays[name])
        (path, start), (shape, dtype) = self._places[name], self.headers[name]
        if not math.prod(shape):
            return np.empty(shape, dtype)
        octets = np.memmap(path, np.uint8, "r", start, (math.prod(shape) * dtype.itemsize,))
        return np.asarray(octets).view(dtype).reshape(shape)

    def _take_arrays(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = arrays
        for name, array in arrays.items():
            if is_array(array):
                self.headers[name] = Header(tuple(array.shape), np.dtype(array.dtype))
            else:
                self.problems.append(f"{name!r} is {quote(array)}, not an array")

    def _open_folder(self, folder: Path) -> None:
        self.config = read_config(folder)
        index = folder / INDEX
        if index.exists() and not (folder / WEIGHTS).exists():
            owners = _read_json(index).get("weight_map", {})
            files = sorted({folder / file for file in owners.values()})
        else:
            whole = folder / WEIGHTS
            owners, files = {}, [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))
        if not files:
            raise ValueError(
                f"{str(folder)!r} has no safetensors files. Give the folder of a checkpoint with {WEIGHTS!r}, or a "
                "mapping of names to arrays."
            )
        for path in files:
            try:
                self._open_file(path)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                self.problems.append(f"the file {path.name!r} cannot be read: {_explain(error)}")
        self.problems += [
            f"{name!r} is in {INDEX!r}, but not in {file!r}"
            for name, file in owners.items()
            if folder / file != self._places.get(name, (None,))[0]
        ]

    def _open_file(self, path: Path) -> None:
        """Reads the header of a file: 8 bytes with its length, JSON, then the bytes of the tensors."""
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if 8 + length > size:
                raise ValueError(f"it has {size} bytes, which are fewer than its header says")
            entries = json.loads(file.read(length))
        for name, entry in entries.items():
            if name != "__metadata__":
                self._add_tensor(path, name, entry, 8 + length, size)

    def _add_tensor(self, path: Path, name: str, entry: dict[str, Any], first: int, size: int) -> None:
        (start, end), shape, dtype = entry["data_offsets"], tuple(entry["shape"]), _DTYPES.get(entry["dtype"])
        if not all(type(length) is int and length >= 0 for length in shape):
            self.problems.append(f"{name!r} has the shape {list(shape)}, which is not one")
        elif dtype is None:
            self.problems.append(f"{name!r} has the dtype {entry['dtype']!r}, which is not supported")
        elif first + end > size:
            self.problems.append(f"the file {path.name!r} is cut off in {name!r}: it has {size} bytes of {first + end}")
        elif start < 0 or end - start != math.prod(shape) * dtype.itemsize:
            self.problems.append(f"{name!r} has {end - start} bytes, which are not those of {dtype}{list(shape)}")
        elif name in self._places:
            self.problems.append(f"{name!r} is in two files: {self._places[name][0].name!r} and {path.name!r}")
        else:
            self.headers[name], self._places[name] = Header(shape, dtype), (path, first + start)


def _explain(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "it does not exist"
    return (
        str(error) if type(error) is ValueError else f"it is not a safetensors file ({type(error).__name__}: {error})"
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not JSON: {error}") from None
    if not isinstance(read, dict):
        raise ValueError(f"{str(path)!r} is not a JSON object. For example: {{'torch_dtype': 'bfloat16'}}.")
    return read


def read_config(folder: Path) -> dict[str, Any]:
    """Reads `config.json` of a folder; returns an empty dict if there is none."""
    path = folder / CONFIG
    return _read_json(path) if path.exists() else {}


def save_folder(folder: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> None:
    """Writes the tensors and the config. Existing files are never overwritten."""
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise ImportError(
            "write_quantized needs the package safetensors: pip install 'jmp-policy[safetensors]'."
        ) from error
    for name in (WEIGHTS, CONFIG):
        if (folder / name).exists():
            raise FileExistsError(
                f"{str(folder / name)!r} exists already. Give a new folder, or remove the file first."
            )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / WEIGHTS, {"format": "pt"}
    )
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


SUPPORTED = "gptq, awq, bitsandbytes, compressed-tensors, fp8 and mxfp4"


@hide_frames
def policy_of_checkpoint(folder: str | os.PathLike[str]) -> Policy | PolicyMap:
    """Returns the policy of a quantized checkpoint, by the `quantization_config` of its `config.json`.

    The format covers weights of any size. Computation is in the `dtype` (or `torch_dtype`) of the config, float32 if it
    has none, over float32 parameters. Modules that the config leaves out, by `ignore` or `modules_to_not_convert`, get
    rules without quantization, and so does an `lm_head` that the files have as floats. Dots of their names become
    slashes, and any path may come before. Change these rules if your model has other names.

    Under an int4 policy, embedding tables have 8 bits: `read_quantized` rounds a floating table of the checkpoint,
    unless a rule leaves it out.

    Args:
      folder: a folder with `config.json`.

    Returns:
      A `PolicyMap` if modules are left out, else a `Policy`.

    Raises:
      ValueError: the folder has no config, or one with a quantization that is not supported.

    >>> import json, pathlib, tempfile, jmp_policy as jmp
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> config = {"quant_method": "awq", "bits": 4, "group_size": 64, "modules_to_not_convert": ["lm_head"]}
    >>> config = {"torch_dtype": "bfloat16", "quantization_config": config}
    >>> _ = (folder / "config.json").write_text(json.dumps(config))
    >>> policy = jmp.contrib.policy_of_checkpoint(folder)
    >>> policy["layers_0/up_proj"].name, policy["lm_head"].name
    ('int4/64(min_size=0)_from_mixed_bfloat16', 'mixed_bfloat16')
    """
    config = read_config(Path(folder))
    if not config:
        raise ValueError(f"{os.fspath(folder)!r} has no {CONFIG!r} with settings of a model.")
    base = _spell_base(config.get("dtype") or config.get("torch_dtype") or "float32")
    given = config.get("quantization_config")
    if given is None:
        return get_policy(base)
    policy = get_policy(f"{read_format(given)}_from_{base}")
    names = ("ignore", "modules_to_not_convert", "llm_int8_skip_modules")
    left_out = [*next((given[name] for name in names if given.get(name)), ())]
    if _has_floating_head(Path(folder)):  # GPTQ and AWQ leave it out without a word
        left_out.append("lm_head")
    if not left_out:
        return policy
    return PolicyMap(dict.fromkeys(map(_spell_pattern, left_out), base), default=policy)


def _has_floating_head(folder: Path) -> bool:
    header = Source(folder).headers.get("lm_head.weight") if any(folder.glob("*.safetensors")) else None
    return header is not None and header.dtype in FLOATS


def _spell_base(dtype: str) -> str:
    dtype = str(dtype).removeprefix("torch.")
    return dtype if dtype == "float32" else f"mixed_{dtype}"


def _spell_pattern(name: str) -> str:
    """Returns a pattern of paths for a name of modules, in which `*` is any part and `re:` begins a pattern."""
    if name.startswith("re:"):
        return f"(.*/)?{name.removeprefix('re:').removeprefix('.*').replace(chr(92) + '.', '/')}"
    parts = [re.escape(part).replace(r"\*", "[^/]*") for part in name.split(".")]
    return f"(.*/)?{'/'.join(parts)}"


def read_format(config: Mapping[str, Any]) -> StoredFormat:
    """Returns the format of weights that a `quantization_config` names."""
    match method := config.get("quant_method"):
        case "mxfp4":
            return MXFP4(min_size=0)
        case "gptq" | "awq":
            known = ("gptq", "gptq_v2", "", None) if method == "gptq" else ("gemm", None)
            _require_setting(config, "checkpoint_format" if method == "gptq" else "version", known)
            _require_setting(config, "bits" if "bits" in config else "w_bit", (4,))
            size = config.get("group_size", config.get("q_group_size", 128))
            return Int4(block_size=size, min_size=0)
        case "bitsandbytes":
            _require_setting(config, "bnb_4bit_quant_type", ("nf4",))
            return NF4(min_size=0)
        case "fp8":
            if config.get("weight_block_size") != [128, 128]:
                _require_setting(config, "weight_block_size", ("[128, 128]",))
            return E4M3(activations=config.get("activation_scheme") == "dynamic", min_size=0)
        case "compressed-tensors":
            return _read_scheme(config)
    raise ValueError(f"The quant_method {quote(method)} is not supported yet. Supported are {SUPPORTED}.")


def _require_setting(config: Mapping[str, Any], name: str, known: Collection[Any], place: str = "") -> None:
    value = config.get(name)
    value = value.lower() if isinstance(value, str) else value
    if value not in known:
        wanted = " or ".join(repr(one) for one in known if one)
        raise ValueError(
            f"{name} of the {place or 'quantization_config'} is {quote(value)}, which is not supported yet. "
            f"Supported is {wanted}."
        )


def _read_scheme(config: Mapping[str, Any]) -> StoredFormat:
    """Returns the format of a compressed-tensors config with one group of modules."""
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1 or not groups[0].get("weights"):
        raise ValueError(f"The config has {len(groups)} config_groups with weights; one is supported so far.")
    weights, inputs = groups[0]["weights"], groups[0].get("input_activations")
    place = "weights of compressed-tensors"
    if weights.get("type") == "float":
        _require_setting(config, "format", ("float-quantized", "naive-quantized"))
        _require_setting(weights, "num_bits", (8,), place)
        _require_setting(weights, "strategy", ("channel",), place)
        return E4M3(block_size=-1, activations=inputs is not None, min_size=0)
    _require_setting(weights, "type", ("int", "float"), place)
    _require_setting(weights, "num_bits", (4, 8), place)
    if weights["num_bits"] == 8:
        _require_setting(config, "format", ("int-quantized", "naive-quantized"))
        _require_setting(weights, "strategy", ("channel",), place)
        return Int8(activations=inputs is not None, min_size=0)
    _require_setting(config, "format", ("pack-quantized",))
    _require_setting(weights, "strategy", ("group", "channel"), place)
    return Int4(block_size=weights["group_size"] if weights["strategy"] == "group" else -1, min_size=0)


class StoredWeights(NamedTuple):
    """Facts about the quantized weights of a checkpoint, for a config."""

    formats: list[StoredFormat]  # of each weight; their sizes of blocks are equal
    is_symmetric: bool
    is_ordered: bool  # True if a weight has an input order
    left_out: list[str]  # names of modules that are not quantized


def describe_weights(format: str, weights: StoredWeights) -> dict[str, Any]:
    """Returns the `quantization_config` of a `format` of `write_quantized`; `read_format` is its inverse."""
    size = getattr(weights.formats[0], "block_size", -1)
    config: dict[str, Any] = {"quant_method": format.removesuffix("_v2")}
    match format:
        case "gptq" | "gptq_v2":
            ways = {"desc_act": weights.is_ordered, "sym": weights.is_symmetric, "checkpoint_format": format}
            config |= {"bits": 4, "group_size": size, **ways}
        case "awq":
            config |= {"bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
        case "fp8":
            # Transformers and vLLM reject any other scheme for squares, also where a policy leaves inputs as they are.
            config |= {"fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
        case "bitsandbytes":
            config |= {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False}
            return config | {"llm_int8_skip_modules": weights.left_out}
        case "compressed-tensors":
            return config | _describe_scheme(weights, size)
    return config | {"modules_to_not_convert": weights.left_out}


def _describe_scheme(weights: StoredWeights, size: int) -> dict[str, Any]:
    is_float = isinstance(weights.formats[0], E4M3)
    bits = 8 if isinstance(weights.formats[0], Int8 | E4M3) else 4
    common = {"num_bits": bits, "type": "float" if is_float else "int"}
    grouped = {"strategy": "channel"} if size == -1 else {"strategy": "group", "group_size": size}
    tokens = {**common, "symmetric": True, "strategy": "token", "dynamic": True}
    is_dynamic = bits == 8 and any(getattr(format, "activations", False) for format in weights.formats)
    group = {
        "targets": ["Linear"],
        "weights": {**common, "symmetric": weights.is_symmetric, **grouped},
        "input_activations": tokens if is_dynamic else None,
    }
    form = "float-quantized" if is_float else "int-quantized" if bits == 8 else "pack-quantized"
    settings = {"format": form, "quantization_status": "compressed", "config_groups": {"group_0": group}}
    return settings | {"ignore": weights.left_out}
