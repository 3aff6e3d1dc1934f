"""The zoo: small models of every make, with what is known of their neurons."""

from . import equinox_models as equinox_models
from . import haiku_models as haiku_models
from . import linen_models as linen_models
from . import nnx_models as nnx_models
from . import plain as plain
from . import structured as structured
from ._case import CASES as CASES
from ._case import Case as Case
from ._case import Expected as Expected
from ._case import Tape as Tape
from ._case import flat as flat
from ._case import relaxed as relaxed
