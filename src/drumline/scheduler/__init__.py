"""Who runs with how many tokens: continuous batching under limits, in a total order.

Decides and never computes; knows neither tensors nor text nor time.
"""

from drumline.scheduler.finish import TokenFinish
from drumline.scheduler.scheduler import Scheduler
from drumline.scheduler.settings import Limits, Policy, SchedulerSettings, check_fits

__all__ = ["Limits", "Policy", "Scheduler", "SchedulerSettings", "TokenFinish", "check_fits"]
