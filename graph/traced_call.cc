// SPDX-License-Identifier: Apache-2.0
#include "graph/traced_call.h"

#include "graph/operator_traits.h"

namespace smp::graph {

c10::SmallVector<ValueId, 1> TracedCall::written() const {
  const auto constant = [&](size_t i) -> const c10::IValue& { return arguments[i].constant; };
  c10::SmallVector<ValueId, 1> written;
  for (size_t i : written_arguments(op->schema(), constant)) {
    for (ValueId id : arguments[i].values) {
      if (id != kUndefined) written.push_back(id);
    }
  }
  return written;
}

void TracedCall::clear() {
  arguments.clear();
  tensors.clear();
  ids.clear();
  absolute_offset = false;
}

}  // namespace smp::graph
