"""Checks that the settings of a run go with rounds of local steps, or with sections of asynchronous training."""

from __future__ import annotations

from torch.utils.data import IterableDataset

from evener.balance.registry import BALANCERS
from evener.core.config.run_config import RunConfig
from evener.core.plugins import is_named
from evener.data.rounds import Rounds
from evener.data.sections import Sections
from evener.errors import ConfigurationError
from evener.strategies.learner import Learner


def check_rounds(config: RunConfig, learner: Learner, rounds: Rounds | Sections) -> RunConfig:
    """Returns the settings of a run in rounds of local steps, or in sections of asynchronous training.

    Raises:
        ConfigurationError: If a setting does not go with rounds.
    """
    asked = {
        "an iterable data set, which has no global order": isinstance(learner.task.train, IterableDataset),
        "non_finite=skip, for a step that is left out is one of a single replica": config.non_finite
        == "skip",
        "skipping samples that cannot be read": config.on_bad_sample == "skip",
        "Task.cost, for replicas take numbers of samples": learner.task.cost is not None,
    }
    if isinstance(rounds, Rounds):
        usual = max(1, rounds.batch_size // rounds.replicas)
        whatever = (
            f"max_shares={config.max_shares}, for a local batch has about {usual} samples whatever the shares"
        )
        asked[f"{whatever} of a round"] = config.max_shares is not None and rounds.batches > 1
    if isinstance(rounds, Sections) or rounds.parts != learner.session.world_size:
        balance = config.balance or "equal"
        config = config.replace(balance=balance)
        by_speed = balance == "auto" or is_named(balance, "balancer", BALANCERS)
        if isinstance(rounds, Sections):
            why = "for each rank gets samples as it becomes free"
            asked[f"balance={balance}, {why}"] = balance != "equal"
            cure = "micro_batch limits those of a pass"
            asked[f"max_shares={config.max_shares}, {why} ({cure})"] = config.max_shares is not None
            multiple = config.share_multiple_of
            asked[f"share_multiple_of={multiple}, {why}"] = multiple != 1
        else:
            asked[f"shares by speed, for {rounds.replicas} replicas are not one for each rank"] = by_speed
    for what in (what for what, is_asked in asked.items() if is_asked):
        raise ConfigurationError(
            f"strategy {learner.name!r} does not go with {what}: leave it out, or use ddp"
        )
    return config
