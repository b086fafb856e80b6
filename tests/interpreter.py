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


def hasten(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter remember what follows from types and shapes, and leave out checks whose result none takes."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    # For every sum of integers it computes whether they overflow, by a dozen further operations. The check that takes
    # the result is left out unless its `debug` is set, which it is not.
    assert not builder.options.debug
    patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
    _types(patch)
    _operands(patch)
    _calls(patch)


def _types(patch: pytest.MonkeyPatch) -> None:
    """Let tensors and blocks of one shape share what follows from it."""
    from triton.language import core
    from triton.runtime import interpreter

    make, dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def numpy_type(one: Any) -> Any:
        if type(one) is not core.dtype:
            return make(one)
        if one.name not in dtypes:
            dtypes[one.name] = make(one)
        return dtypes[one.name]

    patch.setattr(interpreter, "_get_np_dtype", numpy_type)

    equal = core.dtype.__eq__

    def same(one: Any, other: Any) -> bool:
        return one.name == other.name if type(other) is core.dtype else equal(one, other)

    patch.setattr(core.dtype, "__eq__", same)

    begin_block, blocks = core.block_type.__init__, dict[Any, dict[str, Any]]()

    def block(self: Any, element: Any, shape: Any) -> None:
        plain = of_shape(shape)
        if (key := (element.name, plain)) not in blocks:
            begin_block(self, element, shape)
            blocks[key] = vars(self) | {"plain": plain}
        self.__dict__.update(blocks[key])
        self.element_ty = element

    patch.setattr(core.block_type, "__init__", block)

    begin_tensor, tensors = core.tensor.__init__, dict[Any, dict[str, Any]]()

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        plain = None
        if kind.is_block():
            plain = getattr(kind, "plain", None) or of_shape(kind.shape)
        if plain not in tensors:
            begin_tensor(self, handle, kind)
            tensors[plain] = vars(self).copy()
        own = self.__dict__
        own.update(tensors[plain])
        own["handle"], own["type"], own["dtype"] = handle, kind, kind.scalar

    patch.setattr(core.tensor, "__init__", tensor)


def _operands(patch: pytest.MonkeyPatch) -> None:
    """Take operands that are ready as they are."""
    from triton.language import core, semantic
    from triton.runtime import interpreter

    broadcast = semantic.TritonSemantic.broadcast_impl_value

    def together(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    patch.setattr(semantic.TritonSemantic, "broadcast_impl_value", together)

    # Without division, operands of one type need no other; a number beside a tensor becomes a tensor of its kind.
    check = semantic.TritonSemantic.binary_op_type_checking_impl
    constants = dict[Any, Any]()

    def checked(self: Any, lhs: Any, rhs: Any, *given: Any) -> Any:
        key = None
        if len(given) < 3 and type(lhs) is core.tensor and type(lhs.dtype) is core.dtype:
            if type(rhs) is core.tensor and lhs.dtype.name == getattr(rhs.dtype, "name", None):
                return together(self, lhs, rhs)
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

    # What an operation returns fits its type: it is the operands', or was converted to it.
    patch.setattr(interpreter.TensorHandle, "__post_init__", lambda self: None)

    def binary(self: Any, lhs: Any, rhs: Any, operation: Callable[..., Any]) -> Any:
        found, kind = operation(lhs.data, rhs.data), lhs.dtype.scalar
        if found.dtype != lhs.data.dtype and not interpreter._validate_np_data_size(found, kind):
            found = found.astype(interpreter._get_np_dtype(kind))
        return interpreter.TensorHandle(found, kind)

    patch.setattr(type(interpreter.interpreter_builder), "binary_op", binary)


def _calls(patch: pytest.MonkeyPatch) -> None:
    """Come from a kernel's call of the language to what it calls by one function."""
    from triton.language import core
    from triton.runtime import interpreter

    unwrap = core._unwrap_if_constexpr
    plain = {core.tensor, core.dtype, core.block_type, int, float, bool, str, type(None)}

    def unwrapped(one: Any) -> Any:
        return one if type(one) in plain else unwrap(one)

    patch.setattr(core, "_unwrap_if_constexpr", unwrapped)

    wrapper = core.builtin(unwrapped).__code__  # which asks whether there is a `_semantic`

    def patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = member.__wrapped__ if getattr(member, "__code__", None) is wrapper else member

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return inner(*args, **named)

        scope.set_attr(owner, name, call)

    patch.setattr(interpreter, "_patch_attr", patch_attribute)

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
