# SPDX-License-Identifier: Apache-2.0
"""smp: pipeline, tensor and data parallel training for libtorch, as a C++ library in a wheel.

A CMake project finds it, and torch beside it, by

    cmake -DCMAKE_PREFIX_PATH=$(python -c "import smp_libtorch; print(smp_libtorch.cmake_prefix_path)") ...
"""

import importlib.metadata
import pathlib

__version__ = importlib.metadata.version("smp-libtorch")

#: For CMAKE_PREFIX_PATH.
cmake_prefix_path = str(pathlib.Path(__file__).parent)
