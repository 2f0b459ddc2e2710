// SPDX-License-Identifier: Apache-2.0
#include "tests/random/generator.h"

#include <ATen/ExpandUtils.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "graph/keyed_random.h"
#include "graph/random.h"

namespace smp::random_programs {
namespace {

constexpr int64_t kLargest = 128;  ///< elements of a tensor
constexpr int64_t kDeepest = 4;    ///< axes of a tensor

bool is_floating(const at::Tensor& tensor) { return at::isFloatingType(tensor.scalar_type()); }

bool expands_to(const at::Tensor& tensor, c10::IntArrayRef sizes) {
  return at::is_expandable_to(tensor.sizes(), sizes);
}

class Generator {
 public:
  explicit Generator(uint64_t seed) : random_(seed), total_weight_(0) {
    program_.seed = seed;
    program_.trains = !random_.chance(20);
    program_.outer = {random_.chance(8), random_.chance(10)};
    for (const Operation& candidate : operations()) total_weight_ += candidate.weight;
  }

  Program run() {
    add_leaves();
    const size_t length = 4 + static_cast<size_t>(random_.below(random_.chance(30) ? 36 : 16));
    const bool goes_on = program_.trains && random_.chance(35);
    grow(goes_on ? 1 + static_cast<size_t>(random_.below(static_cast<int64_t>(length))) : length);
    if (program_.trains) add_roots();
    if (goes_on) {
      program_.backward_after = static_cast<int>(program_.instructions.size());
      differentiated_ = true;
      write_roots();
      grow(program_.instructions.size() + 1 + static_cast<size_t>(random_.below(8)));
    }
    add_outputs();
    program_.registers = static_cast<int>(tensors_.size());
    return std::move(program_);
  }

 private:
  void grow(size_t length) {
    for (int tries = 0; program_.instructions.size() < length && tries < 400; ++tries) {
      add_instruction();
    }
  }

  /// Changes the roots of the backward pass, after it.
  void write_roots() {
    for (const Root& root : program_.roots) {
      for (int index : {root.value, root.gradient}) {
        if (index < 0 || !random_.chance(60) || !fits('w', index, {})) continue;
        const char* kWrites[] = {"mul_scalar_", "zero_", "relu_", "tanh_"};
        const char* chosen = kWrites[random_.below(4)];
        const Mode mode{random_.chance(40), program_.outer.autocast};
        append({&operation(chosen), {index}, {2}, mode, 0, 0}, {tensors_[index]});
      }
    }
  }

  void add_leaf(Leaf::Kind kind, const std::string& name, Numbers sizes,
                at::ScalarType dtype = at::kFloat) {
    program_.leaves.push_back({kind, name, std::move(sizes), dtype, -1});
    tensors_.push_back(make_leaf(program_, program_.leaves.size() - 1, 0, 0));
  }

  void add_tie(const std::string& name, int to) {
    Leaf leaf = program_.leaves[to];
    leaf.name = name;
    leaf.tied_to = to;
    program_.leaves.push_back(leaf);
    tensors_.push_back(tensors_[to]);
  }

  void add_leaves() {
    using Kind = Leaf::Kind;
    add_leaf(Kind::kInput, "0", {4, 6});
    add_leaf(Kind::kInput, "1", {3}, at::kLong);
    if (random_.chance(40)) add_leaf(Kind::kInput, "2", {2, 3, 6});
    const int weight = static_cast<int>(tensors_.size());
    add_leaf(Kind::kParameter, "weight", {6, 6});
    add_leaf(Kind::kParameter, "bias", {6});
    add_leaf(Kind::kParameter, "other", {4, 6});
    if (random_.chance(50)) add_tie("tied", weight);
    if (random_.chance(25)) add_leaf(Kind::kParameter, "kernel", {4, 3, 2});
    if (random_.chance(20)) add_leaf(Kind::kParameter, "precise", {6}, at::kDouble);
    if (random_.chance(15)) add_leaf(Kind::kParameter, "phase", {4, 3}, at::kComplexFloat);
    if (random_.chance(15)) add_leaf(Kind::kParameter, "coarse", {6}, at::kHalf);
    add_leaf(Kind::kBuffer, "mean", {6});
    add_leaf(Kind::kBuffer, "var", {6});
    if (random_.chance(60)) add_leaf(Kind::kBuffer, "state", {4, 6});
    if (random_.chance(40)) add_leaf(Kind::kBuffer, "count", {}, at::kLong);
    if (random_.chance(50)) add_leaf(Kind::kConstant, "scale", {6});
    if (random_.chance(25)) add_leaf(Kind::kConstant, "mask", {4, 6}, at::kBool);
    if (random_.chance(15)) add_leaf(Kind::kConstant, "empty", {0, 6});
  }

  const Operation& choose_operation() {
    int64_t ticket = random_.below(total_weight_);
    for (const Operation& candidate : operations()) {
      ticket -= candidate.weight;
      if (ticket >= 0) continue;
      const bool too_late = differentiated_ && std::string(candidate.name) == "slope";
      return too_late ? operations().front() : candidate;
    }
    return operations().front();
  }

  bool is_leaf_named(int index, const char* name) const {
    return index < static_cast<int>(program_.leaves.size()) && program_.leaves[index].name == name;
  }

  /// False for a tensor that a step must not write: the storage of parameters and constants.
  bool writable(const at::Tensor& tensor) const {
    for (size_t i = 0; i < program_.leaves.size(); ++i) {
      const Leaf::Kind kind = program_.leaves[i].kind;
      const bool fixed = kind == Leaf::Kind::kParameter || kind == Leaf::Kind::kConstant;
      if (fixed && tensors_[i].storage().is_alias_of(tensor.storage())) return false;
    }
    return true;
  }

  bool is_buffer(const at::Tensor& tensor) const {
    for (size_t i = 0; i < program_.leaves.size(); ++i) {
      const bool buffer = program_.leaves[i].kind == Leaf::Kind::kBuffer;
      if (buffer && tensors_[i].is_same(tensor)) return true;
    }
    return false;
  }

  /// Whether the tensor in register `index` may be the next argument, by letter of `needs`.
  bool fits(char need, int index, const Tensors& before) const {
    const at::Tensor& tensor = tensors_[index];
    const bool floating = is_floating(tensor);
    const auto last_size = [&] { return before[0].dim() == 0 ? 1 : before[0].size(-1); };
    const auto same_type = [&] {
      return before.empty() || before[0].scalar_type() == tensor.scalar_type();
    };
    switch (need) {
      case 'a':  // anything
        return true;
      case 'f':  // floating
        return floating;
      case 'd':  // tensor with axes
        return floating && tensor.dim() >= 1;
      case 'm':  // a matrix
        return floating && tensor.dim() == 2;
      case '3':  // tensor with three axes
        return floating && tensor.dim() == 3 && same_type();
      case 'c':
        return tensor.is_complex();
      case 'i':
        return tensor.scalar_type() == at::kLong && tensor.numel() > 0;
      case 'Q':
        return tensor.scalar_type() == at::kBool;
      case 'q':  // a mask for the first
        return tensor.scalar_type() == at::kBool && expands_to(tensor, before[0].sizes());
      case 'b':  // can be broadcast with the first, either way
        return floating &&
               (expands_to(tensor, before[0].sizes()) || expands_to(before[0], tensor.sizes()));
      case 'e':  // expands to the first
        return (floating || tensor.scalar_type() == at::kLong) &&
               expands_to(tensor, before[0].sizes());
      case 's':  // tensor of the shape and type of the first
        return tensor.sizes() == before[0].sizes() && same_type();
      case 'k':  // second factor of a product with the first
        return floating && tensor.dim() == 2 && tensor.size(0) == last_size() && same_type();
      case 'l':  // the same, transposed
        return floating && tensor.dim() == 2 && tensor.size(1) == last_size() && same_type();
      case 'v':  // a vector as long as the last axis of the first
        return floating && tensor.dim() == 1 && same_type() &&
               (before.empty() || tensor.size(0) == last_size());
      case 'B':  // the bias of a linear layer
        return floating && tensor.dim() == 1 && tensor.size(0) == before[1].size(0) && same_type();
      case 'o':  // tensor that is added to a product
        return floating && same_type() &&
               expands_to(tensor, {before[0].size(0), before[1].size(1)});
      case 'x':  // a matrix without gradient
        return floating && tensor.dim() == 2 && !tensor.requires_grad();
      case 'w':  // may be written
        return floating && writable(tensor);
      case 'W':  // the same, with axes
        return floating && tensor.dim() >= 1 && writable(tensor);
      case 'u':  // may be changed in shape
        return floating && tensor.dim() >= 1 && writable(tensor) && !is_buffer(tensor);
      case 'O':  // may be an `out=`
        return floating && tensor.dim() >= 1 && !tensor.requires_grad() && writable(tensor);
      case 'j':
        return tensor.scalar_type() == at::kLong && writable(tensor);
      case 'J':
        return is_leaf_named(index, "count");
      case 'Y':
        return is_leaf_named(index, "mean") &&
               (before.empty() || before[0].size(1) == tensor.size(0));
      case 'Z':
        return is_leaf_named(index, "var");
      case 't':
        return tensor.scalar_type() == at::kFloat && expands_to(tensor, before[0].sizes());
      default:
        return false;
    }
  }

  /// A register for the next argument, a recent one rather than an old one; -1: there is none.
  int choose_register(char need, const Tensors& before) {
    std::vector<int> candidates;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (fits(need, static_cast<int>(i), before)) candidates.push_back(static_cast<int>(i));
    }
    if (candidates.empty()) return -1;
    const auto count = static_cast<int64_t>(candidates.size());
    const int64_t recent = random_.chance(50) ? std::min<int64_t>(count, 3) : count;
    return candidates[count - 1 - random_.below(recent)];
  }

  void add_instruction() {
    const Operation& chosen = choose_operation();
    Instruction instruction{&chosen, {}, {}, {}, 0, 0};
    Tensors arguments;
    for (const char* need = chosen.needs; *need != '\0'; ++need) {
      const int index = choose_register(*need, arguments);
      if (index < 0) return;
      instruction.arguments.push_back(index);
      arguments.push_back(tensors_[index]);
    }
    instruction.numbers = chosen.choose(random_, arguments);
    instruction.mode = program_.outer;
    if (random_.chance(program_.outer.no_grad ? 50 : 7)) instruction.mode.no_grad ^= true;
    if (random_.chance(program_.outer.autocast ? 25 : 3)) instruction.mode.autocast ^= true;
    append(std::move(instruction), arguments);
  }

  /// Runs the instruction and adds it, unless libtorch refuses it or a result is too large.
  bool append(Instruction instruction, const Tensors& arguments) {
    const graph::KeyedRandomScope keyed({program_.seed, 0, 0, program_.instructions.size()});
    Tensors results;
    try {
      results = execute(instruction, arguments);
    } catch (const std::exception&) {
      return false;
    }
    for (const at::Tensor& result : results) {
      if (result.numel() > kLargest || result.dim() > kDeepest) return false;
    }
    instruction.first_result = static_cast<int>(tensors_.size());
    instruction.results = static_cast<int>(results.size());
    tensors_.insert(tensors_.end(), results.begin(), results.end());
    program_.instructions.push_back(std::move(instruction));
    return true;
  }

  /// Adds an instruction with one result and returns its register, -1 if it is refused.
  int add(const char* name, const std::vector<int>& arguments) {
    Tensors tensors;
    for (int index : arguments) tensors.push_back(tensors_[index]);
    const Mode mode{/*no_grad=*/false, program_.outer.autocast};
    if (!append({&operation(name), arguments, {}, mode, 0, 0}, tensors)) return -1;
    return static_cast<int>(tensors_.size()) - 1;
  }

  /// A register that requires grad, the later the likelier; -1: there is none.
  int choose_differentiable() {
    std::vector<int> candidates;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (tensors_[i].requires_grad()) candidates.push_back(static_cast<int>(i));
    }
    if (candidates.empty()) return -1;
    const auto count = static_cast<int64_t>(candidates.size());
    return candidates[count - 1 -
                      random_.below(random_.chance(60) ? std::min<int64_t>(count, 8) : count)];
  }

  /// Usually the sum of a few tensors; sometimes two roots, or a root with a gradient.
  void add_roots() {
    int loss = -1;
    for (int64_t terms = 1 + random_.below(4); terms > 0; --terms) {
      const int chosen = choose_differentiable();
      if (chosen < 0) return;
      const int term = add("loss_term", {chosen});
      if (term < 0) continue;
      loss = loss < 0 ? term : add("loss_add", {loss, term});
    }
    if (loss < 0) return;
    program_.roots.push_back({loss, -1});
    if (!random_.chance(20)) return;
    const int second = choose_differentiable();
    if (second == loss || !is_floating(tensors_[second])) return;
    int gradient = random_.chance(50) ? choose_gradient(second) : -1;
    if (gradient < 0) gradient = add("loss_gradient", {second});
    if (gradient >= 0) program_.roots.push_back({second, gradient});
  }

  /// A register that may be the gradient of another one; -1: there is none.
  int choose_gradient(int root) {
    std::vector<int> candidates;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const bool fits = tensors_[i].sizes() == tensors_[root].sizes() &&
                        tensors_[i].scalar_type() == tensors_[root].scalar_type();
      if (fits) candidates.push_back(static_cast<int>(i));
    }
    return candidates[random_.below(static_cast<int64_t>(candidates.size()))];
  }

  void add_outputs() {
    for (int64_t count = 1 + random_.below(4); count > 0; --count) {
      const int64_t registers = static_cast<int64_t>(tensors_.size());
      const int64_t recent = random_.chance(70) ? std::min<int64_t>(registers, 12) : registers;
      program_.outputs.push_back(static_cast<int>(registers - 1 - random_.below(recent)));
    }
  }

  Random random_;
  int64_t total_weight_;
  bool differentiated_ = false;  // whether the following comes after `backward`
  Program program_;
  Tensors tensors_;  ///< tensors by register
};

}  // namespace

Program generate(uint64_t seed) { return Generator(seed).run(); }

}  // namespace smp::random_programs
