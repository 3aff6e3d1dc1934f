"""The paper's experiments, and two more: one class each, its sizes as fields."""

from ..experiment import Experiment
from .autoencoder import Autoencoder as Autoencoder
from .char_lm import CharLM as CharLM
from .matrix_factorization import MatrixFactorization as MatrixFactorization
from .mnist import Mnist as Mnist
from .unet import UNet as UNet
from .vit import Vit as Vit

EXPERIMENTS: dict[str, type[Experiment]] = {
    experiment.name: experiment
    for experiment in (MatrixFactorization, Mnist, Vit, UNet, Autoencoder, CharLM)
}
