# SPDX-License-Identifier: Apache-2.0
# Finds libtorch where find_package(Torch) would: the zip, the pip wheel or an installed build,
# named by CMAKE_PREFIX_PATH, Torch_ROOT or Torch_DIR. It is not find_package(Torch), because that
# demands a CUDA toolkit of every program that links a libtorch with CUDA, and smp needs only
# libtorch_cpu and libc10.

# smp_find_libtorch([VERSION]): makes the target smp::libtorch and sets SMP_LIBTORCH_DIR,
# SMP_LIBTORCH_VERSION and SMP_LIBTORCH_CXX_STANDARD, which its headers need. With a version, a libtorch
# of another minor version is an error.
macro(smp_find_libtorch)
  find_path(SMP_TORCH_CMAKE_DIR TorchConfig.cmake
    HINTS ${Torch_DIR} ENV Torch_DIR ${Torch_ROOT} ENV Torch_ROOT
    PATH_SUFFIXES share/cmake/Torch Torch  # the latter below torch.utils.cmake_prefix_path
    DOC "The folder of libtorch's TorchConfig.cmake")
  if(NOT SMP_TORCH_CMAKE_DIR)
    message(FATAL_ERROR "smp: libtorch was not found. Name it as for find_package(Torch), for example\n"
      "  -DCMAKE_PREFIX_PATH=/path/to/libtorch\n"
      "  -DCMAKE_PREFIX_PATH=$(python3 -c 'import torch; print(torch.utils.cmake_prefix_path)')")
  endif()
  get_filename_component(SMP_LIBTORCH_DIR ${SMP_TORCH_CMAKE_DIR}/../../.. REALPATH)
  include(${SMP_TORCH_CMAKE_DIR}/TorchConfigVersion.cmake)
  string(REGEX MATCH "^[0-9.]+" SMP_LIBTORCH_VERSION "${PACKAGE_VERSION}")
  set(SMP_LIBTORCH_CXX_STANDARD 17)
  if(SMP_LIBTORCH_VERSION VERSION_GREATER_EQUAL 2.14)
    set(SMP_LIBTORCH_CXX_STANDARD 20)
  endif()
  smp_check_libtorch(${ARGN})
  smp_add_libtorch()
endmacro()

# Fails if libtorch is not of the minor version given.
function(smp_check_libtorch)
  if(ARGC EQUAL 0)
    return()
  endif()
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" needed ${ARGV0})
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" found ${SMP_LIBTORCH_VERSION})
  if(NOT needed STREQUAL found)
    message(FATAL_ERROR "smp: this smp was built with libtorch ${ARGV0}, and ${SMP_LIBTORCH_DIR} is "
      "libtorch ${SMP_LIBTORCH_VERSION}. Use libtorch ${needed}, or build smp with yours.")
  endif()
endfunction()

# smp_check_cuda(WHO): fails if libtorch is one for the CPU. WHO needs another.
function(smp_check_cuda who)
  if(NOT EXISTS ${SMP_LIBTORCH_DIR}/lib/libtorch_cuda.so)
    message(FATAL_ERROR "smp: ${who} needs a libtorch for CUDA, and ${SMP_LIBTORCH_DIR} is one for the "
      "CPU. Use that of PyPI (pip install torch) or the zip for CUDA, or build smp without SMP_CUDA.")
  endif()
endfunction()

function(smp_add_libtorch)
  if(TARGET smp::libtorch)
    return()
  endif()
  file(STRINGS ${SMP_LIBTORCH_DIR}/share/cmake/Torch/TorchConfig.cmake old_abi
    REGEX "_GLIBCXX_USE_CXX11_ABI=0")
  if(old_abi)
    message(FATAL_ERROR "smp: ${SMP_LIBTORCH_DIR} was built with the C++ ABI of before 2015 "
      "(_GLIBCXX_USE_CXX11_ABI=0). Use the build with the C++11 ABI.")
  endif()
  add_library(smp::libtorch INTERFACE IMPORTED GLOBAL)
  target_include_directories(smp::libtorch SYSTEM INTERFACE
    ${SMP_LIBTORCH_DIR}/include ${SMP_LIBTORCH_DIR}/include/torch/csrc/api/include)
  set(lib ${SMP_LIBTORCH_DIR}/lib)
  target_compile_features(smp::libtorch INTERFACE cxx_std_${SMP_LIBTORCH_CXX_STANDARD})
  find_package(Threads REQUIRED)
  target_link_libraries(smp::libtorch INTERFACE
    ${lib}/libtorch_cpu.so ${lib}/libc10.so Threads::Threads)
endfunction()
