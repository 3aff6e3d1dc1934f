"""All contact with JAX's internals: neurons are found in a jaxpr, and features taken out of it.

`_trace` makes the jaxpr of a loss. `_lineage` follows the parameters through it, by the rules of
`_views` and `_sites`, into control flow by `_flow`; `_axes` and `_values` are what it knows of a
value, `_equation` and `_tail` what can be told of an equation. `_claims` makes neurons of what it
found, with a `_layout` each. `_emit` runs the program with features as further outputs: their
`_statistics`, or what a `_program` needs to run a site again.
"""

from ._claims import Claim as Claim
from ._claims import make_claims as make_claims
from ._emit import Emitter as Emitter
from ._emit import Plan as Plan
from ._emit import make_program as make_program
from ._layout import Layout as Layout
from ._lineage import Lineage as Lineage
from ._lineage import trace_lineage as trace_lineage
from ._program import Program as Program
from ._statistics import Arrangement as Arrangement
from ._statistics import accumulator as accumulator
from ._statistics import arrange as arrange
from ._statistics import output_rows as output_rows
from ._trace import Trace as Trace
from ._trace import is_array as is_array
from ._trace import is_parameter as is_parameter
from ._trace import path_name as path_name
from ._trace import trace_loss as trace_loss
