"""Measures this project on one GPU in less than nine minutes, on synthetic batches: no corpus, no network.

    python -m tests.gpu.harvest --output harvest.json

Each stage runs in a process of its own and has a time limit. Each result is appended to `harvest.jsonl` as soon as it
is known; `harvest.json` is rewritten after each stage, and `harvest.log` has what the stages print.
"""
