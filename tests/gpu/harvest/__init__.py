"""Measures this project on one GPU in less than nine minutes, with synthetic batches and without network access.

    python -m tests.gpu.harvest --output harvest.jsonl

Each stage runs in its own process with a time limit. Each result is a line of JSON that is written as soon as it is
known. `harvest.log` contains the stages' output.
"""
