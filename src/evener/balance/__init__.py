"""Unequal devices pull one load: learn each rank's speed, divide each batch by it, change in time."""

from evener.balance.base import Balancer, Decision, Equal, Fixed
from evener.balance.by_speed import BySpeed
from evener.balance.emulate import Throttle
from evener.balance.judgement import Policy
from evener.balance.partition import partition_layers
from evener.balance.registry import BALANCERS, make_balancer
from evener.balance.shares import parse_shares, solve, validate_shares
from evener.balance.speed import SpeedModel

__all__ = [
    "BALANCERS",
    "Balancer",
    "BySpeed",
    "Decision",
    "Equal",
    "Fixed",
    "Policy",
    "SpeedModel",
    "Throttle",
    "make_balancer",
    "parse_shares",
    "partition_layers",
    "solve",
    "validate_shares",
]
