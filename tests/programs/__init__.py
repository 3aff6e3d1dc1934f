"""The parts of random programs, each written twice: for JAX, and by hand in NumPy."""

from ._draw import WORDS as WORDS
from ._draw import Draw as Draw
from ._draw import draw_chain as draw_chain
from ._draw import draw_network as draw_network
from ._layer import Chain as Chain
from ._layer import Data as Data
from ._loss import KINDS as KINDS
from ._loss import Loss as Loss
from ._tape import Tape as Tape
