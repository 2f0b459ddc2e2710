// SPDX-License-Identifier: Apache-2.0
#include "smp/exported.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "core/check.h"
#include "core/text.h"
#include "exported/loaded_program.h"
#include "exported/write_weights.h"
#include "smp/autocast.h"

namespace smp {
namespace {

using exported::LoadedProgram;
using exported::ModelTensor;

constexpr int64_t kMaxDepth = 100;

/// Deep trees and empty names would be refused, or never end, elsewhere.
void check_path(const std::string& file, const std::string& path) {
  const bool fits = !path.empty() && path.front() != '.' && path.back() != '.' &&
                    path.find("..") == std::string::npos &&
                    std::count(path.begin(), path.end(), '.') < kMaxDepth;
  SMP_CHECK_WITH(CheckpointError, fits, "exported program \"", core::printable(file), "\": \"",
                 core::printable(path, 100), "\" is no dotted path of at most ", kMaxDepth,
                 " names. The file is damaged: write it again by torch.export.save");
}

/// Gives a module the submodules, parameters and buffers of a program.
class ModuleTree {
 public:
  ModuleTree(torch::nn::Module& root, std::string file) : file_(std::move(file)) {
    modules_[""] = &root;
  }

  /// The submodule of that path, made where it is not there yet.
  torch::nn::Module& at(const std::string& path) {
    const auto found = modules_.find(path);
    if (found != modules_.end()) return *found->second;
    check_path(file_, path);
    const auto [parent, name] = parts_of(path);
    auto module = std::make_shared<torch::nn::Module>(name);
    at(parent).register_module(name, module);
    modules_[path] = module.get();
    return *module;
  }

  void add(const ModelTensor& tensor) {
    check_path(file_, tensor.name);
    const auto [owner, name] = parts_of(tensor.name);
    if (tensor.is_parameter) {
      at(owner).register_parameter(name, tensor.tensor, tensor.requires_grad);
    } else {
      at(owner).register_buffer(name, tensor.tensor);
    }
  }

 private:
  /// The parts before and after the last dot.
  static std::pair<std::string, std::string> parts_of(const std::string& path) {
    const size_t dot = path.rfind('.');
    if (dot == std::string::npos) return {"", path};
    return {path.substr(0, dot), path.substr(dot + 1)};
  }

  const std::string file_;
  std::map<std::string, torch::nn::Module*> modules_;
};

std::shared_ptr<void> autocast(at::ScalarType dtype, at::DeviceType device, bool enabled) {
  return std::make_shared<amp::Autocast>(dtype, device, enabled);
}

}  // namespace

class ExportedModuleImpl::Impl {
 public:
  explicit Impl(const ExportedPrograms& programs) {
    SMP_CHECK_WITH(UsageError, !programs.train().empty() || !programs.eval().empty(),
                   "smp::load_exported got no file. Give that of a program exported in training "
                   "mode, in evaluation mode, or both");
    if (!programs.train().empty()) train_ = std::make_shared<LoadedProgram>(programs.train());
    if (programs.eval() == programs.train()) {
      eval_ = train_;
    } else if (!programs.eval().empty()) {
      eval_ = std::make_shared<LoadedProgram>(programs.eval());
      if (train_ != nullptr) eval_->share_tensors(*train_);
    }
  }

  /// The program of a mode; null if it was not loaded.
  const std::shared_ptr<LoadedProgram>& of(bool training) const {
    return training ? train_ : eval_;
  }
  /// The program whose parameters and buffers are the module's.
  const LoadedProgram& first() const { return train_ != nullptr ? *train_ : *eval_; }

 private:
  std::shared_ptr<LoadedProgram> train_, eval_;
};

ExportedModuleImpl::ExportedModuleImpl(const ExportedPrograms& programs)
    : torch::nn::Module("ExportedModule"), impl_(std::make_unique<Impl>(programs)) {
  const exported::ExportedProgram& program = impl_->first().program();
  ModuleTree tree(*this, program.file);
  for (const std::string& path : program.modules) tree.at(path);
  for (const ModelTensor& tensor : impl_->first().tensors()) tree.add(tensor);
  if (impl_->of(/*training=*/true) == nullptr) torch::nn::Module::train(false);
}

ExportedModuleImpl::~ExportedModuleImpl() = default;

c10::IValue ExportedModuleImpl::call(const std::vector<c10::IValue>& arguments,
                                     const Named& named) {
  return impl_->of(is_training())->call(arguments, named, autocast);
}

void ExportedModuleImpl::train(bool on) {
  const char* mode = on ? "train" : "eval";
  SMP_CHECK_WITH(UsageError, impl_->of(on) != nullptr, "exported program \"",
                 core::printable(impl_->first().program().file), "\" was loaded without one for ",
                 mode, "(), and a program has one mode. Export the model after model.", mode,
                 "(), too, and load both: smp::load_exported(smp::ExportedPrograms()"
                 ".train(\"train.pt2\").eval(\"eval.pt2\"))");
  torch::nn::Module::train(on);
}

const std::string& ExportedModuleImpl::file() const {
  return impl_->of(is_training())->program().file;
}

void ExportedModuleImpl::pretty_print(std::ostream& stream) const {
  const exported::ExportedProgram& program = impl_->first().program();
  stream << "smp::ExportedModule(\"" << core::printable(program.file)
         << "\", nodes=" << program.function.nodes.size() << ")";
}

ExportedModule load_exported(const std::string& path) {
  return load_exported(ExportedPrograms().train(path));
}

ExportedModule load_exported(const ExportedPrograms& programs) { return ExportedModule(programs); }

void save_exported(const std::string& program,
                   const torch::OrderedDict<std::string, at::Tensor>& state,
                   const std::string& path) {
  std::map<std::string, at::Tensor> values;
  for (const auto& entry : state) values[entry.key()] = entry.value();
  exported::write_weights(program, values, path);
}

void save_exported(const ExportedModule& model, const std::string& path) {
  auto state = model->named_parameters();
  state.update(model->named_buffers());
  save_exported(model->file(), state, path);
}

}  // namespace smp
