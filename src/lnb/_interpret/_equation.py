"""Single equations of a jaxpr: how to run one, and what is known of its result without doing so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend import core as jex

from . import _axes
from ._program import Step
from ._values import MIXED, Const, Data, Entangled, Output, Value, View
from ._views import VIEW_RULES

# Calls that are as good as inlined: name -> the parameter that holds their jaxpr.
INLINE = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
}
REMATERIALISED = frozenset({"checkpoint", "remat", "remat2"})
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


def open_jaxpr(jaxpr: Any) -> tuple[jex.Jaxpr, Sequence[Any]]:
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, jex.ClosedJaxpr) else (jaxpr, ())


def binder(eqn: Any) -> Any:
    params = eqn.primitive.get_bind_params(eqn.params)
    return lambda *operands: eqn.primitive.bind(*operands, **params)


def exact(eqn: Any) -> Any:
    """The equation in full precision: no casts, and products as exact as the operands."""
    if eqn.primitive.name in {"convert_element_type", "reduce_precision"}:
        return lambda operand: operand
    params = dict(eqn.primitive.get_bind_params(eqn.params))
    if "precision" in params:
        params["precision"] = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    if "preferred_element_type" in params:
        params["preferred_element_type"] = None
    return lambda *operands: eqn.primitive.bind(*operands, **params)


def differentiable(eqn: Any) -> bool:
    return any(
        jnp.issubdtype(getattr(var.aval, "dtype", np.bool_), jnp.inexact) for var in eqn.outvars
    )


# -- constants -----------------------------------------------------------------------------------


def read(env: dict[Any, Value], atom: Any) -> Value:
    return Const(_scalar(atom.val)) if isinstance(atom, jex.Literal) else env[atom]


def captured(const: Any) -> Const:
    return Const(_scalar(const), captured=np.size(const) > 1)


def _scalar(value: Any) -> Any:
    """The value itself where it is a concrete scalar, `None` elsewhere."""
    if isinstance(value, Tracer) or np.size(value) != 1:
        return None
    dtype = jnp.result_type(value)
    numeric = dtype == np.bool_ or jnp.issubdtype(dtype, jnp.number)
    return np.asarray(value) if numeric else None


def fold(eqn: Any, values: Sequence[Value]) -> list[Value]:
    """Known scalars stay known: scales such as 1 / sqrt(d), and the indices of loops."""
    captured = any(isinstance(value, Const) and value.captured for value in values)
    unknown: list[Value] = [Const(captured=captured)] * len(eqn.outvars)
    if eqn.primitive.name == "iota" and len(eqn.outvars[0].aval.shape) == 1:
        return [Const(np.arange(eqn.outvars[0].aval.shape[0]))]
    known = [
        (v.value, v.turns)
        for v in values
        if isinstance(v, Const) and (v.turns is not None or np.size(v.value) == 1)
    ]
    scalar = all(math.prod(var.aval.shape) == 1 for var in (*eqn.invars, *eqn.outvars))
    if not known or len(known) < len(values) or not scalar or eqn.effects:
        return unknown
    if any(value is None and turns is None for value, turns in known):
        return unknown
    turning = any(turns is not None for _, turns in known)
    length = max([len(turns) for _, turns in known if turns is not None], default=1)
    arguments = [
        np.asarray(turns if turns is not None else np.repeat(value, length), atom.aval.dtype)
        for (value, turns), atom in zip(known, eqn.invars, strict=True)
    ]
    results = _evaluate(eqn, arguments)
    if turning:
        return [Const(turns=np.ravel(result)) for result in results]
    return [Const(_scalar(result[0])) for result in results]


def _evaluate(eqn: Any, arguments: Sequence[np.ndarray]) -> Sequence[Any]:
    """A batch of results, with NumPy where it will do: JAX would compile each operation."""
    if eqn.primitive.name in REARRANGING:
        return [arguments[0].astype(eqn.outvars[0].aval.dtype)]
    if eqn.primitive.name in _NUMPY:
        with np.errstate(all="ignore"):  # infinity is a number like any other
            return [_NUMPY[eqn.primitive.name](*arguments)]
    if eqn.primitive.name == "jit" and not (jaxpr := eqn.params["jaxpr"]).consts:
        length = len(arguments[0])
        env = dict(zip(jaxpr.jaxpr.invars, arguments, strict=True))
        value = lambda x: np.repeat(x.val, length) if isinstance(x, jex.Literal) else env[x]
        for inner in jaxpr.eqns:
            results = _evaluate(inner, list(map(value, inner.invars)))
            env.update(zip(inner.outvars, results, strict=True))
        return list(map(value, jaxpr.jaxpr.outvars))
    shaped = [x.reshape(-1, *a.aval.shape) for x, a in zip(arguments, eqn.invars, strict=True)]
    with jax.ensure_compile_time_eval():
        results = jax.vmap(binder(eqn))(*map(jnp.asarray, shaped))
    return results if eqn.primitive.multiple_results else [results]


# -- data and entangled parameters ---------------------------------------------------------------


def blend(eqn: Any, values: Sequence[Value]) -> Data:
    """What is known of the result of an equation that only data (and constants) enter."""
    name = eqn.primitive.name
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
            if axes is not None and "broadcast" not in _axes.labels(_axes.flatten(axes)):
                slots = (None,) * len(eqn.invars)
                key = f"{name} {eqn.params} {eqn.invars[at].aval}"
                step = Step(exact(eqn), key, at, slots, slots, None)
                return Data(Output(output.site, axes, (*output.steps, step)))
    return Data(MIXED if name in BLENDING or name in REARRANGING else None)


def entangle(eqn: Any, values: Sequence[Value]) -> Entangled:
    parameters: set[int] = set()
    views = [value for value in values if isinstance(value, View)]
    parameters.update(view.parameter for view in views)
    inherited = [value for value in values if isinstance(value, Entangled)]
    for value in inherited:
        parameters.update(value.parameters)
    name = eqn.primitive.name
    opaque = name.startswith(OPAQUE_PREFIXES)
    if opaque:
        reason = f"it is used inside {name}, which is opaque"
    elif len(parameters) > 1:
        reason = f"it is combined with another parameter ({name})"
    elif inherited:
        return inherited[0]
    elif len(views) > 1:
        reason = f"it is combined with itself ({name})"
    else:
        reason = f"a non-linear function of it ({name}) meets data"
    return Entangled(frozenset(parameters), reason, opaque)
