// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <vector>

#include "smp/export.h"
#include "smp/group.h"
#include "smp/reduce_op.h"
#include "smp/work.h"

/// The interface of Python's `smdistributed.dataparallel.torch.distributed`, for C++ programs that
/// want ranks and collectives and nothing else: no model is wrapped, and `smp::init` is not needed
/// (both may be used in one program). The world is that of the launcher: `smprun`, `mpirun`,
/// torchrun, or one process alone. Tensors are contiguous and on the CPU.
///
/// SUM, AVERAGE, MIN, MAX of the Python package are `ReduceOp::kSum` ... here; there are more.
/// Collectives are called by all ranks in the same order. With `async_op` they return at once, and
/// the tensors must not be touched before `wait()` of the result; otherwise they return when they
/// are complete. Wrong arguments and calls before `init_process_group` throw `UsageError`; a rank
/// that fails or does not come, `CommError` or `TimeoutError`.
namespace smp::smddp {

/// True when a launcher has started this process as one of a job.
SMP_API bool is_available();

/// Joins the other ranks; the first call, collective. Throws `UsageError` at a second call.
/// `timeout` is how long a rank waits for another before a call throws `TimeoutError`.
SMP_API void init_process_group(std::chrono::milliseconds timeout = std::chrono::seconds(300));
SMP_API bool is_initialized();

/// The ranks, for functions that take a group:
/// `smp::DDPOptions().process_group(smp::smddp::group())`.
SMP_API Group group();

SMP_API int get_rank();
SMP_API int get_world_size();
/// This rank's place among those of its host, and how many those are.
SMP_API int get_local_rank();
SMP_API int get_local_size();

/// Replaces `tensor` on every rank by the reduction over the ranks, in rank order.
SMP_API WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum,
                           bool async_op = false);

/// Replaces `tensor` on rank `dst` by the reduction over the ranks.
SMP_API WorkPtr reduce(const at::Tensor& tensor, int dst, ReduceOp op = ReduceOp::kSum,
                       bool async_op = false);

/// Replaces `tensor` on every rank by that of rank `src`.
SMP_API WorkPtr broadcast(const at::Tensor& tensor, int src = 0, bool async_op = false);

/// Fills `tensors[r]`, one of each rank's shape, with rank r's `tensor`. Shapes are equal.
SMP_API WorkPtr all_gather(const std::vector<at::Tensor>& tensors, const at::Tensor& tensor,
                           bool async_op = false);

/// Sends rows of `input` (along axis 0) to the ranks, input_split_sizes[r] of them to rank r, and
/// puts the rows that come from rank r into `output`, output_split_sizes[r] of them, in rank order.
/// Empty lists mean equal numbers.
SMP_API WorkPtr all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                                  const std::vector<int64_t>& output_split_sizes = {},
                                  const std::vector<int64_t>& input_split_sizes = {},
                                  bool async_op = false);

/// Returns when all ranks have called it.
SMP_API void barrier();

}  // namespace smp::smddp
