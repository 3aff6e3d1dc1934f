"""What is known of the result of an equation without running it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._features import Axes, Step, dims
from ._values import MIXED, Const, Data, Entangled, Output, Value, View
from ._versions import Equation, is_literal
from ._views import VIEW_RULES

OPAQUE_PREFIXES = (
    "custom_",
    "pallas_call",
    "ffi_call",
    "pure_callback",
    "io_callback",
    "while",
    "ragged_dot",
)
# Linear in all operands, but what comes out of a site is no longer told apart in their result.
BLENDING = frozenset(
    "slice dynamic_slice split reduce_sum concatenate pad select_n gather cumsum neg rev psum "
    "psum_invariant dynamic_update_slice scatter scatter-add mul div sub add add_any".split()
)
PRODUCTS = frozenset({"dot_general", "mul", "conv_general_dilated"})
ADDITIONS = frozenset({"add", "add_any", "sub"})
REARRANGING = frozenset(
    "reshape squeeze expand_dims transpose broadcast_in_dim convert_element_type".split()
)
_NUMPY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "max": np.maximum,
    "min": np.minimum,
    "sqrt": np.sqrt,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "select_n": lambda which, *cases: np.choose(which, cases),
}


def differentiable(eqn: Equation) -> bool:
    return any(
        jnp.issubdtype(getattr(var.aval, "dtype", np.bool_), jnp.inexact) for var in eqn.outvars
    )


# -- constants -----------------------------------------------------------------------------------


def read(env: dict[Any, Value], atom: Any) -> Value:
    return Const(_scalar(atom.val)) if is_literal(atom) else env[atom]


def captured(const: Any) -> Const:
    return Const(_scalar(const), captured=np.size(const) > 1)


def _scalar(value: Any) -> Any:
    """The value itself where it is a concrete scalar, `None` elsewhere."""
    if isinstance(value, Tracer) or np.size(value) != 1:
        return None
    dtype = jnp.result_type(value)
    numeric = dtype == np.bool_ or jnp.issubdtype(dtype, jnp.number)
    return np.asarray(value) if numeric else None


def fold(eqn: Equation, values: Sequence[Value]) -> list[Value]:
    """Known scalars stay known: scales such as 1 / sqrt(d), and the indices of loops."""
    captured = any(isinstance(value, Const) and value.captured for value in values)
    one_number = all(
        isinstance(v, Const) and (v.uniform or (v.value is not None and np.size(v.value) == 1))
        for v in values
    )
    uniform = one_number and bool(values) and (eqn.name in REARRANGING or eqn.name in _NUMPY)
    unknown: list[Value] = [Const(captured=captured, uniform=uniform)] * len(eqn.outvars)
    if eqn.name == "iota" and len(eqn.outvars[0].aval.shape) == 1:
        return [Const(np.arange(eqn.outvars[0].aval.shape[0]))]
    known = [
        (v.value, v.iterates)
        for v in values
        if isinstance(v, Const) and (v.iterates is not None or np.size(v.value) == 1)
    ]
    scalar = all(math.prod(var.aval.shape) == 1 for var in (*eqn.invars, *eqn.outvars))
    if not known or len(known) < len(values) or not scalar or eqn.has_effects:
        return unknown
    if any(value is None and iterates is None for value, iterates in known):
        return unknown
    iterating = any(iterates is not None for _, iterates in known)
    length = max([len(iterates) for _, iterates in known if iterates is not None], default=1)
    arguments = [
        np.asarray(iterates if iterates is not None else np.repeat(value, length), atom.aval.dtype)
        for (value, iterates), atom in zip(known, eqn.invars, strict=True)
    ]
    results = _evaluate(eqn, arguments)
    if iterating:
        return [Const(iterates=np.ravel(result)) for result in results]
    return [Const(_scalar(result[0])) for result in results]


def _evaluate(eqn: Equation, arguments: Sequence[np.ndarray]) -> Sequence[Any]:
    """A batch of results, with NumPy where it will do: JAX would compile each operation."""
    if eqn.name in REARRANGING:
        return [arguments[0].astype(eqn.outvars[0].aval.dtype)]
    if eqn.name in _NUMPY:
        with np.errstate(all="ignore"):  # infinity is a number like any other
            return [_NUMPY[eqn.name](*arguments)]
    if eqn.name == "jit" and eqn.bodies and not eqn.bodies[0].constants:
        (body,), length = eqn.bodies, len(arguments[0])
        env = dict(zip(body.invars, arguments, strict=True))
        value = lambda x: np.repeat(x.val, length) if is_literal(x) else env[x]
        for inner in body.equations:
            results = _evaluate(inner, list(map(value, inner.invars)))
            env.update(zip(inner.outvars, results, strict=True))
        return list(map(value, body.outvars))
    shaped = [x.reshape(-1, *a.aval.shape) for x, a in zip(arguments, eqn.invars, strict=True)]
    with jax.ensure_compile_time_eval():
        results = jax.vmap(eqn.bind)(*map(jnp.asarray, shaped))
    return results if eqn.several else [results]


# -- data and entangled parameters ---------------------------------------------------------------


def blend(eqn: Equation, values: Sequence[Value]) -> Data:
    """What is known of the result of an equation that only data (and constants) enter."""
    name = eqn.name
    tags = [
        value.output for value in values if isinstance(value, Data) and value.output is not None
    ]
    if not tags:
        return Data()
    if len(tags) == 1 and isinstance(tags[0], Output):
        output = tags[0]
        at = next(i for i, v in enumerate(values) if isinstance(v, Data) and v.output is output)
        same_shape = eqn.invars[at].aval.shape == eqn.outvars[0].aval.shape
        if name in ADDITIONS and same_shape and not (name == "sub" and at == 1):
            return Data(output)
        if name in VIEW_RULES and name in REARRANGING:
            view = View(0, output.axes)
            changes = VIEW_RULES[name](eqn, at, view, values)
            axes = None if changes is None else changes[0].get("axes", output.axes)
            # A broadcast would repeat the site's outputs: its bias is not added there.
            if axes is not None and _count(axes) == _count(output.axes):
                slots = (None,) * len(eqn.invars)
                step = Step(eqn.exact(), eqn.key, at, slots, slots, None)
                return Data(Output(output.site, axes, (*output.steps, step)))
    return Data(MIXED if name in BLENDING or name in REARRANGING else None)


def _count(axes: Axes) -> int:
    return dims.size(dims.flatten(axes))


def entangle(eqn: Equation, values: Sequence[Value]) -> Entangled:
    parameters: set[int] = set()
    views = [value for value in values if isinstance(value, View)]
    parameters.update(view.parameter for view in views)
    inherited = [value for value in values if isinstance(value, Entangled)]
    for value in inherited:
        parameters.update(value.parameters)
    name = eqn.name
    opaque = eqn.unreadable or name.startswith(OPAQUE_PREFIXES)
    if eqn.unreadable:
        reason = f"it is used inside {name}, which jax {jax.__version__} describes in a new way"
    elif opaque:
        reason = f"it is used inside {name}, which is opaque"
    elif len(views) > 1 and name in PRODUCTS and len(parameters) > 1:
        reason = (
            f"it is multiplied by another parameter ({name}) before it meets data: write "
            "x @ (a @ b) as (x @ a) @ b"
        )
    elif inherited and not views and len({value.reason for value in inherited}) == 1:
        return dataclasses.replace(inherited[0], parameters=frozenset(parameters))
    elif len(parameters) > 1:
        reason = f"it is combined with another parameter ({name})"
    elif inherited:
        return inherited[0]
    elif len(views) > 1:
        reason = f"it is combined with itself ({name})"
    else:
        reason = f"a non-linear function of it ({name}) meets data"
    return Entangled(frozenset(parameters), reason, opaque)
