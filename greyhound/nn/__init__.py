"""Losses: functions in `greyhound.nn.functional`, modules here."""

from greyhound.nn.modules import CrossEntropyLoss, LinearCrossEntropyLoss

__all__ = ["CrossEntropyLoss", "LinearCrossEntropyLoss"]
