"""The tasks that come with Evener, by name. Each is built like any task of a user's own."""

from __future__ import annotations

BUILT_IN = {
    "digits": "evener.tasks.digits:task",
    "mnist": "evener.tasks.mnist:task",
    "shakespeare": "evener.tasks.shakespeare:task",
}
