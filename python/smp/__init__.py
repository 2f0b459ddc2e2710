# SPDX-License-Identifier: Apache-2.0
"""smp, pipeline, tensor and data parallel training for libtorch, as a C++ library in a wheel.

A CMake project finds it, and torch beside it, by

    cmake -DCMAKE_PREFIX_PATH=$(python -c "import smp; print(smp.cmake_prefix_path)") ...
"""

import importlib.metadata
import pathlib

__version__ = importlib.metadata.version("smp")

#: For CMAKE_PREFIX_PATH.
cmake_prefix_path = str(pathlib.Path(__file__).parent)
