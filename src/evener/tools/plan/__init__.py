"""Plans: what a run will take in time and memory, in which way, and how many devices are worth it.

=================  =============================================================================
``candidates``     the ways to train that are compared
``trials``         takes a few real steps in each way, on ranks of this machine
``costs``          what a step costs, as functions of its samples; pure functions predict from it
``measured``       the costs that trials show
``plan``           puts it together
``result``         the plan: ways, curve over devices, cost
``text``           the plan in words
=================  =============================================================================
"""

from evener.tools.plan.costs import StepCosts, StepTime, step_time
from evener.tools.plan.plan import calibrate, make_plan
from evener.tools.plan.result import TrainingPlan, Way
from evener.tools.plan.text import plan_text

__all__ = [
    "StepCosts",
    "StepTime",
    "TrainingPlan",
    "Way",
    "calibrate",
    "make_plan",
    "plan_text",
    "step_time",
]
