"""NumPy transcription of `bilevax.deep`, the reference of its tests: loops, float64, by hand.

Networks after torchvision's `resnet.py` (v0.20, "ResNet v1.5": the stride of a bottleneck is in its
3 × 3), with parameters read by the names of its files. Methods after Sagawa et al. 2020 and the
paper's `eq:dro_lower`, `eq:dro_nested` and `alg:sapd`, for the encoder W·a, with the derivatives
derived here: nothing below calls JAX or the library.
"""

import numpy as np

# --- networks ----------------------------------------------------------------------------------


def padded(x, edge, value):
    return np.pad(x, ((0, 0), (edge, edge), (edge, edge), (0, 0)), constant_values=value)


def windows(x, side, stride, value=0.0):
    """[batch, row, column, height, width, channel] of every window; the edge is side//2 wide."""
    x = padded(np.asarray(x, np.float64), side // 2, value)
    rows = range(0, x.shape[1] - side + 1, stride)
    columns = range(0, x.shape[2] - side + 1, stride)
    return np.stack(
        [np.stack([x[:, i : i + side, j : j + side] for j in columns], 1) for i in rows], 1
    )


def conv(x, weight, stride):
    """Weight is [out, in, height, width]; no bias."""
    weight = np.asarray(weight, np.float64)
    seen = windows(x, weight.shape[2], stride)
    flat = weight.transpose(2, 3, 1, 0).reshape(-1, weight.shape[0])
    return seen.reshape(*seen.shape[:3], -1) @ flat


def conv_by_loops(x, weight, stride):
    """The same sum, written out."""
    out, inputs, side, _ = weight.shape
    batch, height, width, _ = x.shape
    edge = side // 2
    high, wide = (height + 2 * edge - side) // stride + 1, (width + 2 * edge - side) // stride + 1
    y = np.zeros((batch, high, wide, out))
    for i in range(high):
        for j in range(wide):
            for a in range(side):
                for b in range(side):
                    r, c = stride * i + a - edge, stride * j + b - edge
                    if 0 <= r < height and 0 <= c < width:
                        for o in range(out):
                            for k in range(inputs):
                                y[:, i, j, o] += x[:, r, c, k] * weight[o, k, a, b]
    return y


def max_pool(x):
    return windows(x, 3, 2, -np.inf).max(axis=(3, 4))


def batch_norm(x, arrays, name, statistics, moved):
    """torch.nn.BatchNorm2d with eps = 1e-5 and momentum = 0.1; new running ones go to `moved`."""
    get = lambda part: np.asarray(arrays[f"{name}.{part}"], np.float64)
    mean, variance = get("running_mean"), get("running_var")
    if statistics == "batch":
        rows = x.reshape(-1, x.shape[-1])
        own, spread = rows.mean(0), rows.var(0)
        moved[f"{name}.running_mean"] = 0.9 * mean + 0.1 * own
        moved[f"{name}.running_var"] = 0.9 * variance + 0.1 * rows.var(0, ddof=1)
        mean, variance = own, spread
    return (x - mean) / np.sqrt(variance + 1e-5) * get("weight") + get("bias")


DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3), "resnet50": (3, 4, 6, 3)}


def resnet(arrays, images, statistics):
    """Features, and the running statistics after this batch, by name.

    The blocks are those that the arrays name: with a third convolution they are bottlenecks.
    """
    relu, moved = lambda v: np.maximum(v, 0), {}
    norm = lambda v, at: batch_norm(v, arrays, at, statistics, moved)
    x = max_pool(relu(norm(conv(images, arrays["conv1.weight"], 2), "bn1")))
    for stage in (1, 2, 3, 4):
        depth = sum(f"layer{stage}.{place}.conv1.weight" in arrays for place in range(9))
        for place in range(depth):
            at, stride = f"layer{stage}.{place}", 2 if stage > 1 and place == 0 else 1
            strides = (1, stride, 1) if f"{at}.conv3.weight" in arrays else (stride, 1)
            y = x
            for number, step in enumerate(strides, 1):
                y = norm(conv(y, arrays[f"{at}.conv{number}.weight"], step), f"{at}.bn{number}")
                y = relu(y) if number < len(strides) else y
            short = x
            if f"{at}.downsample.0.weight" in arrays:
                short = conv(x, arrays[f"{at}.downsample.0.weight"], stride)
                short = norm(short, f"{at}.downsample.1")
            x = relu(y + short)
    return x.mean(axis=(1, 2)), moved


def resnet_shapes(name):
    """Every key of torchvision's file, with its shape, but the last layer's and the counters."""
    shapes, inputs = {}, 64

    def one(conv, norm, out, into, side):
        shapes[f"{conv}.weight"] = (out, into, side, side)
        shapes.update({f"{norm}.{p}": (out,) for p in ("weight", "bias")})
        shapes.update({f"{norm}.{p}": (out,) for p in ("running_mean", "running_var")})

    one("conv1", "bn1", 64, 3, 7)
    for stage, depth in enumerate(DEPTHS[name], 1):
        width = (64, 128, 256, 512)[stage - 1]
        for place in range(depth):
            at = f"layer{stage}.{place}"
            if name == "resnet50":
                outputs = 4 * width
                one(f"{at}.conv1", f"{at}.bn1", width, inputs, 1)
                one(f"{at}.conv2", f"{at}.bn2", width, width, 3)
                one(f"{at}.conv3", f"{at}.bn3", outputs, width, 1)
            else:
                outputs = width
                one(f"{at}.conv1", f"{at}.bn1", width, inputs, 3)
                one(f"{at}.conv2", f"{at}.bn2", width, width, 3)
            if place == 0 and (stage > 1 or inputs != outputs):
                one(f"{at}.downsample.0", f"{at}.downsample.1", outputs, inputs, 1)
            inputs = outputs
    return shapes


# --- losses ------------------------------------------------------------------------------------


def losses(features, head, label):
    """Cross entropy of every row, and its derivative in the row's logits: softmax − one-hot."""
    logits = features @ head.T
    logits = logits - logits.max(1, keepdims=True)
    total = np.exp(logits).sum(1)
    rows = np.arange(len(label))
    slope = np.exp(logits) / total[:, None]
    slope[rows, label] -= 1
    return np.log(total) - logits[rows, label], slope


def means(values, group, groups):
    """Group by group; 0 where there is no row."""
    return np.array([values[group == g].mean() if (group == g).any() else 0 for g in range(groups)])


class Rows:
    """Some rows of a batch and a head: the mean losses L of groups, and Σ_g w_g·∇L_g."""

    def __init__(self, features, head, label, group, groups):
        own, self.slope = losses(features, head, label)
        self.features, self.head, self.group = features, head, group
        self.L = means(own, group, groups)
        self.size = np.array([(group == g).sum() for g in range(groups)])

    def pulled(self, weights):
        """Σ_g w_g·L_g is Σ_i w_{g(i)}/n_{g(i)}·ℓ_i: its derivative in the features, the head."""
        d = (weights[self.group] / self.size[self.group])[:, None] * self.slope
        return d @ self.head, d.T @ self.features


# --- optimizers --------------------------------------------------------------------------------


class SGD:
    """m ← momentum·m + g, x ← x − rate·m."""

    def __init__(self, rate, momentum):
        self.rate, self.momentum, self.m = rate, momentum, None

    def __call__(self, at, gradient):
        old = [np.zeros_like(a) for a in at] if self.m is None else self.m
        self.m = [self.momentum * m + g for m, g in zip(old, gradient)]
        return [a - self.rate * m for a, m in zip(at, self.m)]


def to_simplex(v):
    """The nearest point with v ≥ 0 and sum 1: max(v − t, 0), t found by sorting."""
    largest = np.sort(v)[::-1]
    for k in range(len(v), 0, -1):
        t = (largest[:k].sum() - 1) / k
        if largest[k - 1] > t:
            return np.maximum(v - t, 0)
    raise AssertionError("k = 1 always has one")


# --- ERM and group DRO -------------------------------------------------------------------------


class Weighted:
    """min over (W, head); `counts` None is ERM."""

    def __init__(self, W, head, groups, sgd, *, counts=None, eta=0, C=0, step_q=0.01, l2=0):
        self.W, self.head, self.groups, self.sgd = W, head, groups, sgd
        self.counts, self.eta, self.C, self.step_q, self.l2 = counts, eta, C, step_q, l2
        self.q, self.loss = np.full(groups, 1 / groups), 0.0

    def step(self, images, label, group):
        a = images.reshape(len(images), -1)
        features = a @ self.W.T
        if self.counts is None:
            own, slope = losses(features, self.head, label)
            self.loss, d = own.mean(), slope / len(label)
            of_features, of_head = d @ self.head, d.T @ features
        else:
            rows = Rows(features, self.head, label, group, self.groups)
            gain = rows.L + self.C / np.sqrt(self.counts) - self.eta * (self.q - 1 / self.groups)
            self.q = self.q * np.exp(self.step_q * gain)
            self.q = self.q / self.q.sum()
            self.loss = self.q @ rows.L
            of_features, of_head = rows.pulled(self.q)
        gradient = of_features.T @ a + self.l2 * self.W, of_head + self.l2 * self.head
        self.W, self.head = self.sgd((self.W, self.head), gradient)


# --- the bilevel method ------------------------------------------------------------------------


class Bilevel:
    """SAPD on P; x and y are dicts of arrays, `sgd` takes the steps of x1 and y1 if given."""

    def __init__(self, W, head, groups, *, rho, L, D, eps, tau, theta, eta, l2, T, sigma=None,
                 sgd=None):  # fmt: skip
        even = np.full(groups, 1 / groups)
        self.x = {"x1": W, "eta": np.float64(eta), "y1": head, "y2": even}
        self.y = {"x2": even, "z1": head, "z2": even}
        self.y0, self.last, self.centre = dict(self.y), None, dict(self.x)
        self.groups, self.rho, self.L, self.tau, self.theta = groups, rho, L, tau, theta
        self.l2, self.T, self.sgd, self.t, self.loss = l2, T, sgd, 0, 0.0
        self.weight = eps / (2 * D)
        self.sigma = 1 / (3 * L + eps / (2 * D)) if sigma is None else sigma

    def halves(self, images, label, group, train, x, y):
        """Training rows with y1 and with z1, validation rows with y1."""
        a = images.reshape(len(images), -1)
        features = a @ x["x1"].T
        t, v = slice(0, train), slice(train, None)
        rows = lambda s, head: Rows(features[s], head, label[s], group[s], self.groups)
        return a, rows(t, x["y1"]), rows(t, y["z1"]), rows(v, x["y1"])

    def P(self, batch, x, y):
        _, train, other, held = self.halves(*batch, x, y)
        even = 1 / self.groups

        def lower(L, head, w):
            return w @ L - x["eta"] / 2 * ((w - even) ** 2).sum() + self.l2 / 2 * (head**2).sum()

        f = y["x2"] @ held.L + self.l2 / 2 * (x["x1"] ** 2).sum()
        gap = lower(train.L, x["y1"], y["z2"]) - lower(other.L, y["z1"], x["y2"])
        return f + self.rho * gap

    def gradient_y(self, batch, x, y):
        _, train, other, held = self.halves(*batch, x, y)
        return {
            "x2": held.L,
            "z1": -self.rho * (other.pulled(x["y2"])[1] + self.l2 * y["z1"]),
            "z2": self.rho * (train.L - x["eta"] * (y["z2"] - 1 / self.groups)),
        }

    def gradient_x(self, batch, x, y):
        a, train, other, held = self.halves(*batch, x, y)
        even = 1 / self.groups
        by_y1, of_y1 = train.pulled(y["z2"])
        by_z1, _ = other.pulled(x["y2"])
        by_held, of_held = held.pulled(y["x2"])
        of_features = np.concatenate([self.rho * (by_y1 - by_z1), by_held])
        far = lambda w: ((w - even) ** 2).sum()
        return {
            "x1": of_features.T @ a + self.l2 * x["x1"],
            "eta": self.rho / 2 * (far(x["y2"]) - far(y["z2"])),
            "y1": of_held + self.rho * (of_y1 + self.l2 * x["y1"]),
            "y2": -self.rho * (other.L - x["eta"] * (x["y2"] - even)),
        }

    def step(self, *batch):
        """batch: images, label, group, the number of training rows."""
        x, y = self.x, self.y
        own = self.gradient_y(batch, x, y)
        now = {k: own[k] - self.weight * (y[k] - self.y0[k]) for k in y}
        theta = 0 if self.t == 0 else self.theta
        last = now if self.last is None else self.last
        y = {k: y[k] + self.sigma * (now[k] + theta * (now[k] - last[k])) for k in y}
        self.y = {**y, "x2": to_simplex(y["x2"]), "z2": to_simplex(y["z2"])}
        self.last = now

        own = self.gradient_x(batch, x, self.y)
        self.loss = self.y["x2"] @ self.halves(*batch, x, self.y)[-1].L
        slope = {k: own[k] + 2 * self.L * (x[k] - self.centre[k]) for k in x}
        new = {k: x[k] - self.tau * slope[k] for k in x}
        if self.sgd is not None:
            pair = self.sgd((x["x1"], x["y1"]), (slope["x1"], slope["y1"]))
            new["x1"], new["y1"] = pair
        new["eta"] = max(new["eta"], 1e-6)
        new["y2"] = to_simplex(new["y2"])
        self.x = new
        self.t = (self.t + 1) % self.T
        if self.t == 0:
            self.centre = dict(new)
