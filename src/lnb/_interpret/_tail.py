"""The tail of a loss: where a penalty can be added without meeting data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend import core as jex

from ._equation import INLINE, open_jaxpr

# Through these, and sums, a penalty reaches the loss without meeting data.
TAIL = frozenset(
    "add sub add_any neg convert_element_type reduce_sum reshape squeeze broadcast_in_dim psum "
    "psum_invariant copy pvary pcast expand_dims".split()
)


def tail_of(jaxpr: jex.Jaxpr, outputs: Sequence[bool]) -> set[Any]:
    """The variables that reach the tail outputs through sums and constant factors alone."""
    broken: set[Any] = set()
    reached: set[Any] = set()

    def mark(atom: Any, good: bool) -> None:
        if not isinstance(atom, jex.Literal):
            reached.add(atom)
            if not good:
                broken.add(atom)

    for atom, good in zip(jaxpr.outvars, outputs, strict=True):
        mark(atom, good)
    for eqn in reversed(jaxpr.eqns):
        good = [var not in broken for var in eqn.outvars]
        for atom, flag in zip(eqn.invars, _tail_inputs(eqn, good), strict=True):
            mark(atom, flag)
    return reached - broken


def _tail_inputs(eqn: Any, good: Sequence[bool]) -> Sequence[bool]:
    name = eqn.primitive.name
    if name in INLINE or name == "shard_map":
        jaxpr, _ = open_jaxpr(eqn.params[INLINE.get(name, "jaxpr")])
        inner = tail_of(jaxpr, good)
        return [var in inner for var in jaxpr.invars]
    constant_factor = name in {"mul", "div"} and isinstance(eqn.invars[1], jex.Literal)
    constant_factor |= name == "mul" and isinstance(eqn.invars[0], jex.Literal)
    return [all(good) and (name in TAIL or constant_factor)] * len(eqn.invars)
