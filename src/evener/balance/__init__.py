"""Load balancing: learns each rank's speed, divides each batch by it, and adapts the shares during training."""

from evener.balance.base import Balancer, Decision, Equal, Fixed
from evener.balance.by_speed import BySpeed
from evener.balance.layer_partition import partition_layers
from evener.balance.policy import Policy
from evener.balance.registry import BALANCERS, make_balancer
from evener.balance.shares import parse_shares, solve, validate_shares
from evener.balance.speed import SpeedModel
from evener.balance.throttle import Throttle

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
