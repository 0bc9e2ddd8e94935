"""Losses: functions in `greyhound.nn.functional`, modules here."""

from greyhound.nn.modules import CrossEntropyLoss

__all__ = ["CrossEntropyLoss"]
