"""Meshes with explicit axes, where every operation must say how its result is sharded.

Statistics and solves leave that to the compiler: inside of these functions all axes are automatic.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec, auto_axes


def gathered(function: Callable[..., Any], *arrays: Any) -> Any:
    """`function(*arrays)`, with the result on every device."""
    if not _is_explicit(arrays):
        return function(*arrays)
    return auto_axes(function, out_sharding=PartitionSpec())(*arrays)


def sharded_like(example: Any, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, with the result sharded as an example of the same structure."""
    if not _is_explicit(args):
        return function(*args)
    specs = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, example)
    return auto_axes(function, out_sharding=specs)(*args)


def _is_explicit(tree: Any) -> bool:
    shardings = (jax.typeof(leaf).sharding for leaf in jax.tree.leaves(tree))
    return any(AxisType.Explicit in sharding.mesh.axis_types for sharding in shardings)
