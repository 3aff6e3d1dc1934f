"""Who meets whom on what. To dispute a result, change an entry here or add one."""

from typing import NamedTuple


class Workload(NamedTuple):
    """An experiment at its preset `arena`.

    Attributes:
      what: one line for the report.
      develops: whether LNB's own defaults may be chosen on it. The others judge them.
    """

    what: str
    develops: bool


WORKLOADS = {
    "mnist": Workload("an MLP on MNIST with inverted pixels, 1 - x", True),
    "autoencoder": Workload("a deep autoencoder of MNIST", True),
    "vit": Workload("a vision transformer on CIFAR-10", True),
    "unet": Workload("a U-Net on PASCAL VOC 2012", False),
    "char-lm": Workload("a character transformer with tied embeddings", True),
    "resnet": Workload("a ResNet with BatchNorm on CIFAR-10", False),
    "lstm": Workload("an LSTM on text", False),
    "tabular": Workload("a regression on badly scaled columns", True),
    "burgers": Workload("a physics-informed network of Burgers' equation", False),
    "lora": Workload("low-rank adapters on a trained MLP", False),
}

# Those that meet on every workload. Their settings are in `optimizers.py`, with their sources.
CONTESTANTS = (
    "adamw",
    "muon",
    "soap",
    "psgd",
    "schedule-free",
    "lnb",
    "lnb:neuron",
    "algorithm2",
)
# Those that meet the others on a few.
FURTHER = ("sgd", "nadamw", "prodigy", "shampoo", "kfac", "natural-gradient")
FEW_WORKLOADS = ("mnist", "autoencoder", "tabular")

BASELINE = "adamw"  # sets the targets
UNTUNED = {"lnb": 0.02}  # run once more at one learning rate for all workloads, without a search
