# SPDX-License-Identifier: Apache-2.0
# The parts that a build for CUDA takes beside libtorch: headers of CUDA and NCCL, and CUDA's
# runtime library, from the wheels that pip has installed with torch, else from the toolkit. Nothing
# is compiled for a GPU, so nvcc is not needed.

# smp_find_cuda(SOURCE...): has these sources find the headers, and makes the target smp_cuda, which links
# the libraries.
function(smp_find_cuda)
  smp_check_cuda("SMP_CUDA=ON")
  file(GLOB roots ${SMP_LIBTORCH_DIR}/../nvidia/*)
  list(APPEND roots $ENV{CUDA_HOME} /usr/local/cuda)
  find_path(SMP_CUDA_INCLUDE_DIR cuda_runtime_api.h HINTS ${roots} PATH_SUFFIXES include)
  find_path(SMP_NCCL_INCLUDE_DIR nccl.h HINTS ${roots} PATH_SUFFIXES include)
  find_library(SMP_CUDART NAMES cudart libcudart.so.13 libcudart.so.12 NAMES_PER_DIR
    HINTS ${roots} PATH_SUFFIXES lib64 lib)
  foreach(found SMP_CUDA_INCLUDE_DIR:cuda_runtime_api.h SMP_NCCL_INCLUDE_DIR:nccl.h SMP_CUDART:libcudart.so)
    string(REPLACE ":" ";" found ${found})
    list(GET found 0 variable)
    list(GET found 1 name)
    if(NOT ${variable})
      list(JOIN roots ", " looked)
      message(FATAL_ERROR "smp: SMP_CUDA=ON: cannot find ${name}. Looked in ${looked}. Install torch by "
        "pip, which brings it, or name its folder: -D${variable}=...")
    endif()
  endforeach()
  message(STATUS "smp: CUDA in ${SMP_CUDA_INCLUDE_DIR}, NCCL in ${SMP_NCCL_INCLUDE_DIR}")

  # CUDA 12 has a wheel for each library, and libtorch's headers include those of several.
  file(GLOB includes ${SMP_LIBTORCH_DIR}/../nvidia/*/include)
  list(APPEND includes ${SMP_CUDA_INCLUDE_DIR} ${SMP_NCCL_INCLUDE_DIR})
  list(REMOVE_DUPLICATES includes)
  list(TRANSFORM includes PREPEND "-isystem")
  set_source_files_properties(${ARGN} PROPERTIES
    COMPILE_OPTIONS "${includes}"
    COMPILE_DEFINITIONS USE_C10D_NCCL
    SKIP_PRECOMPILE_HEADERS ON)

  add_library(smp_cuda INTERFACE)
  target_link_libraries(smp_cuda INTERFACE
    ${SMP_LIBTORCH_DIR}/lib/libtorch_cuda.so ${SMP_LIBTORCH_DIR}/lib/libc10_cuda.so ${SMP_CUDART}
    ${CMAKE_DL_LIBS})
endfunction()
