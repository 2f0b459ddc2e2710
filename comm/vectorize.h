// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Before a loop: no iteration reads memory that another writes, so the compiler may vectorize it
/// without a check at run time.
#if defined(__clang__)
#define SMP_VECTORIZE _Pragma("clang loop vectorize(assume_safety)")
#else
#define SMP_VECTORIZE _Pragma("GCC ivdep")
#endif
