import platform

import numpy as np
import torch

import hooktrain
from hooktrain.utils.collect_env import collect_env_info


def test_versions_come_before_the_build_of_torch() -> None:
    info = collect_env_info()
    lines = info.splitlines()
    assert f"Python: {platform.python_version()}" in lines
    assert f"hooktrain: {hooktrain.__version__}" in lines
    assert f"numpy: {np.__version__}" in lines
    assert f"torch: {torch.__version__}" in lines
    assert info.endswith(torch.__config__.show())
