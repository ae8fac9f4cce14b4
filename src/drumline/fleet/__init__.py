"""Replicas and the one loop over steps, with everything that touches the world handed in."""

from drumline.fleet.replica import Arrivals, Emitter, Executor, Intake, Replica, StepStats

__all__ = ["Arrivals", "Emitter", "Executor", "Intake", "Replica", "StepStats"]
