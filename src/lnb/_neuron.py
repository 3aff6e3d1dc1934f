"""A neuron: which parameters form it, and what is kept of what it is fed."""

import dataclasses

from ._features import Form, Layout, SiteRows


@dataclasses.dataclass(frozen=True)
class Neuron:
    """A function linear in its parameters: a weight, and a bias where there is one.

    Attributes:
      name: what the table and the diagnostics call it: the weight's key path, and which slice of
        it where slices of one weight are neurons of their own.
      weight: the key path of the weight.
      bias: the key path of the bias, or `None`.
      kind: `"dense"`, `"conv"`, `"lookup"`, `"scale"` or `"identity"` (M = I by definition).
      d_in: the number of inputs (of a convolution, filter taps times channels).
      d_out: the number of outputs.
      n: the number of positions at which one output unit is computed.
      layout: how the weight, or a slice of it, stands as a matrix; a column if it has no matrix
        form.
      bias_layout: how the bias does.
      has_matrix: whether all sites see the weight as that matrix, so that M is one Gram matrix.
      forms: of each site, what is kept of its features.
      fed: a number for what it is fed; neurons with the same number are fed the same rows.
    """

    name: str
    weight: str
    bias: str | None
    kind: str
    d_in: int
    d_out: int
    n: int
    layout: Layout = dataclasses.field(repr=False)
    bias_layout: Layout | None = dataclasses.field(default=None, repr=False)
    has_matrix: bool = dataclasses.field(default=False, repr=False)
    forms: tuple[Form, ...] = dataclasses.field(default=(), repr=False)
    fed: int = dataclasses.field(default=0, repr=False)

    @property
    def sites(self) -> int:
        """At how many places in the program it is applied."""
        return len(self.forms)

    @property
    def rows(self) -> int:
        """At how many of its positions features are kept; 0 where not all of them are rows."""
        rows = [form.arrangement.shape[1] for form in self.forms if isinstance(form, SiteRows)]
        return sum(rows) if len(rows) == len(self.forms) else 0

    @property
    def gram_flops(self) -> float:
        """What the Gram matrices of its rows cost."""
        return sum(form.arrangement.flops() for form in self.forms if isinstance(form, SiteRows))
