"""Networks of images: MobileNetV2, EfficientNet, and a vision transformer.

A bias before a BatchNorm, which subtracts every mean, has a gradient that is mathematically zero; so have all weights
of a branch whose last scale is zero, but exactly, and only in the first step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evener.core.task.task import Task
from tests.tasks import draws
from tests.zoo.parts import integers, momentum, task

CLASSES, SAMPLES, SIDE = 5, 44, 12


def images() -> TensorDataset:
    return TensorDataset(draws(SAMPLES, 3, SIDE, SIDE), integers(0, CLASSES, (SAMPLES,)))


def conv_norm(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, act: type[nn.Module] = nn.ReLU6
) -> nn.Sequential:
    padding = (kernel - 1) // 2
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), act())


class InvertedResidual(nn.Module):
    """Wide inside, narrow outside. The last scale starts near zero, so that the block starts near the identity."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int, gamma: float) -> None:
        super().__init__()
        hidden = inputs * expand
        last = nn.BatchNorm2d(outputs)
        nn.init.constant_(last.weight, gamma)
        layers: list[nn.Module] = [conv_norm(inputs, hidden, 1)] if expand > 1 else []
        layers += [conv_norm(hidden, hidden, 3, stride, groups=hidden)]
        self.conv = nn.Sequential(*layers, nn.Conv2d(hidden, outputs, 1), last)
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return x + out if self.adds else out


class MobileNetV2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [(8, 8, 1, 1, 1e-9), (8, 12, 2, 3, 1.0), (12, 12, 1, 3, 0.0), (12, 16, 2, 3, 1.0)]
        self.features = nn.Sequential(
            conv_norm(3, 8, 3, 2), *(InvertedResidual(*block) for block in blocks), conv_norm(16, 32, 1)
        )
        self.classifier = nn.Linear(32, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(x).mean((2, 3)))
        return scores


def mobilenet(penalty: float = 0.0) -> Task:
    return task(MobileNetV2, images(), penalty, optimizer=momentum, name="mobilenet")


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.fc2(nn.functional.silu(self.fc1(x.mean((2, 3), keepdim=True))))
        return x * torch.sigmoid(scale)


class MbConv(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = inputs * expand
        self.block = nn.Sequential(
            conv_norm(inputs, hidden, 1, act=nn.SiLU),
            conv_norm(hidden, hidden, 3, stride, groups=hidden, act=nn.SiLU),
            SqueezeExcite(hidden, max(1, inputs // 4)),
            conv_norm(hidden, outputs, 1, act=nn.Identity),
        )
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        return x + out if self.adds else out


class EfficientNet(nn.Module):
    """Stochastic depth off. The stem keeps its bias, as in early ports."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8, eps=1e-3), nn.SiLU())
        self.blocks = nn.Sequential(MbConv(8, 8, 1, 2), MbConv(8, 12, 2, 3), MbConv(12, 12, 1, 3))
        self.head = conv_norm(12, 32, 1, act=nn.SiLU)
        self.classifier = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.head(self.blocks(self.stem(x))).mean((2, 3)))
        return scores


def efficientnet(penalty: float = 0.0) -> Task:
    return task(
        EfficientNet, images(), penalty, loss=nn.CrossEntropyLoss(label_smoothing=0.1), name="efficientnet"
    )


class VitBlock(nn.Module):
    """One projection for queries, keys and values, so that a third of its bias has no gradient."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.proj = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        x = x + self.proj(mixed)
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (SIDE // 4) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(VitBlock(width, 2), VitBlock(width, 2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), patches], 1) + self.positions
        scores: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return scores


def vit(penalty: float = 0.0) -> Task:
    return task(VisionTransformer, images(), penalty, name="vit")
