"""The emitting pass: runs the program anew, with what the sites were fed as further outputs.

Control flow is written again through JAX's public functions around the interpreted inner program,
so that custom derivative rules, rematerialisation and shardings stay what they were; whatever holds
no site is bound unchanged.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from .._features import SiteRows
from .._sharding import gathered
from ._claims import Claim
from ._flow import split
from ._values import Scope, Site
from ._versions import Body, Equation, is_literal, varying_axes

Key = tuple[str, int]  # the name of a neuron, and which of its sites
# What leaves the program, by key: `"rows"`, or the number of each residual's slot; and `"count"`
# where a branch decides at run time how many positions there are.
Payloads = dict[tuple[Key, str], Any]


class Emission(NamedTuple):
    """What to hand out of a scope: a name among the payloads, and a function of variables."""

    name: tuple[Key, str]
    keep: Callable[..., Any]
    atoms: Sequence[Any]


class Emitter:
    """Runs a program and emits what the sites of neurons are fed: rows, or residuals."""

    def __init__(self, claims: Sequence[Claim], origins: Mapping[str, tuple[Scope, Any]]):
        self.sites: dict[Key, Site] = {}
        self.emissions: dict[Scope, list[Emission]] = collections.defaultdict(list)
        for neuron, sites in claims:
            for number, (site, form) in enumerate(zip(sites, neuron.forms, strict=True)):
                key = neuron.name, number
                self.sites[key] = site
                if isinstance(form, SiteRows):
                    rows = Emission((key, "rows"), form.arrangement.thin, site.features)
                    self.emissions[site.scope].append(rows)
                    continue
                for slot in form.slots():
                    scope, var = origins[slot]
                    self.emissions[scope].append(Emission((key, slot), lambda x: x, (var,)))

    def _live(self, scope: Scope) -> bool:
        inner = (s for scopes in scope.inner.values() for s in scopes)
        return scope in self.emissions or any(map(self._live, inner))

    def changed(self, scope: Scope, var: Any, value: Any) -> Any:
        """The value of a variable, once it is computed: a hook for subclasses."""
        del scope, var
        return value

    def run(self, scope: Scope, body: Body, arguments: Sequence[Any]) -> tuple[list[Any], Payloads]:
        """The program's outputs, and the payloads."""
        env: dict[Any, Any] = dict(body.constants)
        env.update(zip(body.invars, arguments, strict=True))
        read = lambda atom: atom.val if is_literal(atom) else env[atom]
        payloads: Payloads = {}
        for index, eqn in enumerate(body.equations):
            operands = [read(atom) for atom in eqn.invars]
            inner = scope.inner.get(index, ())
            with eqn.context():
                if any(map(self._live, inner)):
                    outs, emitted = getattr(self, eqn.name)(inner, eqn, operands)
                    payloads |= emitted
                else:
                    outs = eqn.bind(*operands)
                    outs = outs if eqn.several else [outs]
            for var, out in zip(eqn.outvars, outs, strict=True):
                env[var] = self.changed(scope, var, out)
        for name, keep, atoms in self.emissions.get(scope, ()):
            fed = [lax.stop_gradient(read(atom)) for atom in atoms]
            payloads[name] = gathered(keep, *fed)
        return [read(atom) for atom in body.outvars], payloads

    # -- control flow, by the name of its equation: outputs and payloads -------------------------

    def call(self, inner: Sequence[Scope], eqn: Equation, operands: list[Any]):
        return self.run(inner[0], eqn.bodies[0], operands)

    def checkpoint(self, inner: Sequence[Scope], eqn: Equation, operands: list[Any]):
        run = lambda *xs: self.run(inner[0], eqn.bodies[0], xs)
        return jax.checkpoint(run, **eqn.params)(*operands)

    def jit(self, inner: Sequence[Scope], eqn: Equation, operands: list[Any]):
        run, params = lambda *xs: self.run(inner[0], eqn.bodies[0], xs), eqn.params
        run.__name__ = params["name"]
        options: dict[str, Any] = {"inline": params["inline"]}
        if any(params["in_shardings"]):
            options["in_shardings"] = tuple(params["in_shardings"])
        if any(params["out_shardings"]):
            options["out_shardings"] = (params["out_shardings"], None)
        return jax.jit(run, **options)(*operands)

    def scan(self, inner: Sequence[Scope], eqn: Equation, operands: list[Any]):
        """A loop stacks its payloads, as it does its outputs."""
        params, (body,) = eqn.params, eqn.bodies
        carried = params["carry"]
        consts, init, xs = split(operands, [params["consts"], carried])

        def step(carry: list[Any], x: list[Any]):
            outs, payloads = self.run(inner[0], body, [*consts, *carry, *x])
            return outs[:carried], (outs[carried:], payloads)

        values, (ys, payloads) = lax.scan(step, init, xs, **params["options"])
        return [*values, *ys], payloads

    def cond(self, inner: Sequence[Scope], eqn: Equation, operands: list[Any]):
        """In a branch that is not taken, all payloads are zeros."""
        index, *operands = operands
        branches = [
            functools.partial(self.branch, *pair) for pair in zip(inner, eqn.bodies, strict=True)
        ]
        shapes: Payloads = {}
        for branch in branches:
            shapes |= jax.eval_shape(branch, *operands)[1]

        def filled(branch: Callable[..., Any], *xs: Any):
            outs, payloads = branch(*xs)
            blank = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            return outs, {**blank, **payloads}

        choices = [functools.partial(filled, branch) for branch in branches]
        return lax.switch(jnp.asarray(index, jnp.int32), choices, *operands)

    def branch(self, scope: Scope, branch: Body, *operands: Any):
        """Counts are outputs from here on: a branch that is not taken counts nothing."""
        outs, payloads = self.run(scope, branch, operands)
        for key in {key for key, _ in payloads}:
            count = self.sites[key].count(len(scope.loops))
            payloads.setdefault((key, "count"), jnp.asarray(count, jnp.float32))
        return outs, payloads

    def shard_map(self, inner: Sequence[Scope], eqn: Equation, operands: list[Any]):
        """Payloads are stacked over the devices, as those of a loop are over its iterations."""
        params, (body,) = eqn.params, eqn.bodies
        axes = tuple(sorted(params["axes"], key=list(params["mesh"].axis_names).index))

        def stacked(x: Any) -> Any:
            same = tuple(axis for axis in axes if axis not in varying_axes(x))
            return (lax.pcast(x, same, to="varying") if params["check_vma"] and same else x)[None]

        def local(*xs: Any):
            outs, payloads = self.run(inner[0], body, xs)
            return outs, jax.tree.map(stacked, payloads)

        return jax.shard_map(
            local,
            mesh=params["mesh"],
            in_specs=params["in_specs"],
            out_specs=(list(params["out_specs"]), PartitionSpec(axes)),
            check_vma=params["check_vma"],
            axis_names=set(params["axes"]),
        )(*operands)
