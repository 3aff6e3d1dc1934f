"""Data sets in their official layouts, or seeded stand-ins of the same shapes."""

from .augment import crop_and_flip as crop_and_flip
from .batches import Batches as Batches
from .burgers import burgers as burgers
from .cifar10 import cifar10 as cifar10
from .mnist import mnist as mnist
from .tabular import tabular as tabular
from .text import text as text
from .types import Data as Data
from .types import DataError as DataError
from .types import Source as Source
from .types import Split as Split
from .types import hold_out as hold_out
from .voc import voc2012 as voc2012
