"""Random layers and networks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import _dense as dense
from . import _elementwise as elementwise
from . import _joined as joined
from . import _sliced as sliced
from . import _structure as structure
from ._conv import Conv
from ._layer import Chain, Layer
from ._stored import FORMS, UNSTRUCTURED

WORDS = 4


class Draw:
    """Random choices, and the shape that the next layer will see."""

    def __init__(
        self, rng: np.random.Generator, time: int, width: int, largest: int, half: bool = False
    ):
        self.rng = rng
        self.time = time
        self.width = width
        self.largest = largest  # of all widths
        self.half = half  # whether some layers compute in bfloat16
        self.tokens = time  # how many there are: lookups need as many times
        self.alone = False  # whether a loop runs examples one by one
        self.smooth = False  # whether all is to be differentiated
        self.scales = True  # whether there may be some

    def pick(self, *options: Any) -> Any:
        return options[self.rng.integers(len(options))]

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def size(self, largest: int | None = None) -> int:
        return int(self.rng.integers(1, min(largest or self.largest, self.largest) + 1))

    def shuffled(self, letters: str) -> str:
        return "".join(self.rng.permutation(list(letters)))

    def factors(self, size: int) -> tuple[int, ...]:
        """A size as one axis or two."""
        divisors = [n for n in range(2, size) if size % n == 0]
        if divisors and self.chance(0.4):
            first = self.pick(*divisors)
            return first, size // first
        return (size,)


# -- single layers --------------------------------------------------------------------------------


def draw_dense(draw: Draw, outputs: int) -> dense.Dense:
    inputs, outs = draw.factors(draw.width), draw.factors(outputs)
    ins, out_letters = "de"[: len(inputs)], "op"[: len(outs)]
    plain = draw.chance(0.3)
    shuffled = (lambda letters: letters) if plain else draw.shuffled
    half = draw.pick("cast", "stored", None) if draw.half else None
    form = "plain" if draw.chance(0.6) else draw.pick(*FORMS)
    bias = draw.pick(*["added"] * 5, "subtracted", "halved", *[None] * 4)
    return dense.Dense(
        inputs,
        outs,
        weight_order=shuffled(ins + out_letters),
        output_order=shuffled("bt" + out_letters),
        bias_order=shuffled(out_letters),
        bias=None if form in UNSTRUCTURED and draw.chance(0.8) else bias,
        form=form,
        weight_first=draw.chance(0.3),
        half=half,
    )


def draw_conv(draw: Draw, keep_time: bool) -> Conv:
    """A convolution whose output has at least one pixel."""
    while True:
        parts = draw.factors(draw.width)
        spatial = (parts[0],) if len(parts) == 2 else ()
        rank = 1 + len(spatial)
        channels, outputs = parts[-1], draw.size(3 if spatial else 6)
        many = lambda *options: tuple(draw.pick(*options) for _ in range(rank))
        order = lambda: tuple(int(i) for i in draw.rng.permutation(rank + 2))
        taps, dilation = many(1, 2, 2, 3), many(1, 1, 2)
        if keep_time:
            strides = spread = (1,) * rank
            total = [(k - 1) * d for k, d in zip(taps, dilation, strict=True)]
            padding = tuple((n // 2, n - n // 2) for n in total)
        else:
            strides, spread = many(1, 1, 2), many(1, 1, 1, 2)
            padding = tuple((draw.pick(0, 0, 1, 2), draw.pick(0, 0, 1)) for _ in range(rank))
        common = math.gcd(channels, outputs)
        flipped = draw.chance(0.1)
        form = "plain" if draw.chance(0.7) else draw.pick(*FORMS)
        conv = Conv(
            image=(draw.time, *spatial),
            channels=channels,
            outputs=outputs,
            taps=taps,
            strides=strides,
            dilation=dilation,
            spread=spread,
            padding=padding,
            groups=draw.pick(1, common),
            specs=(order(), order(), order()),
            flipped=flipped,
            bias=draw.chance(0.1 if flipped or form in UNSTRUCTURED else 0.5),
            form=form,
        )
        time, width = conv.out_shape
        if min(conv.output_image) >= 1 and time <= 4 and width <= 12:
            return conv


def draw_scale(draw: Draw) -> Layer:
    return elementwise.Scale(
        shape=draw.pick((draw.width,), (draw.width,), (draw.time, draw.width), ()),
        norm=draw.pick("layer", "rms", "late", "none"),
        bias=draw.chance(0.5),
        scale_first=draw.chance(0.5),
    )


def draw_added(draw: Draw, keep_time: bool) -> elementwise.Added:
    way = draw.pick("position", "everywhere", "beside", *([] if keep_time else ["first"]))
    shapes = {"position": (draw.time, draw.width), "beside": (draw.size(2),)}
    return elementwise.Added(way, shapes.get(way, (draw.width,)))


def draw_sliced(draw: Draw, outputs: int) -> Layer:
    axis, bias = draw.pick(0, 1), draw.chance(0.5)
    # Slices that see different numbers of positions must be neurons of their own.
    apart = not draw.smooth and (axis == 1 or not bias)
    return sliced.Sliced(
        draw.width,
        outputs,
        axis=axis,
        cut=draw.pick("slice", "split", "strided"),
        fed=(draw.pick("x", "sin"), draw.pick("x", "sin", *(["mean"] if apart else []))),
        bias=bias,
    )


def draw_layer(draw: Draw, keep: str) -> list[Layer]:
    """A layer, with an activation behind it; what comes next sees its shape."""
    keep_time = keep != ""
    width, outputs = draw.width, draw.size()
    if keep == "all" and draw.chance(0.7):
        outputs = width
    match draw.pick(*_kinds(draw)):
        case "dense":
            layer = draw_dense(draw, outputs)
            draw.width = outputs
        case "conv":
            layer = draw_conv(draw, keep_time)
            draw.time, draw.width = layer.out_shape
        case "scale":
            layer = draw_scale(draw)
        case "tied":
            layer = joined.Tied(width, outputs, draw.pick("", "b", "c", "bc"))
        case "sliced":
            layer = draw_sliced(draw, outputs)
            draw.width = outputs
        case "added":
            layer = draw_added(draw, keep_time)
            draw.time += layer.way == "first"
            draw.width += layer.shape[0] if layer.way == "beside" else 0
        case "per time":
            layer = dense.PerTime(draw.time, width, outputs, draw.chance(0.5))
            draw.width = outputs
        case "attention":
            head = draw.size(3)
            layer = sliced.Attention(width, head, draw.pick("weight", "output"), draw.chance(0.5))
            draw.width = head
        case "two sites":
            layer = joined.TwoSites(width, outputs, draw.pick(None, "sum", "both"))
            draw.width = outputs
        case "chosen":
            layer = sliced.Chosen(width, outputs, draw.chance(0.5))
            draw.width = outputs
        case "tied lookup":
            layer = joined.TiedLookup(WORDS, width)
            draw.width = WORDS
        case "low rank":
            layer = dense.LowRank(width, draw.size(3), outputs)
            draw.width = outputs
        case "two weights":
            layer = joined.TwoWeights(width, draw.size(3), draw.pick("added", "concatenated"))
            draw.width = layer.outputs * (1 if layer.joined == "added" else 2)
        case "weight norm":
            layer = joined.WeightNorm(width, outputs)
            draw.width = outputs
        case _:
            way = draw.pick("index", "take", "transposed", "slice", "one hot")
            layer = elementwise.Lookup(WORDS, width, way)
    name = draw.pick(*(elementwise.SMOOTH if draw.smooth else elementwise.ACTIVATIONS))
    return [layer] if name == "none" else [layer, elementwise.Activation(name)]


def _kinds(draw: Draw) -> list[str]:
    kinds = ["dense"] * 4 + ["conv"] * 3 + ["tied", "sliced", "added", "per time"]
    kinds += ["attention", "two sites", "low rank", "chosen"]
    kinds += ["lookup", "lookup", "tied lookup"] if draw.time == draw.tokens else []
    kinds += ["scale"] * 3 if draw.scales else []
    return kinds if draw.smooth else [*kinds, "two weights", "weight norm"]


# -- networks -------------------------------------------------------------------------------------


def draw_chain(draw: Draw, depth: int, length: int, keep: str = "") -> Chain:
    """Layers one after the other, some of them with layers inside.

    `keep` says what of the shape stays as it is: "time", "all" or nothing.
    """
    width = draw.width
    layers: list[Layer] = []
    for _ in range(length):
        if depth and draw.chance(0.5):
            layers.append(draw_structure(draw, depth, keep))
        else:
            layers += draw_layer(draw, keep)
    if keep == "all" and draw.width != width:
        layers += [draw_dense(draw, width), elementwise.Activation("tanh")]
        draw.width = width
    return Chain(tuple(layers))


def draw_structure(draw: Draw, depth: int, keep: str) -> Layer:
    inner = lambda keep="all": draw_chain(draw, depth - 1, draw.pick(1, 1, 1, 2), keep)
    kinds = ["call", "examples", "times", "recurrent", "stacked", "stacked", "repeated", "residual"]
    match draw.pick(*kinds, *([] if draw.smooth else ["branches"])):
        case "call":
            # Differentiated inside of the loss, checkpoints would run some sites once more.
            how = "jit" if draw.smooth else draw.pick(*structure.CALLS)
            return structure.Call(inner(keep), how)
        case "examples":
            how = draw.pick("vmap", "map")
            alone, draw.alone = draw.alone, draw.alone or how == "map"
            layer = structure.Examples(inner(keep), how)
            draw.alone = alone
            return layer
        case "times":
            return structure.Times(_at_one_time(draw, inner))
        case "recurrent":
            gated = not draw.smooth and draw.chance(0.3)
            return structure.Recurrent(_at_one_time(draw, inner), draw.chance(0.5), gated)
        case "stacked":
            how = draw.pick("scan", "scan", "fori", "unrolled")
            return structure.Stacked(inner(), draw.pick(2, 3), draw.pick(0, 0, -1), how)
        case "repeated":
            how = draw.pick("twice", "loop", "both")
            return structure.Repeated(inner(), how, draw.chance(0.3))
        case "residual":
            return structure.Residual(inner())
    how = draw.pick("cond", "switch", *([] if draw.alone else ["each"]))
    return structure.Branches(inner(), inner(), how)


def _at_one_time(draw: Draw, inner) -> Layer:
    time, tokens = draw.time, draw.tokens
    draw.time, draw.tokens = 1, -1
    layer = inner()
    draw.time, draw.tokens = time, tokens
    return layer


def draw_network(draw: Draw, depth: int, scales: bool) -> Chain:
    """What losses differentiate by its input: smooth, a site at either end, one output.

    With scales, the metric is left open. Derivatives multiply a scale by that of its input and by
    that of the activation behind it: which of them is what the scale is fed?
    """
    draw.smooth, draw.scales = True, scales
    first = draw_dense(draw, draw.size())
    draw.width = first.d_out
    middle = draw_chain(draw, depth, length=draw.pick(0, 1, 1))
    # Where derivatives start from ones, weights are views until they meet that of the activation:
    # of a sine, that is one product.
    sine = elementwise.Activation("sin")
    last = draw_dense(draw, 1)
    return Chain((first, sine, *((middle, sine) if middle.layers else ()), last))
