"""Triton's interpreter without what it works out again at every operation.

It does the same arithmetic on the same arrays. Shapes, types and constants follow from what they are made of, and are
made once; two operands of one type are ready as they are.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest


def of_shape(shape: Any) -> tuple[int, ...]:
    """Return a shape of Triton's, whose entries may be constants of its own, as plain numbers."""
    return tuple([getattr(size, "value", size) for size in shape])


def remembering(begin: Callable[..., None], own: set[str], key: Callable[..., Any], given: Callable[..., Any]) -> Any:
    """Return an `__init__` that takes what follows from a key alone from an object of the same key.

    `given` returns the attributes that are each object's own, named by `own`.
    """
    kept: dict[Any, dict[str, Any]] = {}

    def init(self: Any, *args: Any) -> None:
        which = key(*args)
        if which not in kept:
            begin(self, *args)
            kept[which] = {name: value for name, value in vars(self).items() if name not in own}
        else:
            vars(self).update(kept[which], **given(*args))

    return init


def hasten(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter remember what follows from types and shapes, and leave out checks whose result none takes."""
    from triton.language import core, semantic
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    # For every sum of integers it computes whether they overflow, by a dozen further operations. The check that takes
    # the result is left out unless its `debug` is set, which it is not.
    assert not builder.options.debug
    patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))

    make, dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def numpy_type(one: Any) -> Any:
        if type(one) is not core.dtype:
            return make(one)
        if one.name not in dtypes:
            dtypes[one.name] = make(one)
        return dtypes[one.name]

    patch.setattr(interpreter, "_get_np_dtype", numpy_type)

    def shape_of(handle: Any, kind: Any) -> Any:
        return of_shape(kind.shape) if kind.is_block() else None

    def of_tensor(handle: Any, kind: Any) -> dict[str, Any]:
        return {"handle": handle, "type": kind, "dtype": kind.scalar}

    init = remembering(core.tensor.__init__, {"handle", "type", "dtype"}, shape_of, of_tensor)
    patch.setattr(core.tensor, "__init__", init)

    def of_block(element: Any, shape: Any) -> Any:
        return str(element), of_shape(shape)

    init = remembering(core.block_type.__init__, {"element_ty"}, of_block, lambda element, _: {"element_ty": element})
    patch.setattr(core.block_type, "__init__", init)

    # Without division, operands of one type need no other; a number beside a tensor becomes a tensor of its kind.
    check = semantic.TritonSemantic.binary_op_type_checking_impl
    constants = dict[Any, Any]()

    def checked(self: Any, lhs: Any, rhs: Any, *given: Any) -> Any:
        key = None
        if len(given) < 3 and type(lhs) is core.tensor and not lhs.dtype.is_ptr():
            if type(rhs) is core.tensor and lhs.type.name == rhs.type.name:
                return lhs, rhs
            if type(rhs) in (int, float):
                key = lhs.type.name, type(rhs), repr(rhs)  # 0.0 == -0.0
                if key in constants:
                    return lhs, constants[key]
        left, right = check(self, lhs, rhs, *given)
        if key and left is lhs:
            right.handle.data.flags.writeable = False  # others will read it
            constants[key] = right
        return left, right

    patch.setattr(semantic.TritonSemantic, "binary_op_type_checking_impl", checked)

    # For each launch it goes through all names of the language.
    look, found = interpreter._patch_lang, dict[Any, list[Any]]()

    def language_of(kernel: Any) -> Any:
        if kernel not in found:
            scope = look(kernel)
            found[kernel] = [(owner, name, getattr(owner, name)) for owner, name, _ in scope._changes]
            return scope
        scope = interpreter._LangPatchScope()
        for change in found[kernel]:
            scope.set_attr(*change)
        return scope

    patch.setattr(interpreter, "_patch_lang", language_of)
