"""All contact with JAX's internals: neurons are found in a jaxpr, and features taken out of it.

`_trace` makes the jaxpr of a loss, `_versions` reads it. `_walk` follows the parameters through it,
by the rules of `_views`, `_sites` and `_constants`, into control flow by `_flow`; `_values` are
what it knows of a value. `_claims` makes neurons of what it found. `_emit` runs the program with
what the sites were fed as further outputs.
"""

from ._claims import Claim as Claim
from ._claims import make_claims as make_claims
from ._emit import Emitter as Emitter
from ._emit import Key as Key
from ._emit import Payloads as Payloads
from ._trace import Trace as Trace
from ._trace import is_array as is_array
from ._trace import is_parameter as is_parameter
from ._trace import path_name as path_name
from ._trace import trace_loss as trace_loss
from ._values import Site as Site
from ._versions import varying_axes as varying_axes
from ._walk import Lineage as Lineage
from ._walk import trace_lineage as trace_lineage
