"""The methods that the paper compares itself with in words, each as it was published."""

from .boosted_backprop import boosted_backprop as boosted_backprop
from .foof import foof as foof
from .kfac import kfac as kfac
from .levenberg_marquardt import levenberg_marquardt as levenberg_marquardt
from .locoprop import locoprop as locoprop
from .natural_gradient import natural_gradient as natural_gradient
from .prong import prong as prong
from .proxprop import proxprop as proxprop
from .tensor_normal import tensor_normal as tensor_normal
