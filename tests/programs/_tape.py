"""The metric of a program written in NumPy, from explicit Jacobians: without JAX or the library.

A program by hand calls `tape.site` wherever a weight meets data, and `tape.pure` for all the rest.
A site is linear in its weight and in what it is fed, so a Jacobian is made of its values at unit
vectors. Derivatives of pure functions are taken by complex steps, which lose no digits.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

Array = np.ndarray
STEP = 1e-30


class Place(NamedTuple):
    """A parameter by its key path, or the slices of it that some loops take: (axis, index) each."""

    path: str
    slices: tuple[tuple[int, int], ...] = ()

    def __truediv__(self, name: Any) -> Place:
        return self._replace(path=f"{self.path}.{name}" if self.path else str(name))

    def at(self, axis: int, index: int) -> Place:
        return self._replace(slices=(*self.slices, (axis, index)))

    def of(self, array: Array) -> Array:
        for axis, index in self.slices:
            array = np.take(array, index, axis)
        return array


@dataclasses.dataclass(eq=False)
class Node:
    """A value of the program, and how it was computed."""

    value: Array
    inputs: tuple[Node, ...] = ()
    function: Callable[..., Array] | None = None  # of a pure node: of its inputs
    site: Site | None = None
    sources: frozenset[Node] = frozenset()  # all nodes that it depends on

    def __post_init__(self):
        self.sources = frozenset({self}).union(*(node.sources for node in self.inputs))

    def depends_on(self, other: Node) -> bool:
        return other in self.sources

    def jacobian(self, at: int) -> Array:
        """The derivative of a pure node by one of its inputs, [outputs, inputs]."""
        function, values = self.function, [node.value for node in self.inputs]
        assert function is not None

        def slope(unit: Array) -> Array:
            moved = values[at] + 1j * STEP * unit
            return np.imag(function(*values[:at], moved, *values[at + 1 :])) / STEP

        return columns(slope, units(values[at].shape))


class Site(NamedTuple):
    """A neuron at work. `apply(weight, bias, x)` is linear in weight and x; bias may be `None`."""

    apply: Callable[..., Array]
    weight: Place
    bias: Place | None
    part: Any  # tells disjoint slices of one weight apart
    n: int  # positions at which one output unit is computed
    n_back: int  # the same of the transposed map, from outputs to inputs


class View(NamedTuple):
    """A derivative that is linear in one weight and has met no data yet."""

    site: Site
    function: Callable[[Array], Array]  # of the weight


class Rows(NamedTuple):
    """The Jacobian of a site's outputs by weight and bias, [outputs, elements] each."""

    weight: str
    key: Any
    n: int
    jacobians: dict[str, Array]


class Tape:
    def __init__(self, params: dict[str, Array], derivatives: bool = False):
        self.params = params
        self.derivatives = derivatives  # whether the loss has some, so that weights are used twice
        self.rows: list[Rows] = []
        self.nodes: list[Node] = []
        self.claimed: set[str] = set()
        self.lenient: set[str] = set()  # parameters that may as well be left unclaimed
        self.looped: set[str] = set()  # parameters used in a loop
        self.taken = True
        self.strict = True
        self.loops = 0

    # -- what programs call ---------------------------------------------------------------------

    def value(self, place: Place) -> Array:
        return place.of(self.params[place.path])

    def data(self, value: Array) -> Node:
        return Node(value)

    def pure(self, function: Callable[..., Array], *inputs: Node) -> Node:
        """What involves no weight, or not in a way that makes it a neuron's."""
        node = Node(function(*(node.value for node in inputs)), inputs, function)
        self.nodes.append(node)
        return node

    def site(
        self,
        apply: Callable[..., Array],
        weight: Place,
        bias: Place | None,
        x: Node,
        n: int,
        *,
        n_back: int | None = None,
        part: Any = None,
        half: bool = False,
    ) -> Node:
        """A weight that meets data. With `half`, all of it is computed in bfloat16."""
        site = Site(apply, weight, bias, part, n, n if n_back is None else n_back)
        fed = rounded(x.value) if half else x.value
        w, b = self.value(weight), None if bias is None else self.value(bias)
        if half:
            value = rounded(apply(rounded(w), None, fed))
            value = value if b is None else rounded(apply(0 * w, rounded(b), 0 * fed) + value)
        else:
            value = apply(w, b, fed)
        jacobian_b = {} if bias is None else {bias: lambda b: apply(0 * w, b, fed)}
        self.record(site, n, {weight: lambda w: apply(w, None, fed)} | jacobian_b)
        node = Node(value, (x,), site=site)
        self.nodes.append(node)
        return node

    @contextlib.contextmanager
    def not_taken(self) -> Iterator[None]:
        """A branch that does not run: its neurons are known, but see nothing."""
        before, self.taken = self.taken, False
        yield
        self.taken = before

    @contextlib.contextmanager
    def open_to_claims(self) -> Iterator[None]:
        """Where the design leaves open whether parameters are claimed."""
        before, self.strict = self.strict, False
        yield
        self.strict = before

    @contextlib.contextmanager
    def loop(self) -> Iterator[None]:
        """One turn of a loop."""
        self.loops += 1
        yield
        self.loops -= 1

    # -- derivatives inside of the loss ---------------------------------------------------------

    def gradient(self, of: Node, by: Node, seed: Array, constant: bool) -> Array:
        """The product of `seed` with the derivative of `of` by `by`; weights are met once more.

        A constant seed is no data: the weight that it meets first is a view until it meets data.
        """
        slopes: dict[Node, Any] = {of: seed}
        for node in reversed(self._between(by, of)):
            slope = slopes[node]
            for i, source in enumerate(node.inputs):
                if not source.depends_on(by):
                    continue
                if node.site is not None:
                    found = self._back(node.site, source, slope, constant and node is of)
                else:
                    found = self._carried(slope, node.jacobian(i).T, source)
                slopes[source] = _plus(slopes.get(source), found)
        return slopes[by]

    def tangent(self, of: Node, by: Node, seed: Array, constant: bool) -> Array:
        """How `of` changes as `by` moves along `seed`; weights are met once more."""
        moves: dict[Node, Any] = {by: seed}
        for node in self._between(by, of):
            for i, source in enumerate(node.inputs):
                if not source.depends_on(by):
                    continue
                if node.site is not None:
                    found = self._along(node.site, moves[source], constant and source is by)
                else:
                    found = self._carried(moves[source], node.jacobian(i), node)
                moves[node] = _plus(moves.get(node), found)
        return moves[of]

    def _between(self, first: Node, last: Node) -> list[Node]:
        return [n for n in self.nodes if n.depends_on(first) and last.depends_on(n)]

    def _back(self, site: Site, x: Node, slope: Array, constant: bool) -> Any:
        def function(weight: Array) -> Array:
            per_unit = [np.sum(slope * site.apply(weight, None, unit)) for unit in units(x.value)]
            return np.reshape(per_unit, x.value.shape)

        return self._met(site, function, site.n_back, constant)

    def _along(self, site: Site, move: Array, constant: bool) -> Any:
        return self._met(site, lambda w: site.apply(w, None, move), site.n, constant)

    def _met(self, site: Site, function: Callable, n: int, constant: bool) -> Any:
        if constant:
            return View(site, function)
        self.record(site, n, {site.weight: function})
        return function(self.value(site.weight))

    def _carried(self, slope: Any, jacobian: Array, to: Node) -> Array:
        """Through a pure function. A view meets data there: the function's derivative."""
        through = lambda slope: (jacobian @ slope.ravel()).reshape(to.value.shape)
        if not isinstance(slope, View):
            return through(slope)
        function = lambda weight: through(slope.function(weight))
        positions = to.value.size // to.value.shape[-1]
        return self._met(slope.site, function, positions, constant=False)

    # -- the metric -----------------------------------------------------------------------------

    def record(self, site: Site, n: int, functions: dict[Place, Callable]) -> None:
        """Notes the Jacobian of a site's outputs, by the parameters that they are linear in."""
        paths = {place.path for place in functions}
        self.claimed |= paths
        self.lenient |= set() if self.strict else paths
        self.looped |= paths if self.loops else set()
        if self.taken:
            jacobians = {}
            for place, function in functions.items():
                vectors = map(place.of, units(self.params[place.path].shape))
                jacobians[place.path] = columns(function, vectors)
            key = (site.weight, site.part)
            self.rows.append(Rows(site.weight.path, key, n, jacobians))

    def product(self, vector: dict[str, Array]) -> dict[str, Array]:
        """M v: (1/n) J^T J v for neurons, v for all other parameters.

        n sums the sites. Disjoint slices of one weight are neurons of their own.
        """
        result = {p: 0 * v if p in self.claimed else v for p, v in vector.items()}
        for rows in self.rows:
            n = sum(other.n for other in self.rows if other.key == rows.key)
            pushed = sum(j @ vector[p].ravel() for p, j in rows.jacobians.items())
            for p, j in rows.jacobians.items():
                result[p] = result[p] + (j.T @ pushed).reshape(vector[p].shape) / n
        return result


def units(like: Any) -> Iterator[Array]:
    """The unit vectors of a shape, or of an array's."""
    shape = np.shape(like) if isinstance(like, Array) else like
    for index in np.ndindex(*shape):
        unit = np.zeros(shape)
        unit[index] = 1.0
        yield unit


def columns(function: Callable[[Array], Array], vectors: Iterable[Array]) -> Array:
    """A linear function of these vectors, a column each."""
    images = [np.ravel(function(v)) if v.any() else None for v in vectors]
    size = next(image.size for image in images if image is not None)
    return np.stack([np.zeros(size) if i is None else i for i in images], axis=-1)


def rounded(x: Array) -> Array:
    """To bfloat16."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def _plus(one: Any, other: Any) -> Any:
    return other if one is None else one + other
