"""Who runs with how many tokens: continuous batching under limits, in a total order.

Decides and never computes; knows neither tensors nor text nor time.
"""

from drumline.scheduler.draft_cost import CostCurve
from drumline.scheduler.draft_length import (
    AdaptiveDraftLength,
    DraftLength,
    StaticDraftLength,
    TableDraftLength,
    dynamic_sd_lookup,
    make_draft_length,
)
from drumline.scheduler.finish import TokenFinish
from drumline.scheduler.scheduler import Scheduler
from drumline.scheduler.settings import (
    Limits,
    Policy,
    SchedulerSettings,
    check_fits,
    scheduler_settings,
)

__all__ = [
    "AdaptiveDraftLength",
    "CostCurve",
    "DraftLength",
    "Limits",
    "Policy",
    "Scheduler",
    "SchedulerSettings",
    "StaticDraftLength",
    "TableDraftLength",
    "TokenFinish",
    "check_fits",
    "dynamic_sd_lookup",
    "make_draft_length",
    "scheduler_settings",
]
