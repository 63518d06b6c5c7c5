"""Deep bilevel DRO: networks whose worst group does well, trained on images.

`train(Settings(data=…, out=…))` is what `bilevax deep train` calls. `ERM`, `GroupDRO` and
`BilevelDRO` are the methods, each a step on a batch, for loops of your own.
"""

from bilevax.deep.ablation import ablate
from bilevax.deep.bilevel import BilevelDRO
from bilevax.deep.colour_mnist import colour_mnist
from bilevax.deep.dominoes import dominoes
from bilevax.deep.evaluation import evaluate
from bilevax.deep.methods import ERM, Batch, GroupDRO, Method, Optimizer
from bilevax.deep.networks import Encoder, Model, encoder, load_encoder, model, save_model
from bilevax.deep.pixels import ImageError, Images, load
from bilevax.deep.settings import Settings
from bilevax.deep.tables import ImageTable, celeba, manifest, open_table, waterbirds
from bilevax.deep.training import Interrupted, Trained, train

__all__ = [
    "ERM",
    "Batch",
    "BilevelDRO",
    "Encoder",
    "GroupDRO",
    "ImageError",
    "ImageTable",
    "Images",
    "Interrupted",
    "Method",
    "Model",
    "Optimizer",
    "Settings",
    "Trained",
    "ablate",
    "celeba",
    "colour_mnist",
    "dominoes",
    "encoder",
    "evaluate",
    "load",
    "load_encoder",
    "manifest",
    "model",
    "open_table",
    "save_model",
    "train",
    "waterbirds",
]
