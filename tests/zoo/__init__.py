"""The zoo: small models of every make, with what is known of their neurons."""

from . import (
    equinox_models as equinox_models,
    haiku_models as haiku_models,
    linen_models as linen_models,
    nnx_models as nnx_models,
    plain as plain,
    structured as structured,
)
from ._case import (
    CASES as CASES,
    Case as Case,
    Expected as Expected,
    Tape as Tape,
    flat as flat,
    relaxed as relaxed,
)
