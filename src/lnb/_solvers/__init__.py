"""Solvers for a neuron's direction, M h = g: one a file."""

from ._cg import CG as CG
from ._cholesky import Cholesky as Cholesky
from ._krylov import Krylov as Krylov
from ._protocol import Solver as Solver
from ._woodbury import Woodbury as Woodbury
