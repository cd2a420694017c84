"""What the tests share: the project's folder on the import path, and skips, with the reason, for what is missing here."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def pytest_collection_modifyitems(items):
    """Skip ``gpu`` and ``multigpu`` tests where there are not that many GPUs."""
    gpus = torch.cuda.device_count()
    for item in items:
        needed = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
        if gpus < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} NVIDIA GPU(s), this machine has {gpus}"))
