"""The arena: how soon each optimizer reaches the loss that a well set up AdamW reaches."""

from .command import Arena as Arena
from .report import report_arena as report_arena
