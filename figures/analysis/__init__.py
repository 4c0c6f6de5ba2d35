"""Facts that several tables, figures and the report's conclusions share: one computation each, kept per
study.

All comparisons are against the `bf16` route and paired: by seed for endpoint losses, by sequence for
validation, by
item for downstream scores. Families for Holm's correction: the routes of one endpoint; the routes of one
checkpoint;
the routes x tasks of the downstream scores (primary metrics).
"""

from figures.analysis.losses import dgrad, endpoint, last_shared_step, published_excess, validation
from figures.analysis.scores import TASKS, downstream
from figures.analysis.speed import frontier, published_speed_quality, speed_quality, throughput

__all__ = [
    "TASKS",
    "dgrad",
    "downstream",
    "endpoint",
    "frontier",
    "last_shared_step",
    "published_excess",
    "published_speed_quality",
    "speed_quality",
    "throughput",
    "validation",
]
