"""A model's parameters in the safetensors format: numbers and names, no code and no secret state.

References
----------
The format: https://github.com/huggingface/safetensors (8 bytes header length, JSON header, then the tensors).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dpcore.errors import ArgumentTypeError

_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "int16": "I16"}
_NAMES |= {"int8": "I8", "uint8": "U8", "bool": "BOOL"}


def encode(
    tensors: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str], dtypes: Mapping[str, str] | None = None
) -> bytes:
    """Return the bytes of a .safetensors file, tensors in this order, with `metadata` as free text in the header.

    `dtypes` has the format's name of a tensor's type where NumPy has none: "BF16" for bits that are given as int16.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    blocks, offset = [], 0
    for name, tensor in tensors.items():
        kind = (dtypes or {}).get(name) or _NAMES.get(tensor.dtype.name)
        if kind is None:
            raise ArgumentTypeError(f"tensors[{name!r}].dtype={tensor.dtype}: must be one of {', '.join(_NAMES)}")
        block = np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("<")).tobytes()
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [offset, offset + len(block)]}
        blocks.append(block)
        offset += len(block)
    text = json.dumps(header, separators=(",", ":")).encode()
    # The tensors must begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(blocks)
