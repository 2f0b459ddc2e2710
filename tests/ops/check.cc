// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/check.h"

#include <torch/torch.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "smp/smp.h"
#include "tests/smp/oracle.h"

namespace smp::op_samples {
namespace {

using testing::Named;

constexpr int kMicrobatches = 2;
constexpr int kCalls = 2;  // the first captures, the second is guarded
constexpr uint64_t kSeed = 3;

/// The leaves that require a gradient, as parameters.
struct LeavesImpl : torch::nn::Module {
  explicit LeavesImpl(const Sample& sample) {
    for (size_t i = 0; i < sample.leaves.size(); ++i) {
      if (!sample.leaves[i].requires_grad()) continue;
      const at::Tensor value = sample.leaves[i].detach();
      at::Tensor copy = at::empty_strided(value.sizes(), value.strides(), value.options());
      all.push_back(register_parameter("leaf" + std::to_string(i), copy.copy_(value)));
    }
  }
  Tensors all;
};
TORCH_MODULE(Leaves);

Tensors without_gradient(const Sample& sample) {
  Tensors result;
  for (const at::Tensor& leaf : sample.leaves) {
    if (!leaf.requires_grad()) result.push_back(leaf.clone());
  }
  return result;
}

/// Pins operators called while the result lives, if there is more than one rank to choose from.
std::unique_ptr<PartitionScope> on_partition(int index, bool pinned) {
  return pinned ? std::make_unique<PartitionScope>(index) : nullptr;
}

/// The loss, if there is one, and the outputs of the sample on leaves times `scale` (one number).
struct Results {
  at::Tensor loss;
  Tensors outputs;
};

Results run_sample(const Sample& sample, const Tensors& parameters, const Tensors& others,
                   const at::Tensor& scale, bool pinned) {
  Tensors inputs;
  Results results;
  {
    const auto scope = on_partition(0, pinned);
    size_t parameter = 0, other = 0;
    for (const at::Tensor& leaf : sample.leaves) {
      inputs.push_back(leaf.requires_grad() ? parameters[parameter++] * scale.reshape({})
                                            : others[other++]);
    }
  }
  {
    const auto scope = on_partition(1, pinned);
    results.outputs = execute(sample, inputs);
  }
  const auto scope = on_partition(0, pinned);
  results.loss = weighted_sum(results.outputs);
  return results;
}

/// Everything that a run leaves, by name.
class Outcome {
 public:
  void add(const std::string& name, const at::Tensor& tensor) {
    const at::Tensor plain = tensor.detach().resolve_conj().resolve_neg();
    tensors_[name] = plain.clone(at::MemoryFormat::Contiguous);
  }
  void add(const Outcome& other) { tensors_.insert(other.tensors_.begin(), other.tensors_.end()); }

  /// In words; empty if there is none.
  std::string difference(const Outcome& expected) const {
    for (const auto& [name, tensor] : expected.tensors_) {
      const auto found = tensors_.find(name);
      if (found == tensors_.end()) return name + " is missing";
      if (!same_bits(found->second, tensor)) {
        return c10::str(name, " is\n", found->second, "\nplain libtorch gives\n", tensor);
      }
    }
    for (const auto& entry : tensors_) {
      if (expected.tensors_.count(entry.first) == 0)
        return entry.first + " is not in plain libtorch";
    }
    return "";
  }

 private:
  static bool same_bits(const at::Tensor& a, const at::Tensor& b) {
    if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
    // Tensors without elements have no memory, which memcmp must not be given.
    return a.nbytes() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
  }

  Named tensors_;
};

std::string output_name(size_t output, int microbatch, int call) {
  return c10::str("output ", output, " of microbatch ", microbatch, " in call ", call);
}

void add_gradients(const torch::OrderedDict<std::string, at::Tensor>& parameters, int call,
                   Outcome& outcome) {
  for (const auto& item : parameters) {
    if (!item.value().grad().defined()) continue;
    outcome.add(c10::str("gradient of ", item.key(), " in call ", call), item.value().grad());
  }
}

at::Tensor scales() { return at::tensor({1.0F, 0.5F}); }

Outcome run_plain(const Sample& sample) {
  Outcome outcome;
  const Leaves leaves(sample);
  for (int call = 0; call < kCalls; ++call) {
    testing::plain_microbatches(leaves->all, 1, kMicrobatches, [&](int m) {
      const KeyedRandom random(kSeed, "step 0", call, m);
      const Results results = run_sample(sample, leaves->all, without_gradient(sample),
                                         scales().narrow(0, m, 1), false);
      for (size_t i = 0; i < results.outputs.size(); ++i) {
        outcome.add(output_name(i, m, call), results.outputs[i]);
      }
      if (results.loss.defined()) results.loss.backward();
    });
    add_gradients(leaves->named_parameters(), call, outcome);
  }
  return outcome;
}

/// The outcome on one rank.
Outcome run_rank(const Sample& sample, bool pinned) {
  Outcome outcome;
  Leaves leaves(sample);
  const Tensors parameters = leaves->all;
  DistributedModel<Leaves> model(leaves);
  auto train = step(
      [&](const at::Tensor& scale, const Tensors& others) {
        const Results results = run_sample(sample, parameters, others, scale, pinned);
        if (results.loss.defined()) model->backward(results.loss);
        return results.outputs;
      },
      StepOptions().non_split_inputs({1}));
  for (int call = 0; call < kCalls; ++call) {
    const auto outputs = train(scales(), without_gradient(sample));
    for (size_t i = 0; i < outputs.size(); ++i) {
      for (int m = 0; m < kMicrobatches; ++m) {
        outcome.add(output_name(i, m, call), outputs[i].outputs()[m]);
      }
    }
    add_gradients(model->local_named_parameters(), call, outcome);
  }
  return outcome;
}

Outcome run_over_ranks(const Sample& sample, int ranks) {
  Outcome outcome;
  std::mutex mutex;
  const auto config = Config()
                          .partitions(ranks)
                          .microbatches(kMicrobatches)
                          .auto_partition(false)
                          .default_partition(0)
                          .seed(kSeed)
                          .timeout_seconds(60);
  run_as_threads(ranks, config, [&] {
    const Outcome here = run_rank(sample, ranks > 1);
    const std::lock_guard<std::mutex> lock(mutex);
    outcome.add(here);
  });
  return outcome;
}

/// How Python's results differ from plain libtorch's on the leaves themselves.
std::string unlike_python(const Sample& sample) {
  if (sample.random) return "";
  const Leaves leaves(sample);
  const Results results =
      run_sample(sample, leaves->all, without_gradient(sample), at::ones({1}), false);
  if (results.loss.defined()) results.loss.backward();
  const auto differs = [](at::Tensor got, const at::Tensor& expected) {
    if (got.defined() != expected.defined()) return true;
    if (!got.defined()) return false;
    got = got.detach().resolve_conj().resolve_neg();
    if (got.is_complex()) got = at::view_as_real(got);
    return got.sizes() != expected.sizes() || got.scalar_type() != expected.scalar_type() ||
           !at::allclose(got, expected, 1e-4, 1e-5, /*equal_nan=*/true);
  };
  if (results.outputs.size() != sample.expected_outputs.size()) return "the number of outputs";
  for (size_t i = 0; i < results.outputs.size(); ++i) {
    if (differs(results.outputs[i], sample.expected_outputs[i])) return c10::str("output ", i);
  }
  for (size_t i = 0, p = 0; i < sample.leaves.size(); ++i) {
    if (!sample.leaves[i].requires_grad()) continue;
    if (differs(leaves->all[p++].grad(), sample.expected_gradients[i])) {
      return c10::str("the gradient of leaf ", i);
    }
  }
  return "";
}

/// A text without "[smp rank 0] ".
std::string without_prefix(const std::string& text) {
  const size_t end = text.rfind("[smp", 0) == 0 ? text.find("] ") : std::string::npos;
  return end == std::string::npos ? text : text.substr(end + 2);
}

/// Refusals say the remedy after the error: a text of one sentence has no remedy.
bool is_refusal(const std::string& text) {
  const bool internal = text.find("internal error") != std::string::npos ||
                        text.find("This is a bug in smp") != std::string::npos;
  return !internal && text.find(". ") != std::string::npos;
}

Verdict check_over_ranks(const Sample& sample, int ranks, const Outcome& expected) {
  const std::string where = ranks == 1 ? "one rank: " : "two ranks: ";
  try {
    const std::string text = run_over_ranks(sample, ranks).difference(expected);
    return text.empty() ? Verdict() : Verdict{Kind::kWrong, where + text};
  } catch (const Error& error) {
    const std::string text = without_prefix(error.what_without_backtrace());
    // libtorch's own errors are passed on as an Error and no more, which is no refusal.
    if (typeid(error) == typeid(Error)) return {Kind::kWrong, where + "no refusal: " + text};
    return is_refusal(text) ? Verdict{Kind::kRefused, text} : Verdict{Kind::kWrong, where + text};
  } catch (const c10::Error& error) {
    return {Kind::kWrong, where + "no refusal: " + error.what_without_backtrace()};
  } catch (const std::exception& error) {
    return {Kind::kWrong, where + "no refusal: " + error.what()};
  }
}

}  // namespace

Verdict check(const Sample& sample) {
  at::set_num_threads(1);  // the ranks' threads have one, too
  Outcome expected;
  try {
    const std::string difference = unlike_python(sample);
    if (!difference.empty()) return {Kind::kUnlikePython, difference};
    expected = run_plain(sample);
  } catch (const c10::Error& error) {
    return {Kind::kPlainRefuses, error.what_without_backtrace()};
  }
  const Verdict one = check_over_ranks(sample, 1, expected);
  return one.kind == Kind::kEqual ? check_over_ranks(sample, 2, expected) : one;
}

}  // namespace smp::op_samples
