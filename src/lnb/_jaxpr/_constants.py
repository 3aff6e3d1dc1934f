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

from .._features import Step, dims
from ._values import MIXED, Const, Data, Entangled, Output, Value, View
from ._versions import Equation, is_literal
from ._views import REARRANGING, factor, rearranged

OPAQUE_PREFIXES = tuple(
    "custom_ pallas_call ffi_call pure_callback io_callback while ragged_dot".split()
)
ADDITIONS = frozenset({"add", "add_any", "sub"})
# Linear in all operands, but what comes out of a site is no longer told apart in their result.
BLENDING = frozenset(
    "slice dynamic_slice split reduce_sum concatenate pad select_n gather cumsum neg rev psum "
    "psum_invariant dynamic_update_slice scatter scatter-add mul div".split()
)
# Through these, and products with constants, a penalty reaches the loss without meeting data.
SUMMING = ADDITIONS | REARRANGING | {"neg", "reduce_sum", "psum", "psum_invariant"}
PRODUCTS = frozenset({"dot_general", "mul", "conv_general_dilated"})
# What known numbers are computed with: JAX would compile every operation.
_NUMPY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "max": np.maximum,
    "min": np.minimum,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "select_n": lambda which, *cases: np.choose(which, cases),
    **dict.fromkeys(REARRANGING, np.asarray),
}


def differentiable(eqn: Equation) -> bool:
    dtypes = (getattr(var.aval, "dtype", np.bool_) for var in eqn.outvars)
    return any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)


def is_sum(eqn: Equation, values: Sequence[Value]) -> bool:
    """Whether the operands are but added up, or multiplied by constants, if differentiated."""
    of_constant = [isinstance(value, Const) for value in values]
    scaled = any(of_constant) if eqn.name == "mul" else eqn.name == "div" and of_constant[1]
    return scaled or eqn.name in SUMMING or not differentiable(eqn)


# -- constants -----------------------------------------------------------------------------------


def read(env: dict[Any, Value], atom: Any) -> Value:
    return constant(atom.val) if is_literal(atom) else env[atom]


def constant(value: Any) -> Const:
    """A literal, or an array that the loss closes over."""
    if np.size(value) != 1:
        return Const(captured=True)
    dtype = jnp.result_type(value)
    numeric = dtype == np.bool_ or jnp.issubdtype(dtype, jnp.number)
    return Const() if isinstance(value, Tracer) or not numeric else Const(np.ravel(value))


def fold(eqn: Equation, values: Sequence[Const]) -> list[Value]:
    """Known numbers stay known: scales such as 1 / sqrt(d), and the indices of loops."""
    unknown = Const(captured=any(value.captured for value in values))
    aval, compute = eqn.outvars[0].aval, _NUMPY.get(eqn.name)
    if eqn.name == "iota":
        return [Const(is_range=len(aval.shape) == 1)]
    numbers = [value.numbers for value in values if value.numbers is not None]
    if compute is None or len(numbers) < len(values):
        return [unknown] * len(eqn.outvars)
    with np.errstate(all="ignore"):  # infinity is a number like any other
        return [Const(compute(*numbers).astype(aval.dtype))]


# -- data and entangled parameters ---------------------------------------------------------------


def blend(eqn: Equation, values: Sequence[Value]) -> Data:
    """What is known of the result of an equation that only data (and constants) enter."""
    tagged = [(at, v.output) for at, v in enumerate(values) if isinstance(v, Data) and v.output]
    at, output = tagged[0] if len(tagged) == 1 else (0, None)
    if isinstance(output, Output):
        same_shape = eqn.invars[at].aval.shape == eqn.outvars[0].aval.shape
        if eqn.name in ADDITIONS and same_shape and not (eqn.name == "sub" and at == 1):
            return Data(output)
        if eqn.name in REARRANGING:
            axes = rearranged(eqn, output.axes)
            # A broadcast would repeat the site's outputs: its bias is not added there.
            if axes is not None and dims.total(axes) == dims.total(output.axes):
                step = Step(eqn.exact(), eqn.key)
                changes = {"axes": axes, "steps": (*output.steps, step)}
                return Data(dataclasses.replace(output, **changes))
        number = factor(eqn, at, values)
        if number and math.isfinite(number) and output.site.kind in {"dense", "conv"}:
            step = Step(lambda y: number * y, f"mul {number}")
            changes = {"steps": (*output.steps, step), "scale": number * output.scale}
            return Data(dataclasses.replace(output, **changes))
    linear = eqn.name in BLENDING | ADDITIONS | REARRANGING
    return Data(MIXED if tagged and linear else None)


def entangle(eqn: Equation, values: Sequence[Value]) -> Entangled:
    """Parameters that meet in a way that is linear in none of them, and why."""
    views = [value for value in values if isinstance(value, View)]
    inherited = [value for value in values if isinstance(value, Entangled)]
    parameters = frozenset(view.parameter for view in views).union(
        *(value.parameters for value in inherited)
    )
    name, one_reason = eqn.name, len({value.reason for value in inherited}) == 1
    opaque = eqn.unreadable or name.startswith(OPAQUE_PREFIXES)
    if eqn.unreadable:
        reason = f"it is used inside {name}, which jax {jax.__version__} describes in a new way"
    elif opaque:
        reason = f"it is used inside {name}, which is opaque"
    elif inherited and (len(parameters) == 1 or (one_reason and not views)):
        return dataclasses.replace(inherited[0], parameters=parameters)
    elif len(parameters) > 1 and not inherited and name in PRODUCTS:
        reason = (
            f"it is multiplied by another parameter ({name}) before it meets data: write "
            "x @ (a @ b) as (x @ a) @ b"
        )
    elif len(parameters) > 1:
        reason = f"it is combined with another parameter ({name})"
    elif len(views) > 1:
        reason = f"it is combined with itself ({name})"
    else:
        reason = f"a non-linear function of it ({name}) meets data"
    return Entangled(parameters, reason, opaque)
