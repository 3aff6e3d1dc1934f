"""The paper's experiments, and more: one class each, its sizes as fields."""

from ..experiment import Experiment
from .autoencoder import Autoencoder as Autoencoder
from .burgers import Burgers as Burgers
from .char_lm import CharLM as CharLM
from .lora import Lora as Lora
from .lstm import Lstm as Lstm
from .matrix_factorization import MatrixFactorization as MatrixFactorization
from .mnist import Mnist as Mnist
from .resnet import ResNet as ResNet
from .tabular import Tabular as Tabular
from .unet import UNet as UNet
from .vit import Vit as Vit

EXPERIMENTS: dict[str, type[Experiment]] = {
    experiment.name: experiment
    for experiment in (
        MatrixFactorization,
        Mnist,
        Vit,
        UNet,
        Autoencoder,
        CharLM,
        ResNet,
        Lstm,
        Tabular,
        Burgers,
        Lora,
    )
}
