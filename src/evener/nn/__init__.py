"""Layers that give the same result however the batch is divided over ranks, and differentiable collectives."""

from __future__ import annotations

from evener.nn.attention import attention
from evener.nn.batch_norm import BatchNorm, exact_batch_norm
from evener.nn.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    enter,
    reduce_scatter,
    shift,
    split,
)
from evener.nn.context import data_group, without_placeholder
from evener.nn.dropout import Dropout, Dropout1d, Dropout2d, exact_dropout, name_dropouts
from evener.nn.experts import Experts, Mixed
from evener.nn.feature_parallel import FeatureParallelLinear, divide_features
from evener.nn.positions import positions
from evener.nn.vocabulary_loss import VocabularyParallelCrossEntropy, vocabulary_parallel_cross_entropy

__all__ = [
    "BatchNorm",
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Experts",
    "FeatureParallelLinear",
    "Mixed",
    "VocabularyParallelCrossEntropy",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "attention",
    "broadcast",
    "data_group",
    "divide_features",
    "enter",
    "exact_batch_norm",
    "exact_dropout",
    "name_dropouts",
    "positions",
    "reduce_scatter",
    "shift",
    "split",
    "vocabulary_parallel_cross_entropy",
    "without_placeholder",
]
