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

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bool": "BOOL",
}


def encode(tensors: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a .safetensors file.

    Parameters
    ----------
    tensors : mapping of str to ndarray
        Written in this order.
    metadata : mapping of str to str
        Free text for the header.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    blocks, offset = [], 0
    for name, tensor in tensors.items():
        block = np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("<")).tobytes()
        header[name] = {
            "dtype": _NAMES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(block)],
        }
        blocks.append(block)
        offset += len(block)
    text = json.dumps(header, separators=(",", ":")).encode()
    # The tensors must begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(blocks)
