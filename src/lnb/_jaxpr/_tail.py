"""The tail of a loss: where a penalty can be added without meeting data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._versions import INLINE, Body, Equation, is_literal

# Through these, and sums, a penalty reaches the loss without meeting data.
TAIL = frozenset(
    "add sub add_any neg convert_element_type reduce_sum reshape squeeze broadcast_in_dim psum "
    "psum_invariant copy pvary pcast expand_dims".split()
)


def tail_of(body: Body, outputs: Sequence[bool]) -> set[Any]:
    """The variables that reach the tail outputs through sums and constant factors alone."""
    broken: set[Any] = set()
    reached: set[Any] = set()

    def mark(atom: Any, good: bool) -> None:
        if not is_literal(atom):
            reached.add(atom)
            if not good:
                broken.add(atom)

    for atom, good in zip(body.outvars, outputs, strict=True):
        mark(atom, good)
    for eqn in reversed(body.equations):
        good = [var not in broken for var in eqn.outvars]
        for atom, flag in zip(eqn.invars, _tail_inputs(eqn, good), strict=True):
            mark(atom, flag)
    return reached - broken


def _tail_inputs(eqn: Equation, good: Sequence[bool]) -> Sequence[bool]:
    name = eqn.name
    if (name in INLINE or name == "shard_map") and eqn.bodies:
        (body,) = eqn.bodies
        inner = tail_of(body, good)
        return [var in inner for var in body.invars]
    constant_factor = name in {"mul", "div"} and is_literal(eqn.invars[1])
    constant_factor |= name == "mul" and is_literal(eqn.invars[0])
    return [all(good) and (name in TAIL or constant_factor)] * len(eqn.invars)
