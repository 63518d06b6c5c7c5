"""All settings of a training run, as flags, as a file and as a Python object; and the data, the
network and the method that they name."""

from __future__ import annotations

import dataclasses
import functools
import json
import tomllib
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from bilevax.arguments import non_negative, positive, whole
from bilevax.deep.bilevel import BilevelDRO, SoftGroups
from bilevax.deep.colour_mnist import CORRELATION, Shift, colour_mnist
from bilevax.deep.dominoes import dominoes
from bilevax.deep.methods import ERM, GroupDRO, Method, Optimizer, direction
from bilevax.deep.networks import ENCODERS, Model, load_encoder, model
from bilevax.deep.pixels import Images, load
from bilevax.deep.tables import UNKNOWN, open_table

Network = Literal["cnn", "resnet18", "resnet34", "resnet50"]
MethodName = Literal["bilevel", "group-dro", "erm"]
METHODS: dict[str, type[Method]] = {"bilevel": BilevelDRO, "group-dro": GroupDRO, "erm": ERM}
assert get_args(Network) == tuple(ENCODERS)
assert get_args(MethodName) == tuple(METHODS)

#: The file of a run's settings in its folder.
SETTINGS = "settings.json"
#: The file that tells a folder of MNIST.
COLOURED = "train-images-idx3-ubyte"
#: Settings that a resumed run may change: the steps it takes are the same. (The rows of the data
#: are compared too. On an accelerator, other memory may mean another program, and rounding.)
FREE = ("data", "out", "cache", "memory_gb", "workers", "patience", "save_every", "chunk")
#: Which numbers a setting may be, if it is not None.
CHECKS: tuple[tuple[Callable[[Any, str], None], str], ...] = (
    (positive, "learning_rate rho smoothness diameter epsilon tau step_q memory_gb"),
    (non_negative, "l2 theta adjustment momentum eta radius radius_bound"),
    (functools.partial(whole, least=1), "batch epochs iterations size chunk patience save_every"),
    (functools.partial(whole, least=0), "seed workers"),
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to train a network whose worst group does well."""

    data: Annotated[Path, tyro.conf.Positional] = Path()
    """A folder of Waterbirds, of CelebA, with mnist/ and fashion-mnist/ (dominoes), or with MNIST's
    files (coloured digits); or a CSV with the columns filename, label, group, split."""
    out: Path = Path("deep")
    """The folder for checkpoints, logs, results.json and model.safetensors."""

    method: MethodName = "bilevel"
    """The bilevel method, group DRO with exponentiated weights, or plain training."""
    network: Network = "resnet50"
    """The encoder."""
    weights: Path | None = None
    """Pretrained weights, a .safetensors file as torchvision or timm name them."""
    batch_norm: Literal["batch", "frozen"] = "batch"
    """Normalise with a batch's own statistics, or with the stored ones throughout."""
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    """What the network computes in; auto is bfloat16 on an accelerator. Parameters are float32."""

    batch: int = 128
    """Training rows of a batch; the bilevel method takes as many validation rows too."""
    epochs: int = 20
    """Epochs; one has as many rows as there are training rows."""
    patience: int | None = None
    """Stop after so many epochs without a better worst group on the validation rows; the bilevel
    method trains on these too."""
    seed: int = 0
    """The seed of the first parameters, the order of rows, the augmentation and the dominoes
    or coloured digits."""

    optimizer: Literal["sgd", "adam", "none"] = "sgd"
    """How the network's parameters step; none is the paper's plain step τ (bilevel only)."""
    learning_rate: float = 0.01
    """The learning rate of the optimizer."""
    momentum: float = 0.9
    """The momentum of sgd, or β₁ of adam."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Whether the learning rate is constant, or falls to 0 over all epochs."""
    l2: float = 1e-4
    """λ, the weight of half the squared norm of the parameters."""

    eta: float | None = None
    """η of the group weights: the bilevel method's first one (1), or group DRO's own (0)."""
    rho: float = 1.0
    """ρ, the penalty on the lower level's gap."""
    smoothness: float = 10.0
    """L, which sets the step σ = 1/(3L + ε/(2D)) of the maximised block."""
    diameter: float = 100.0
    """D, the diameter of the maximised block's domain."""
    epsilon: float = 1.0
    """ε of the maximised block's regulariser."""
    tau: float = 0.1
    """τ, the step of the minimised block (of η and the group weights, if there is an optimizer)."""
    theta: float = 0.1
    """θ, SAPD's momentum, which acts from the second of its iterations."""
    iterations: int = 1
    """T, SAPD's iterations before the proximal centre moves."""

    radius: float = 0.0
    """How far features of training images may move in the losses of group DRO and of the bilevel
    method's lower level; the first radius of every group, if there is a bound."""
    radius_bound: float = 0.0
    """The bilevel method tunes the radius of each group from 0 to this; with 0 radii are fixed."""
    soft_groups: SoftGroups = "none"
    """For training rows without a group (bilevel only): a predictor gives them shares in groups. It
    is trained on the validation rows, and with "tuned" by the upper level, too."""

    step_q: float = 0.01
    """Group DRO's step of the weights."""
    adjustment: float = 0.0
    """Group DRO's C, in C/√n_g."""

    correlation: float | None = None
    """The share of training images whose digit (dominoes, 0.95) or colour (coloured digits, 0.8)
    goes with the class."""
    label_noise: float = 0.25
    """The share of coloured digits with a wrong label."""
    shift: Shift = "held-out"
    """Where a rare group's coloured digits are turned: in validation and test, in test, nowhere."""
    size: int = 224
    """The side of the images that the network sees; dominoes are 64 × 32."""
    augment: bool = False
    """Random crops and flips."""
    cache: Path | None = None
    """A folder that keeps decoded images for the next run."""
    memory_gb: float = 16.0
    """Decode all images at once if they take no more than this."""
    workers: int = 0
    """Processes that decode; 0 decodes in threads."""

    save_every: int | None = None
    """Steps between checkpoints, beside the one after each epoch."""
    chunk: int = 50
    """Steps that the device takes before it reports to the host."""

    def __post_init__(self):
        for name, value in vars(self).items():
            object.__setattr__(self, name, _checked(name, value))
        for check, names in CHECKS:
            for name in names.split():
                if getattr(self, name) is not None:
                    check(getattr(self, name), name)
        if self.seed >= 1 << 32:
            raise ValueError(f"seed must be less than 2³², not {self.seed}")
        for name in ("correlation", "label_noise"):
            if (share := getattr(self, name)) is not None and not 0 <= share <= 1:
                raise ValueError(f"{name} must be from 0 to 1, not {share}")
        if self.momentum >= 1:
            raise ValueError(f"momentum must be < 1, not {self.momentum}")
        if self.optimizer == "none" and self.method != "bilevel":
            raise ValueError("optimizer none is the bilevel method's own step; choose sgd or adam")
        if self.optimizer == "none" and self.schedule != "constant":
            raise ValueError("a schedule is of an optimizer; there is none")
        if self.method == "bilevel" and self.iterations > 1:
            self._check_pull()
        self._check_ambiguity()

    def _check_ambiguity(self) -> None:
        """Radii are of group DRO and the bilevel method, all that is tuned of the latter."""
        if self.method == "erm" and self.radius:
            raise ValueError("radius is of the losses of groups; erm has none")
        if self.method != "bilevel":
            for name, off in (("radius_bound", 0.0), ("soft_groups", "none")):
                if getattr(self, name) != off:
                    raise ValueError(f"{name} is of the bilevel method, not of {self.method}")
        if self.radius_bound and self.radius > self.radius_bound:
            raise ValueError(
                f"radius must be at most radius_bound, which is {self.radius_bound:g}, not "
                f"{self.radius:g}"
            )

    def _check_pull(self) -> None:
        """The gradient 2L(x − x^k) of the pull to the centre needs steps that shrink it."""
        steps = {"tau": (self.tau, 1.0)}
        if self.optimizer == "sgd":  # of the heavy ball
            steps["learning_rate"] = (self.learning_rate, 1 + self.momentum)
        for name, (step, most) in steps.items():
            if step * self.smoothness >= most:
                raise ValueError(
                    f"with iterations > 1 the pull to the centre diverges unless {name}·smoothness "
                    f"< {most:g}, but it is {step * self.smoothness:g}; lower {name}"
                )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        plain = lambda v: str(v) if isinstance(v, Path) else v
        return {name: plain(value) for name, value in vars(self).items()}


def from_dict(values: Mapping[str, Any], source: str) -> Settings:
    """Settings by name; refuses unknown names and values of a wrong type."""
    known = {field.name for field in dataclasses.fields(Settings)}
    given: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in known:
            raise ValueError(f"{source}: there is no setting {key!r}")
        if name in given:
            raise ValueError(f"{source}: {name} is given twice")
        given[name] = value
    try:
        return Settings(**given)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{source}: {error}") from None


def read_settings(path: Path) -> Settings:
    """Settings from a .toml or .json file."""
    if path.suffix not in (".toml", ".json"):
        raise ValueError(f"{path}: settings are a .toml or a .json file")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold names and values, not a {type(values).__name__}")
    return from_dict(values, str(path))


def run_settings(folder: Path) -> Settings:
    """The settings of the run in a folder."""
    path = folder / SETTINGS
    if not path.is_file():
        raise FileNotFoundError(f"the folder {folder} holds no run: there is no {SETTINGS}")
    return read_settings(path)


def _checked(name: str, value: Any) -> Any:
    """A value as the type of its setting."""
    hint = get_type_hints(Settings)[name]
    for kind in get_args(hint) if isinstance(hint, types.UnionType) else (hint,):
        choices = get_args(kind)
        if value is None and kind is types.NoneType:
            return None
        if kind is Path and isinstance(value, str | Path):
            return Path(value)
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if type(value) is kind or (choices and value in choices):
            return value
    allowed = f"; it is one of {', '.join(get_args(hint))}" if get_origin(hint) is Literal else ""
    raise ValueError(f"{name} cannot be {value!r}{allowed}")


def check_same_run(settings: Settings) -> None:
    """Refuse to resume the run in `settings.out` with settings that would make it another one."""
    saved = run_settings(settings.out).as_dict()
    for name, value in settings.as_dict().items():
        free = name in FREE or (name == "epochs" and settings.schedule == "constant")
        if not free and saved[name] != value:
            raise ValueError(
                f"{settings.out} was made with {name} = {saved[name]!r}, not {value!r}: resume it "
                "with its own settings, or train into another folder"
            )


def images_of(settings: Settings) -> Images:
    """The data set, by the layout of its folder."""
    s, path = settings, settings.data
    if (path / "mnist").is_dir() and (path / "fashion-mnist").is_dir():
        return dominoes(path, 0.95 if s.correlation is None else s.correlation, seed=s.seed)
    if any((path / f"{COLOURED}{end}").is_file() for end in ("", ".gz")):
        share = CORRELATION if s.correlation is None else s.correlation
        return colour_mnist(path, share, label_noise=s.label_noise, shift=s.shift, seed=s.seed)
    ways = {"workers": s.workers, "cache": s.cache, "limit_gb": s.memory_gb}
    return load(open_table(path), s.size, **ways)


def check_groups(settings: Settings, images: Images) -> None:
    """Refuse training rows without a group for a method that needs it, and soft groups for none."""
    s = settings
    if images.unknown and s.method != "erm" and s.soft_groups == "none":
        raise ValueError(
            f"{images.unknown} training rows have no group, which {s.method} needs: give them one, "
            "or choose erm, or bilevel with soft_groups predicted or tuned"
        )
    if not images.unknown and s.soft_groups != "none":
        raise ValueError(
            f"soft_groups cannot be {s.soft_groups}: every training row has a group; a row without "
            f"one has the group {UNKNOWN}"
        )


def model_of(settings: Settings, classes: int) -> Model:
    """The network before the first step."""
    made = model(settings.network, classes, jax.random.key(settings.seed))
    if settings.weights is None:
        return made
    return Model(load_encoder(made.encoder, settings.weights), made.head)


def precision_of(settings: Settings) -> Literal["bfloat16", "float32"]:
    if settings.precision != "auto":
        return settings.precision
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def method_of(settings: Settings, counts: np.ndarray, steps: int, optimizer: Any = None) -> Method:
    """The method with its constants as arrays, so that one program serves them all.

    `counts` are the training rows of each group, `steps` the steps of the whole run; `optimizer`
    replaces the one that the settings name.
    """
    s, number = settings, lambda value: jnp.asarray(value, jnp.float32)
    if optimizer is None and s.optimizer != "none":
        fall = number(steps) if s.schedule == "cosine" else None
        optimizer = Optimizer(direction(s.optimizer, s.momentum), number(s.learning_rate), fall)
    chosen: Any = lambda *names: {name: number(getattr(s, name)) for name in names}
    given: dict[str, Any] = {"optimizer": optimizer, **chosen("l2")}
    given["statistics"] = "batch" if s.batch_norm == "batch" else "running"
    if s.method == "erm":
        return ERM(groups=len(counts), **given)
    first_eta = 1.0 if s.method == "bilevel" else 0.0
    given["eta"] = number(first_eta if s.eta is None else s.eta)
    if s.radius or s.radius_bound:
        given["radii"] = jnp.full(len(counts), s.radius, jnp.float32)
    if s.method == "group-dro":
        return GroupDRO(counts=number(counts), **given, **chosen("adjustment", "step_q"))
    given |= chosen("rho", "smoothness", "diameter", "epsilon", "tau", "theta")
    given |= {"bound": number(s.radius_bound) if s.radius_bound else None}
    given |= {"soft_groups": s.soft_groups}
    return BilevelDRO(len(counts), iterations=s.iterations, **given)
