"""A multilayer perceptron in NumPy: one input at a time in some microseconds, and batches to train it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, Literal, Self, TypeAlias, final

import numpy as np

from spillway.errors import UsageError
from spillway.pilots.paths import Floats

Loss: TypeAlias = Literal["squares", "logits"]
"""Half the mean square, or the mean cross-entropy of a sigmoid; over the outputs that count."""
Rule: TypeAlias = Literal["sgd", "adam"]
"""Stochastic gradient descent with momentum .9, or Adam (Kingma and Ba 2015) with its usual .9 and .999."""

SLOPE: Final = np.float32(0.01)
"""Of LeakyReLU below zero."""
STEADY: Final = np.float32(1e-6)
"""A feature that deviates less than this never varies."""


@final
class Mlp:
    """Linear layers with LeakyReLU between them (DyNN-Offload, section V), on features of mean 0 and variance 1. The
    `widths` are of features, hidden layers and outputs; weights are drawn as He et al. 2015 do, uniform."""

    def __init__(self, widths: Sequence[int], *, seed: int = 0) -> None:
        if len(widths) < 2 or min(widths) < 1:
            raise UsageError(f"A perceptron has two widths or more, each of 1 or more; got {list(widths)}.")
        random = np.random.default_rng(seed)
        self.weights: list[Floats] = []
        """A matrix a layer, [in + 1, out]; the last row is the bias."""
        for layer, (fan_in, fan_out) in enumerate(pairwise(widths)):
            bound = (6 / fan_in) ** 0.5 if layer < len(widths) - 2 else (1 / fan_in) ** 0.5
            matrix = random.uniform(-bound, bound, (fan_in + 1, fan_out)).astype(np.float32)
            matrix[-1] = 0
            self.weights.append(matrix)
        self.mean = np.zeros(widths[0], np.float32)
        self.scale = np.ones(widths[0], np.float32)
        self._prepare()

    @property
    def widths(self) -> tuple[int, ...]:
        """Features, hidden widths, outputs."""
        return (len(self.weights[0]) - 1, *(matrix.shape[1] for matrix in self.weights))

    def _prepare(self) -> None:
        """Make what is kept between calls, for these widths."""
        # The input of a layer ends in a 1, which meets the bias.
        self._inputs = [np.ones(width + 1, np.float32) for width in self.widths]
        self._heads = [one[:-1] for one in self._inputs]
        self._below = [np.empty_like(one) for one in self._heads]
        self._first: Floats | None = None  # the first layer, with mean and scale in it
        self._moments = [(np.zeros_like(one), np.zeros_like(one)) for one in self.weights]
        self._learned = 0

    def one(self, features: Floats) -> Floats:
        """The outputs for one input [features]; the next call overwrites them."""
        if self._first is None:
            self._first = self.weights[0].copy()
            self._first[:-1] *= self.scale[:, None]
            self._first[-1] -= self.mean @ self._first[:-1]
        heads, inputs, below, last = self._heads, self._inputs, self._below, len(self.weights)
        heads[0][:] = features
        np.dot(inputs[0], self._first, out=heads[1])
        for layer in range(1, last):
            head = heads[layer]
            np.multiply(head, SLOPE, out=below[layer])
            np.maximum(head, below[layer], out=head)
            np.dot(inputs[layer], self.weights[layer], out=heads[layer + 1])
        return heads[-1]

    def layers(self, features: Floats) -> list[Floats]:
        """Of inputs [count, features] the input of every layer without its 1, and the outputs [count, outputs]."""
        found: list[Floats] = [(features - self.mean) * self.scale]
        for layer, matrix in enumerate(self.weights):
            out = found[-1] @ matrix[:-1] + matrix[-1]
            found.append(np.maximum(out, out * SLOPE) if layer + 1 < len(self.weights) else out)
        return found

    def standardize(self, features: Floats) -> None:
        """Take mean and deviation of every feature from inputs [count, features]; one that never varies counts 0."""
        deviation = features.std(axis=0)
        self.mean = features.mean(axis=0).astype(np.float32)
        self.scale = np.where(deviation > STEADY, 1 / np.maximum(deviation, STEADY), 0).astype(np.float32)
        self._first = None

    def learn(self, features: Floats, targets: Floats, counts: Floats, *, loss: Loss, rule: Rule, rate: float) -> float:
        """One step of gradient descent at that rate; the loss before it.

        `features` are [count, features], `targets` [count, outputs], `counts` the same with 1 for an output that
        counts and 0 for one that does not.
        """
        layers = self.layers(features)
        out, total = layers[-1], np.float32(max(float(counts.sum()), 1.0))
        if loss == "squares":
            error = (out - targets) * counts / total
            value = 0.5 * float(np.square(out - targets).ravel() @ counts.ravel() / total)
        else:
            error = (sigmoid(out) - targets) * counts / total
            value = float((np.logaddexp(np.float32(0), out) - targets * out).ravel() @ counts.ravel() / total)
        self._learned += 1
        for layer in reversed(range(len(self.weights))):
            matrix = self.weights[layer]
            gradient = np.concatenate([layers[layer].T @ error, error.sum(axis=0, keepdims=True)])
            if layer:
                error = (error @ matrix[:-1].T) * np.where(layers[layer] > 0, np.float32(1), SLOPE)
            matrix -= np.float32(rate) * self._direction(layer, gradient, rule)
        self._first = None
        return value

    def _direction(self, layer: int, gradient: Floats, rule: Rule) -> Floats:
        first, second = self._moments[layer]
        first *= np.float32(0.9)
        if rule == "sgd":
            first += gradient
            return first
        first += np.float32(0.1) * gradient
        second *= np.float32(0.999)
        second += np.float32(0.001) * gradient * gradient
        corrected = np.sqrt(second / np.float32(1 - 0.999**self._learned)) + np.float32(1e-8)
        moved: Floats = first / np.float32(1 - 0.9**self._learned) / corrected
        return moved

    def widen(self, features: int, outputs: int) -> None:
        """Take more features, which count 0 at first, and give more outputs, which are 0 at first."""
        widths = self.widths
        if features > widths[0]:
            first = self.weights[0]
            rows = np.zeros((features - widths[0], first.shape[1]), np.float32)
            self.weights[0] = np.concatenate([first[:-1], rows, first[-1:]])
            self.mean = np.concatenate([self.mean, np.zeros(features - widths[0], np.float32)])
            self.scale = np.concatenate([self.scale, np.ones(features - widths[0], np.float32)])
        if outputs > widths[-1]:
            last = self.weights[-1]
            columns = np.zeros((len(last), outputs - widths[-1]), np.float32)
            self.weights[-1] = np.concatenate([last, columns], axis=1)
        self._prepare()

    def arrays(self, name: str) -> dict[str, Floats]:
        """What it has learned, by names that begin with `name`."""
        layers = {f"{name}.layer{number}": matrix for number, matrix in enumerate(self.weights)}
        return {**layers, f"{name}.mean": self.mean, f"{name}.scale": self.scale}

    @classmethod
    def of_arrays(cls, name: str, arrays: Mapping[str, Floats]) -> Self:
        """What `arrays` gave. Raises ValueError for arrays that are none of a perceptron."""
        weights: list[Floats] = []
        while f"{name}.layer{len(weights)}" in arrays:
            weights.append(arrays[f"{name}.layer{len(weights)}"])
        ends = [arrays.get(f"{name}.{what}") for what in ("mean", "scale")]
        shapes = [matrix.shape for matrix in weights]
        layers = bool(shapes) and all(len(shape) == 2 and min(shape) > 0 for shape in shapes)
        chained = layers and all(before[1] + 1 == after[0] for before, after in pairwise(shapes))
        if not chained or any(one is None or one.shape != (shapes[0][0] - 1,) for one in ends):
            raise ValueError(f"the arrays {name!r} are not the layers of a perceptron: their shapes are {shapes}")
        made = cls([shapes[0][0] - 1, *(shape[1] for shape in shapes)])
        made.weights = [np.array(matrix, np.float32) for matrix in weights]
        made.mean, made.scale = np.array(arrays[f"{name}.mean"]), np.array(arrays[f"{name}.scale"])
        made._prepare()
        return made


def sigmoid(values: Floats) -> Floats:
    """1 / (1 + exp(-x)), for any x."""
    found: Floats = np.float32(0.5) * (np.tanh(values * np.float32(0.5)) + np.float32(1))
    return found
