// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>

#include <list>

namespace smp::graph {

/// While it lives, libtorch's default floating point type is `dtype`.
///
/// That type is one for all threads, and ranks may be threads: the scope that began last counts,
/// and the last one to end restores the type from before the first.
class DefaultDtypeScope {
 public:
  explicit DefaultDtypeScope(at::ScalarType dtype);
  ~DefaultDtypeScope();
  DefaultDtypeScope(const DefaultDtypeScope&) = delete;
  DefaultDtypeScope& operator=(const DefaultDtypeScope&) = delete;

 private:
  std::list<at::ScalarType>::iterator place_;
};

}  // namespace smp::graph
