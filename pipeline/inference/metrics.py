"""`METRICS` and `score` where extensions of version 1.0 and 1.1 find them, until 2.0."""

from pipeline.metrics.metrics import METRICS, score

__all__ = ["METRICS", "score"]
