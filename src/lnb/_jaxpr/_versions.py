"""The one module that reads JAX's own description of a program, whichever release made it.

All other code sees a `Body` made of `Equation`s, whose names and parameters are the same with every
release. An equation that is described in a way that is not known here (by a future release) is
marked `unreadable`: it is bound unchanged, and parameters that go into it are left unclaimed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex

INLINE = frozenset({"jit", "call", "checkpoint"})  # calls: as if their bodies stood in their place

# One name for what releases call by several.
_NAMES = {
    "pjit": "jit",
    "closed_call": "call",
    "core_call": "call",
    "remat": "checkpoint",
    "remat2": "checkpoint",
}

# The parameters that the rules of `_views` and `_sites` go by, for each primitive that has a rule.
_READ = {
    "dot_general": "dimension_numbers",
    "conv_general_dilated": "window_strides padding lhs_dilation rhs_dilation dimension_numbers "
    "feature_group_count batch_group_count",
    "ragged_dot_general": "ragged_dot_dimension_numbers",
    "gather": "dimension_numbers slice_sizes mode",
    "dynamic_slice": "slice_sizes",
    "slice": "start_indices limit_indices strides",
    "split": "sizes axis",
    "transpose": "permutation",
    "broadcast_in_dim": "broadcast_dimensions",
    "squeeze": "dimensions",
    "reshape": "dimensions",
    **dict.fromkeys(
        "expand_dims select_n convert_element_type reduce_precision neg mul div "
        "add add_any sub".split(),
        "",
    ),
}
# Parameters of these that change nothing about which element meets which.
_HARMLESS = frozenset(
    "precision preferred_element_type out_sharding sharding unique_indices indices_are_sorted "
    "fill_value new_sizes shape new_dtype weak_type out_dtype exponent_bits mantissa_bits".split()
)


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """A program: the equations between its inputs and its outputs."""

    constants: tuple[tuple[Any, Any], ...]  # a variable and its value each
    invars: tuple[Any, ...]
    equations: tuple[Equation, ...]
    outvars: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    """One operation of a program.

    Attributes:
      name: that of the primitive, the same with every release.
      params: what the rules go by; of control flow, the arguments of the public function that
        writes it.
      bodies: the programs inside: one, or of a `cond` one a branch.
      unreadable: whether JAX describes it in a way that is not known here.
    """

    name: str
    params: Mapping[str, Any]
    bodies: tuple[Body, ...]
    unreadable: bool
    invars: tuple[Any, ...]
    outvars: tuple[Any, ...]
    raw: Any = dataclasses.field(repr=False)

    @property
    def several(self) -> bool:
        """Whether the primitive returns a list."""
        return self.raw.primitive.multiple_results

    @functools.cached_property
    def key(self) -> str:
        """What tells equations that do different things apart."""
        return f"{self.name} {self.raw.params} {[str(atom.aval) for atom in self.invars]}"

    def bind(self, *operands: Any) -> Any:
        """The operation itself."""
        return self.raw.primitive.bind(*operands, **self._options())

    def exact(self) -> Callable[..., Any]:
        """The operation in full precision: no casts, and products as exact as the operands."""
        if self.name in {"convert_element_type", "reduce_precision"}:
            return lambda operand: operand
        options = self._options()
        if "precision" in options:
            options["precision"] = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
        if "preferred_element_type" in options:
            options["preferred_element_type"] = None
        return lambda *operands: self.raw.primitive.bind(*operands, **options)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Binds what is bound inside as the equation was: under its settings and its name."""
        name = str(self.raw.source_info.name_stack)
        with self.raw.ctx.manager, jax.named_scope(name) if name else contextlib.nullcontext():
            yield

    def _options(self) -> dict[str, Any]:
        return dict(self.raw.primitive.get_bind_params(self.raw.params))


def make_body(jaxpr: Any) -> Body:
    """A program as JAX describes it: a jaxpr, closed or not."""
    consts = getattr(jaxpr, "consts", ())
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)  # from 0.11 on, a closed one is the jaxpr itself
    return Body(
        constants=tuple(zip(jaxpr.constvars, consts, strict=True)),
        invars=tuple(jaxpr.invars),
        equations=tuple(map(_equation, jaxpr.eqns)),
        outvars=tuple(jaxpr.outvars),
    )


def _equation(raw: Any) -> Equation:
    name = str(raw.primitive.name)
    name = _NAMES.get(name, name)
    params, bodies, unreadable = {}, (), False
    try:
        if name in _CONTROL:
            params = _CONTROL[name](raw)
            bodies = tuple(map(make_body, params.pop("bodies")))
            operands = len(raw.invars) - (name == "cond")  # whose first one chooses the branch
            if any(len(body.invars) != operands for body in bodies):
                raise ValueError(f"{name} does not pass its operands on one for one")
        elif name in _READ:
            params = {key: raw.params[key] for key in _READ[name].split()}
            _refuse_unknown(raw.params, params)
    except (AttributeError, KeyError, TypeError, ValueError):
        params, bodies, unreadable = {}, (), True
    return Equation(name, params, bodies, unreadable, tuple(raw.invars), tuple(raw.outvars), raw)


def _refuse_unknown(params: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for key, value in params.items():
        if key not in known and key not in _HARMLESS and value is not None and value is not False:
            raise ValueError(f"{key}={value} may mean anything")


# -- control flow: the arguments of the public function that writes it, and `bodies` -------------


def _scan(raw: Any) -> dict[str, Any]:
    params = raw.params
    if "ft_in" in params:  # from 0.11 on
        consts, carry, _ = map(len, params["ft_in"].unpack())
    else:
        consts, carry = params["num_consts"], params["num_carry"]
    names = ("length", "reverse", "unroll", "_split_transpose")
    options = {name: params[name] for name in names if name in params}
    sizes = {"consts": consts, "carry": carry, "length": params["length"]}
    return {"bodies": [params["jaxpr"]], "options": options, **sizes}


def _shard_map(raw: Any) -> dict[str, Any]:
    params = raw.params
    axes = params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"]
    names = ("mesh", "in_specs", "out_specs", "check_vma")
    return {"bodies": [params["jaxpr"]], "axes": axes, **{name: params[name] for name in names}}


def _jit(raw: Any) -> dict[str, Any]:
    params = raw.params
    shardings = {
        key: [s if isinstance(s, jax.sharding.Sharding) else None for s in params[key]]
        for key in ("in_shardings", "out_shardings")
    }
    options = {"name": params["name"], "inline": params.get("inline", False)}
    return {"bodies": [params["jaxpr"]], **options, **shardings}


def _checkpoint(raw: Any) -> dict[str, Any]:
    options = {name: raw.params[name] for name in ("prevent_cse", "policy")}
    return {"bodies": [raw.params["jaxpr"]], **options}


_CONTROL: dict[str, Callable[[Any], dict[str, Any]]] = {
    "scan": _scan,
    "cond": lambda raw: {"bodies": raw.params["branches"]},
    "shard_map": _shard_map,
    "jit": _jit,
    "checkpoint": _checkpoint,
    "call": lambda raw: {"bodies": [raw.params["call_jaxpr"]]},
}


def varying_axes(tree: Any) -> frozenset[str]:
    """The mesh axes along which arrays inside a shard_map differ."""
    avals: list[Any] = [jax.typeof(x) for x in jax.tree.leaves(tree)]
    return frozenset().union(*(a.vma if hasattr(a, "vma") else a.mat.varying for a in avals))


def is_literal(atom: Any) -> bool:
    return isinstance(atom, jex.Literal)


def literals(atoms: Sequence[Any]) -> list[Any]:
    return [atom.val for atom in atoms if is_literal(atom)]
