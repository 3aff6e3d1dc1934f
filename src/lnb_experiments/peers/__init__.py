"""Optimizers of gradients alone, each set up as its authors or its users advise."""

from .adamw import adamw as adamw
from .adamw import nadamw as nadamw
from .muon import muon as muon
from .prodigy import prodigy as prodigy
from .psgd import psgd as psgd
from .schedule_free import schedule_free as schedule_free
from .shampoo import shampoo as shampoo
from .soap import soap as soap
