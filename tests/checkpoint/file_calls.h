// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>

/// Stands between this process and the kernel: the file calls of the C library that change
/// something (open for writing, write, fsync, rename, mkdir, unlink ...) are counted if they
/// concern a folder, and one of them can go wrong. Link it into the program itself.
namespace smp::testing {

/// The fault at the call.
enum class Fault {
  kNone,
  kKill,     ///< the process dies as by kill -9, a write when half of it is done
  kStop,     ///< the process stops as by SIGSTOP, and goes on with the call when it is continued
  kNoSpace,  ///< from then on calls that take space fail with ENOSPC
  kFlipBit,  ///< from then on the disk stores another bit: in the next write
};

/// Counts calls on files in `folder` from now on; the `call`-th, from 0, is the faulty one.
void inject(const std::string& folder, Fault fault, int64_t call);

/// From now on the files in `folder` have no more than `bytes` together: a write stores as much as
/// there is room for, and fails with ENOSPC where that is nothing. Until `inject` is called.
void limit_space(const std::string& folder, uint64_t bytes);

/// Before each file in `folder` is opened to be read, calls `what`, which may open others. Until
/// `inject` is called.
void before_reads(const std::string& folder, std::function<void()> what);

/// Counted since `inject`.
int64_t calls_so_far();

}  // namespace smp::testing
