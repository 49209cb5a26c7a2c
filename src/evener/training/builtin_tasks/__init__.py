"""The tasks that come with Evener, by name. Each is built like a user's own task."""

from __future__ import annotations

BUILT_IN = {
    "digits": "evener.training.builtin_tasks.digits:task",
    "mnist": "evener.training.builtin_tasks.mnist:task",
    "shakespeare": "evener.training.builtin_tasks.shakespeare:task",
}
