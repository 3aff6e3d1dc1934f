"""The paper's experiments, its related methods, and the `lnb` command that runs them."""
