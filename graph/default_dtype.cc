// SPDX-License-Identifier: Apache-2.0
#include "graph/default_dtype.h"

#include <c10/core/DefaultDtype.h>
#include <c10/core/ScalarTypeToTypeMeta.h>

#include <mutex>

namespace smp::graph {
namespace {

/// The types of the scopes that live, in the order in which they began.
struct Active {
  std::mutex mutex;
  std::list<at::ScalarType> dtypes;
  at::ScalarType before = at::kFloat;

  void apply() const {
    c10::set_default_dtype(c10::scalarTypeToTypeMeta(dtypes.empty() ? before : dtypes.back()));
  }
};

Active& active() {
  static Active active;
  return active;
}

}  // namespace

DefaultDtypeScope::DefaultDtypeScope(at::ScalarType dtype) {
  const std::lock_guard<std::mutex> lock(active().mutex);
  if (active().dtypes.empty()) active().before = c10::get_default_dtype_as_scalartype();
  place_ = active().dtypes.insert(active().dtypes.end(), dtype);
  active().apply();
}

DefaultDtypeScope::~DefaultDtypeScope() {
  const std::lock_guard<std::mutex> lock(active().mutex);
  active().dtypes.erase(place_);
  active().apply();
}

}  // namespace smp::graph
