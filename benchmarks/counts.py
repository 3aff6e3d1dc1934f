"""What XLA says a step costs, and what it leaves out."""

import math
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp

from .contenders import Boosted, Plain
from .workloads import Workload

# A call of LAPACK in a compiled program, and the shapes of its operands.
_CALL = (
    r'custom_call_target="\w*?(potrf|trsm)_ffi", operand_layout_constraints=\{(.*?)\}, (?!\w+\[)'
)


def flops(contender: Plain | Boosted, workload: Workload, program: Any = None) -> float:
    """Floating-point operations of a step, on average over refreshes of M.

    XLA counts the body of a loop once, a `cond` as its dearest branch, and factorisations and
    triangular solves as nothing. So loops are unrolled, steps without refreshes are compiled apart,
    and d^3 / 3 a factorisation and d^2 o a triangular solve are added. Where there are neither
    loops nor refreshes, the step's own `program` will do.
    """
    if program is not None and workload.counted is None and contender.every is None:
        return _program_flops(program)
    state = contender.init(workload)
    if workload.counted is not None:
        workload = workload._replace(loss_fn=workload.counted)
    args = (workload.params, state, *workload.args)
    total = 0.0
    with patch("jax.lax.map", _unrolled):
        jax.clear_caches()  # of what was traced with loops
        for part, step in contender.counted_steps(workload):
            total += part * _program_flops(compiled(step, args))
    jax.clear_caches()
    return total


def _unrolled(function: Callable, xs: Any) -> jax.Array:
    one = lambda i: jax.tree.map(lambda x: x[i], xs)
    return jnp.stack([function(one(i)) for i in range(len(jax.tree.leaves(xs)[0]))])


def _program_flops(program: Any) -> float:
    return program.cost_analysis()["flops"] + _uncounted(program)


def peak_bytes(program: Any) -> int:
    """Of arguments, results and intermediate values, those that share a buffer counted once."""
    sizes = program.memory_analysis()
    return (
        sizes.argument_size_in_bytes
        + sizes.output_size_in_bytes
        - sizes.alias_size_in_bytes
        + sizes.temp_size_in_bytes
    )


def compiled(step: Callable, args: tuple[Any, ...]) -> Any:
    return jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()


def _uncounted(program: Any) -> float:
    """d^3 / 3 a factorisation, d^2 o a triangular solve with o right-hand sides."""
    total = 0.0
    for kind, operands in re.findall(_CALL, program.as_text()):
        (*blocks, d, _), *right = (
            tuple(map(int, shape.split(","))) for shape in re.findall(r"\[([\d,]+)\]", operands)
        )
        total += math.prod(blocks) * (d**3 / 3 if kind == "potrf" else d**2 * right[0][-1])
    return total
