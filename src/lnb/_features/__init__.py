"""What neurons were fed, as arrays. Nothing here knows how a program is traced.

`_dims` and `_layout` say how a parameter stands as a matrix, `_rows` how features stand as rows,
`_windows` how convolutions do without patches, `_experts` which rows are which expert's,
`_residuals` what is kept where there is no matrix, `_seal` that features are not added up.
"""

from . import _dims as dims
from ._dims import Axes as Axes
from ._dims import Axis as Axis
from ._dims import Dim as Dim
from ._experts import Gathered as Gathered
from ._experts import Ragged as Ragged
from ._layout import Layout as Layout
from ._residuals import Chain as Chain
from ._residuals import Program as Program
from ._residuals import Residuals as Residuals
from ._residuals import Step as Step
from ._rows import Arrangement as Arrangement
from ._rows import Rows as Rows
from ._rows import SiteRows as SiteRows
from ._rows import Sums as Sums
from ._rows import accumulator as accumulator

__all__ = [
    "Arrangement",
    "Axes",
    "Axis",
    "Chain",
    "Dim",
    "Gathered",
    "Layout",
    "Program",
    "Ragged",
    "Residuals",
    "Rows",
    "SiteRows",
    "Step",
    "Sums",
    "accumulator",
    "dims",
]
