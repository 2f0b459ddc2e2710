// SPDX-License-Identifier: Apache-2.0
#include "nn/rewrite/emitter.h"

#include <utility>

namespace smp::nn::rewrite {

using graph::Argument;

Argument Emitter::tensor(graph::ValueId value) {
  Argument argument;
  argument.kind = Argument::Kind::kTensor;
  argument.values = {value};
  return argument;
}

Argument Emitter::constant(c10::IValue value) {
  Argument argument;
  argument.constant = std::move(value);
  return argument;
}

}  // namespace smp::nn::rewrite
