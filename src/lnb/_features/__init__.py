"""What neurons were fed, as arrays. Nothing here knows how a program is traced.

`dims` and `_layout` say how a parameter stands as a matrix, `_rows` how features stand as rows,
`_windows` how convolutions do without patches, `_experts` which rows are which expert's,
`_program` what is kept where there is no matrix. `_fed` has the features of a whole neuron.
"""

from . import dims as dims
from ._experts import Gathered as Gathered
from ._experts import Ragged as Ragged
from ._fed import Features as Features
from ._fed import Form as Form
from ._layout import Layout as Layout
from ._program import Chain as Chain
from ._program import Program as Program
from ._program import Step as Step
from ._rows import Arrangement as Arrangement
from ._rows import Moments as Moments
from ._rows import SiteRows as SiteRows
from ._rows import accumulator as accumulator
from .dims import Axes as Axes
from .dims import Axis as Axis
from .dims import Dim as Dim
