"""Plans: what a run will take in time and memory, in which way, and how many devices are worth it.

===============  ================================================================================
``candidates``   the ways to train that are compared
``rounds``       which trials are made, and how long each may take
``trials``       takes a few real steps in each way, on ranks of this machine
``sum_trials``   times the all-reduces that ``ddp`` may take
``measured``     the costs that trials show
``calibration``  these costs as a file
``work``         what a step takes in one way, whatever the devices: operations, messages, bytes
``cluster``      machines that are not at hand
``analytic``     the costs of a step on them, ``message_times`` those of its messages and all-reduces
``costs``        the time of a step that follows from costs, for any batch and any shares
``plan``         makes a plan for this machine, ``for_cluster`` for others
``choice``       takes the fastest way of a saved calibration for a run
``cache``        plans that were kept, which runs find by themselves
``structure``    a fingerprint of what a task builds
``fitting``      a strategy for a model that does not fit with the default one
``comparison``   a run beside its prediction
``learning``     lets a calibration learn from runs
``result``       the plan: ways, the curve over devices
``text``         the plan in words
===============  ================================================================================
"""

from evener.tools.plan.cache import cached_way, keep
from evener.tools.plan.calibration import Calibration
from evener.tools.plan.choice import chosen_way
from evener.tools.plan.cluster import Cluster
from evener.tools.plan.cluster_file import read_cluster
from evener.tools.plan.comparison import ComparedStep, compared_step
from evener.tools.plan.costs import StepCosts, StepTime, step_time
from evener.tools.plan.fitting import fitting_strategy
from evener.tools.plan.for_cluster import plan_for_cluster
from evener.tools.plan.learning import load_now, with_run
from evener.tools.plan.plan import calibrate, make_plan
from evener.tools.plan.result import TrainingPlan, Way
from evener.tools.plan.text import plan_text

__all__ = [
    "Calibration",
    "Cluster",
    "ComparedStep",
    "StepCosts",
    "StepTime",
    "TrainingPlan",
    "Way",
    "cached_way",
    "calibrate",
    "chosen_way",
    "compared_step",
    "fitting_strategy",
    "keep",
    "load_now",
    "make_plan",
    "plan_for_cluster",
    "plan_text",
    "read_cluster",
    "step_time",
    "with_run",
]
