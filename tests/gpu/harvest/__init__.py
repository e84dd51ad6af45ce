"""Measures this project on one GPU in less than nine minutes, with synthetic batches and without network access.

    python -m tests.gpu.harvest --output harvest.json

Each stage runs in its own process with a time limit. Each result is appended to `harvest.jsonl` immediately.
`harvest.json` is rewritten after each stage, and `harvest.log` contains the stages' output.
"""
