// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

// Structures of CUDA 13.0 that libtorch reads or fills, in CUDA's layout; unused parts are left out
// by their size.

namespace pretended {

/// cudaDeviceProp.
struct DeviceProperties {
  char name[256];
  char uuid[16];
  char luid[8];
  unsigned luid_nodes;
  size_t memory;
  size_t shared_per_block;
  int registers_per_block;
  int warp;
  size_t pitch;
  int threads_per_block;
  int block_sides[3];
  int grid_sides[3];
  size_t constant_memory;
  int major;
  int minor;
  size_t texture_alignment;
  size_t texture_pitch_alignment;
  int processors;
  int textures_and_surfaces[41];
  size_t surface_alignment;
  int of_the_bus[9];
  int l2_cache;
  int persisting_l2_cache;
  int threads_per_processor;
  int of_the_caches[3];
  size_t shared_per_processor;
  int registers_per_processor;
  int of_managed_memory[9];
  size_t shared_per_block_by_choice;
  int of_page_tables[2];
  int blocks_per_processor;
  int access_policy_window;
  size_t shared_reserved;
  int more[76];
};
static_assert(sizeof(DeviceProperties) == 1008, "expected the size of CUDA 13.0");

/// cudaFuncAttributes.
struct FunctionAttributes {
  size_t shared, constant, local;
  int threads_per_block, registers, ptx_version, binary_version;
  int more[26];
};
static_assert(sizeof(FunctionAttributes) == 144, "expected the size of CUDA 13.0");

/// cudaPointerAttributes; `type` is 0 for memory that CUDA does not know, 1 for pinned memory, 2
/// for the device's.
struct PointerAttributes {
  int type;
  int device;
  void* on_device;
  void* on_host;
  long reserved[8];
};
static_assert(sizeof(PointerAttributes) == 88, "expected the size of CUDA 13.0");

/// dim3.
struct Sides {
  unsigned x, y, z;
};

/// cudaLaunchConfig_t.
struct LaunchConfig {
  Sides grid, block;
  size_t shared;
  void* stream;
  void* attributes;
  unsigned count;
};

}  // namespace pretended
