// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "exported/action.h"
#include "exported/archive.h"
#include "exported/program.h"

namespace smp::exported {

/// A parameter or buffer as a program has it.
struct ModelTensor {
  std::string name;  ///< dotted path
  bool is_parameter;
  at::Tensor tensor;
  std::string record;  ///< holds its storage in the archive
  bool requires_grad;
};

/// A program with its tensors, ready to be called.
class LoadedProgram {
 public:
  /// Reads an archive. Throws `CheckpointError` for an archive that cannot be loaded.
  explicit LoadedProgram(const std::string& path);

  const ExportedProgram& program() const { return program_; }
  /// Its parameters and buffers, in the program's order. Tied ones are the same tensor.
  const std::vector<ModelTensor>& tensors() const { return tensors_; }
  /// Its parameters and buffers become those of `other`. Throws `CheckpointError` where that lacks
  /// one, or has it in another shape or type.
  void share_tensors(const LoadedProgram& other);

  using Named = std::map<std::string, c10::IValue>;
  using Autocast = std::function<std::shared_ptr<void>(at::ScalarType, at::DeviceType, bool)>;

  /// Runs the program. Throws `UsageError` for arguments of other structures, types or sizes than
  /// it was exported for. `autocast` as in `Environment`.
  c10::IValue call(const std::vector<c10::IValue>& arguments, const Named& named,
                   const Autocast& autocast);

 private:
  c10::IValue arguments_of(const std::vector<c10::IValue>& arguments, const Named& named) const;
  void check_input(const Input& input, const Leaf& leaf) const;
  void check_sizes(const std::vector<Leaf>& leaves) const;
  bool is_of_type(const at::Tensor& tensor, at::ScalarType expected) const;
  at::Device device_for(const std::vector<Leaf>& leaves) const;
  void move_constants(at::Device device);
  std::vector<c10::IValue> inputs_of(const std::vector<Leaf>& leaves) const;
  c10::IValue finish(const std::vector<c10::IValue>& results,
                     const std::vector<c10::IValue>& inputs) const;

  ExportedProgram program_;
  std::vector<ModelTensor> tensors_;
  std::map<std::string, size_t> by_name_;  // into `tensors_`
  std::map<std::string, at::Tensor> constants_;
};

}  // namespace smp::exported
