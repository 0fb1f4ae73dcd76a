import os
import sys
from pathlib import Path

import pytest
import torch

# The Triton kernels run here through Triton's interpreter; a real GPU compiles them (tests/gpu).
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
