"""Is a solution right? Compares it with its problem's reference, on inputs that can tell wrong answers from right ones."""

import importlib.util
import itertools
import sys
from pathlib import Path

_module_numbers = itertools.count()


def load_module(path):
    """The Python file at ``path`` as a module under a name of its own, so that two files called alike never meet.

    The file stands alone: its folder is not put on ``sys.path``. Whatever the file raises comes through.
    """
    path = Path(path).resolve()
    spec = importlib.util.spec_from_file_location(f"{path.stem}_loaded_{next(_module_numbers)}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pickle, inspect and torch.compile look a class's module up there
    spec.loader.exec_module(module)
    return module
