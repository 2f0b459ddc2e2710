// SPDX-License-Identifier: Apache-2.0
// Program of tools/exported_zoo: trains an exported program on ranks that are threads, and compares
// each bit with the results of Python (reference.py).
//
//     zoo_run MODEL.pt2 MODEL.safetensors LOSS
//
// Prints a line for each number of ranks and optimizer: both, a verdict and its reason, with tabs
// between. The verdicts: equal, different, refused (an error of ours), failed (any other). Ends
// with status 0 if all are equal, 1 if not, and 2 if it cannot compare.
//
//     zoo_run MODEL.pt2 MODEL.safetensors --write WRITTEN.pt2
//
// Loads the program and writes it again by smp::export_program, for a batch of any size.
#include <torch/torch.h>

#include <cstring>
#include <exception>
#include <functional>
#include <iostream>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "checkpoint/safetensors.h"
#include "smp/export_program.h"
#include "smp/optim.h"
#include "smp/smp.h"

namespace {

using torch::Tensor;
using Tensors = std::map<std::string, Tensor>;
using smp::checkpoint::SafetensorsReader;

// The numbers of reference.py.
constexpr int kSteps = 3;
constexpr int kMicrobatches = 3;
constexpr uint64_t kSeed = 11;

bool has_prefix(const std::string& text, const std::string& prefix) {
  return text.compare(0, prefix.size(), prefix) == 0;
}

/// The tensors whose names begin with `prefix`, under the rest of their names.
Tensors tensors_under(const SafetensorsReader& reader, const std::string& prefix) {
  Tensors result;
  for (const auto& entry : reader.entries()) {
    if (!has_prefix(entry.first, prefix)) continue;
    result[entry.first.substr(prefix.size())] = reader.read(entry.first);
  }
  return result;
}

void append_tensors(const c10::IValue& value, std::vector<Tensor>& tensors) {
  if (value.isTensor()) {
    tensors.push_back(value.toTensor());
  } else if (value.isTuple()) {
    for (const auto& element : value.toTupleRef().elements()) append_tensors(element, tensors);
  } else if (value.isList()) {
    for (const auto& element : value.toListRef()) append_tensors(element, tensors);
  } else if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) append_tensors(entry.value(), tensors);
  }
}

/// The formulas of reference.py.
Tensor loss_of(const c10::IValue& result, const std::string& kind, const Tensors& targets) {
  std::vector<Tensor> outputs;
  append_tensors(result, outputs);
  if (kind == "own") return outputs.at(0);
  if (kind == "cross_entropy") return torch::cross_entropy_loss(outputs.at(0), targets.at("y"));
  Tensor sum;
  for (const Tensor& output : outputs) {
    if (!output.is_floating_point()) continue;
    const Tensor term = (output * output).mean();
    sum = sum.defined() ? sum + term : term;
  }
  return sum;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const Tensor x = a.contiguous();
  const Tensor y = b.contiguous();
  return std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

/// The first differences between the numbers of the ranks and those of Python.
class Differences {
 public:
  void compare(const std::string& what, const Tensor& got, const Tensor& expected) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (same_bits(got, expected) || texts_.size() > 4 || !seen_.insert(what).second) return;
    const bool alike = got.sizes() == expected.sizes();
    texts_.push_back(
        what + (alike ? c10::str(" by ", (got.to(torch::kDouble) - expected.to(torch::kDouble))
                                             .abs()
                                             .max()
                                             .item<double>())
                      : " in shape"));
  }
  void missing(const std::string& what) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (texts_.size() <= 4) texts_.push_back("no " + what);
  }
  std::string text() const {
    std::string all;
    for (const std::string& text : texts_) all += (all.empty() ? "" : "; ") + text;
    return all;
  }

 private:
  std::mutex mutex_;
  std::set<std::string> seen_;
  std::vector<std::string> texts_;
};

/// A program, and the results of its training in Python.
class Case {
 public:
  Case(std::string archive, const std::string& reference, std::string loss)
      : archive_(std::move(archive)), reference_(reference), loss_(std::move(loss)) {}

  template <class Optimizer, class Options>
  std::string train(int ranks, const std::string& optimizer, const Options& options) const;

 private:
  /// The names of the gradients that ranks have; each compared.
  std::set<std::string> compare_gradients(const torch::OrderedDict<std::string, Tensor>& parameters,
                                          const std::string& prefix,
                                          Differences& differences) const;
  void compare_values(const torch::OrderedDict<std::string, Tensor>& state,
                      const std::string& prefix, Differences& differences) const;
  void compare(const std::string& name, const Tensor& got, Differences& differences) const {
    if (reference_.entries().count(name) == 0) return differences.missing(name + " in Python");
    differences.compare(name, got, reference_.read(name));
  }

  const std::string archive_;
  const SafetensorsReader reference_;
  const std::string loss_;
};

std::set<std::string> Case::compare_gradients(
    const torch::OrderedDict<std::string, Tensor>& parameters, const std::string& prefix,
    Differences& differences) const {
  std::set<std::string> names;
  for (const auto& item : parameters) {
    if (!item.value().grad().defined()) continue;
    names.insert(prefix + item.key());
    compare(prefix + item.key(), item.value().grad(), differences);
  }
  return names;
}

void Case::compare_values(const torch::OrderedDict<std::string, Tensor>& state,
                          const std::string& prefix, Differences& differences) const {
  for (const auto& [name, expected] : tensors_under(reference_, prefix)) {
    const Tensor* got = state.find(name);
    if (got == nullptr) {
      differences.missing(prefix + name + " in C++");
    } else {
      differences.compare(prefix + name, *got, expected);
    }
  }
}

/// Returns the first differences; empty where all is equal.
template <class Optimizer, class Options>
std::string Case::train(int ranks, const std::string& optimizer, const Options& options) const {
  std::vector<smp::ExportedModule> modules;
  for (int i = 0; i < ranks; ++i) modules.push_back(smp::load_exported(archive_));
  const auto config =
      smp::Config().partitions(ranks).microbatches(kMicrobatches).seed(kSeed).timeout_seconds(60);
  Differences differences;
  std::set<std::string> gradients;
  std::mutex mutex;
  smp::run_as_threads(ranks, config, [&] {
    smp::DistributedModel<smp::ExportedModule> model(modules[smp::rank()]);
    smp::DistributedOptimizer<Optimizer> update(model->parameters(), options);
    auto train = smp::step(
        [&](const Tensors& inputs, const Tensors& targets) {
          smp::ExportedModuleImpl::Named named(inputs.begin(), inputs.end());
          Tensor loss = loss_of(model(named), loss_, targets);
          model->backward(loss);
          return loss;
        },
        smp::StepOptions().name("train"));
    for (int step = 0; step < kSteps; ++step) {
      const std::string number = std::to_string(step);
      update.zero_grad();
      const auto losses = train(tensors_under(reference_, "input." + number + "."),
                                tensors_under(reference_, "target." + number + "."));
      compare(optimizer + "." + number + ".loss", torch::stack(losses.outputs()), differences);
      const auto own = compare_gradients(model->local_named_parameters(),
                                         optimizer + "." + number + ".gradient.", differences);
      update.step();
      const std::lock_guard<std::mutex> lock(mutex);
      gradients.insert(own.begin(), own.end());
    }
    const auto state = model->state_dict();
    if (smp::rank() == 0) compare_values(state, optimizer + ".value.", differences);
  });
  for (int step = 0; step < kSteps; ++step) {
    const std::string prefix = optimizer + "." + std::to_string(step) + ".gradient.";
    for (const auto& expected : tensors_under(reference_, prefix)) {
      if (gradients.count(prefix + expected.first) == 0) {
        differences.missing(prefix + expected.first + " in C++");
      }
    }
  }
  return differences.text();
}

std::string one_line(std::string text) {
  for (char& c : text) {
    if (c == '\n' || c == '\t') c = ' ';
  }
  return text;
}

/// Prints the verdict of a training, which returns differences. Returns whether there are none.
bool judge(int ranks, const std::string& optimizer, const std::function<std::string()>& train) {
  std::string verdict = "equal";
  std::string reason;
  try {
    reason = train();
    if (!reason.empty()) verdict = "different";
  } catch (const smp::Error& error) {
    verdict = "refused";
    reason = error.what();
  } catch (const std::exception& error) {
    verdict = "failed";
    reason = error.what();
  }
  std::cout << ranks << "\t" << optimizer << "\t" << verdict << "\t" << one_line(reason)
            << std::endl;
  return verdict == "equal";
}

/// The written program takes one dictionary: the model's inputs by name.
void write_again(const std::string& archive, const std::string& reference,
                 const std::string& written) {
  smp::ExportedModule model = smp::load_exported(archive);
  const Tensors inputs = tensors_under(SafetensorsReader(reference), "input.0.");
  const std::map<int64_t, smp::ExportDim> axes{{0, smp::ExportDim("batch").min(2).max(64)}};
  smp::export_program(
      written, *model,
      [&](const Tensors& batch) {
        return model->call({}, smp::ExportedModuleImpl::Named(batch.begin(), batch.end()));
      },
      std::make_tuple(inputs),
      smp::ExportProgramOptions()
          .argument_names({"inputs"})
          .dynamic_shapes(smp::ExportProgramOptions::Shapes(inputs.size(), axes)));
}

}  // namespace

int main(int argc, char** argv) {
  const bool writes = argc == 5 && std::string(argv[3]) == "--write";
  if (argc != 4 && !writes) {
    std::cerr << "usage: zoo_run MODEL.pt2 MODEL.safetensors own|cross_entropy|squares\n"
                 "       zoo_run MODEL.pt2 MODEL.safetensors --write WRITTEN.pt2\n";
    return 2;
  }
  torch::set_num_threads(1);
  try {
    if (writes) {
      write_again(argv[1], argv[2], argv[4]);
      return 0;
    }
    const Case program(argv[1], argv[2], argv[3]);
    bool all_equal = true;
    for (int ranks : {1, 2, 4}) {
      all_equal &= judge(ranks, "sgd", [&] {
        return program.train<torch::optim::SGD>(ranks, "sgd", torch::optim::SGDOptions(0.1));
      });
      all_equal &= judge(ranks, "adamw", [&] {
        return program.train<smp::optim::FusedAdamW>(
            ranks, "adamw", torch::optim::AdamWOptions(0.01).weight_decay(0.1));
      });
    }
    return all_equal ? 0 : 1;
  } catch (const std::exception& error) {
    std::cerr << "zoo_run: " << error.what() << "\n";
    return 2;
  }
}
