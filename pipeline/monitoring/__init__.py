"""What a run shows of itself. These are the names that it shows it under in the run folder."""

EVENTS = "tensorboard"
METRICS = "metrics.jsonl"
STARTS = "starts.jsonl"
SUMMARY = "summary.json"
