"""What runs and benchmarks measure alike: time, memory, arithmetic, and the most that the machine can do."""
