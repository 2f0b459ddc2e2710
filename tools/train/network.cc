// SPDX-License-Identifier: Apache-2.0
#include "tools/train/network.h"

#include "tools/train/loss.h"

namespace smp::tools::train {

std::vector<InputName> read_inputs(const std::vector<std::string>& inputs) {
  std::vector<InputName> names;
  for (const std::string& input : inputs) {
    const size_t sign = input.find('=');
    if (sign == std::string::npos) {
      names.push_back({"", input});
    } else {
      names.push_back({input.substr(0, sign), input.substr(sign + 1)});
    }
  }
  return names;
}

NetworkImpl::NetworkImpl(const Options& options)
    : ExportedModuleImpl(ExportedPrograms().train(options.model).eval(options.eval_model)),
      inputs_(read_inputs(options.inputs)),
      output_(options.output) {}

at::Tensor NetworkImpl::forward(const std::vector<at::Tensor>& inputs) {
  std::vector<c10::IValue> by_position;
  Named by_name;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs_[i].argument.empty()) {
      by_position.emplace_back(inputs[i]);
    } else {
      by_name[inputs_[i].argument] = inputs[i];
    }
  }
  return pick_output(call(by_position, by_name), output_);
}

}  // namespace smp::tools::train
