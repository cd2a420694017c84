"""Honest: says that it does not do other sizes than it was written for."""

from reference import Model


class ModelNew(Model):
    def __init__(self, *sizes):
        if any(size % 2 for size in sizes):
            raise ValueError(f"sizes must be even, got {sizes}")
        super().__init__(*sizes)
