"""Linear Neuron Boosting: neural networks trained in the space of their neurons' functions."""

from ._algorithms import algorithm1 as algorithm1
from ._algorithms import algorithm2 as algorithm2
from ._algorithms import lnb as lnb
from ._backprop import backprop as backprop
from ._backprop import forward_features as forward_features
from ._diagnostics import diagnostics as diagnostics
from ._metric import Absolute as Absolute
from ._neuron import Neuron as Neuron
from ._neurons import Neurons as Neurons
from ._neurons import find_neurons as find_neurons
from ._optimizer import scale_by_lnb as scale_by_lnb
from ._parameters import metric_product as metric_product
from ._solvers import CG as CG
from ._solvers import Cholesky as Cholesky
from ._solvers import Krylov as Krylov
from ._solvers import Solver as Solver
from ._solvers import Woodbury as Woodbury
from ._version import __version__ as __version__


def __getattr__(name: str) -> object:
    if name == "features":
        raise AttributeError("lnb.features is now called lnb.forward_features.")
    raise AttributeError(f"lnb has no attribute {name!r}.")
