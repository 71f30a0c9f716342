"""Small tensors: one thread is fastest, and leaves the machine to others."""

import pytest
import torch

pytest.register_assert_rewrite("tests.helpers.layouts", "tests.helpers.models")
torch.set_num_threads(1)
