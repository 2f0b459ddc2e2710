// SPDX-License-Identifier: Apache-2.0
#include "tests/random/program.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rand.h>

#include <optional>
#include <set>
#include <sstream>

#include "core/check.h"

namespace smp::random_programs {
namespace {

/// Autocast as a user switches it on or off around some calls.
class AutocastScope {
 public:
  explicit AutocastScope(bool on) : before_(at::autocast::is_autocast_enabled(at::kCPU)) {
    at::autocast::set_autocast_enabled(at::kCPU, on);
  }
  ~AutocastScope() {
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, before_);
  }

 private:
  bool before_;
};

const char* name_of(Leaf::Kind kind) {
  switch (kind) {
    case Leaf::Kind::kInput:
      return "input";
    case Leaf::Kind::kParameter:
      return "parameter";
    case Leaf::Kind::kBuffer:
      return "buffer";
    case Leaf::Kind::kConstant:
      return "constant";
  }
  return "";
}

std::string list_of(const char* before, const std::vector<int>& registers) {
  std::ostringstream out;
  for (size_t i = 0; i < registers.size(); ++i) {
    out << (i == 0 ? "" : ", ") << before << registers[i];
  }
  return out.str();
}

std::string roots_text(const std::vector<Root>& roots) {
  std::ostringstream out;
  for (const Root& root : roots) {
    out << "  backward(r" << root.value;
    if (root.gradient >= 0) out << ", r" << root.gradient;
    out << ")\n";
  }
  return out.str();
}

/// Per register, the last instruction that uses it; -1 for none, or if it is used at the end.
std::vector<int> last_uses(const Program& program) {
  std::vector<int> uses(program.registers, -1);
  for (size_t i = 0; i < program.instructions.size(); ++i) {
    const Instruction& instruction = program.instructions[i];
    for (int argument : instruction.arguments) uses[argument] = static_cast<int>(i);
    for (int r = 0; r < instruction.results; ++r) {
      uses[instruction.first_result + r] = static_cast<int>(i);
    }
  }
  for (int output : program.outputs) uses[output] = -1;
  for (const Root& root : program.roots) {
    uses[root.value] = -1;
    if (root.gradient >= 0) uses[root.gradient] = -1;
  }
  return uses;
}

}  // namespace

std::string Program::to_string() const {
  std::ostringstream out;
  out << "program of seed " << seed << (trains ? "" : ", without gradients")
      << (outer.no_grad ? ", under no_grad" : "") << (outer.autocast ? ", under autocast" : "")
      << "\n";
  for (size_t i = 0; i < leaves.size(); ++i) {
    const Leaf& leaf = leaves[i];
    out << "  r" << i << " = " << name_of(leaf.kind) << " " << leaf.name << " "
        << c10::toString(leaf.dtype) << c10::IntArrayRef(leaf.sizes);
    if (leaf.tied_to >= 0) out << ", the same as r" << leaf.tied_to;
    out << "\n";
  }
  for (size_t i = 0; i < instructions.size(); ++i) {
    const Instruction& instruction = instructions[i];
    if (static_cast<int>(i) == backward_after) out << roots_text(roots);
    std::vector<int> results(instruction.results);
    for (int r = 0; r < instruction.results; ++r) results[r] = instruction.first_result + r;
    out << "  " << list_of("r", results) << " = " << instruction.operation->name << "("
        << list_of("r", instruction.arguments) << ")";
    if (!instruction.numbers.empty()) out << " " << c10::IntArrayRef(instruction.numbers);
    if (instruction.mode.no_grad) out << " no_grad";
    if (instruction.mode.autocast) out << " autocast";
    out << "\n";
  }
  const auto length = static_cast<int>(instructions.size());
  if (backward_after < 0 || backward_after >= length) out << roots_text(roots);
  out << "  return " << list_of("r", outputs) << "\n";
  return out.str();
}

namespace {

/// Runs an instruction under its mode, but for autocast.
Tensors execute_in_scope(const Instruction& instruction, const Tensors& arguments) {
  std::optional<at::AutoGradMode> grad;
  if (instruction.mode.no_grad == at::GradMode::is_enabled()) {
    grad.emplace(!instruction.mode.no_grad);
  }
  return instruction.operation->run(arguments, instruction.numbers);
}

}  // namespace

Tensors execute(const Instruction& instruction, const Tensors& arguments) {
  std::optional<AutocastScope> autocast;
  if (instruction.mode.autocast) autocast.emplace(true);
  return execute_in_scope(instruction, arguments);
}

Tensors execute(const Program& program, const Tensors& leaves, const Backward& backward) {
  const std::vector<int> uses = last_uses(program);
  std::optional<at::NoGradGuard> no_grad;
  if (program.outer.no_grad) no_grad.emplace();
  std::optional<AutocastScope> outer, inner;  // inner: around instructions that follow each other
  if (program.outer.autocast) outer.emplace(true);
  Tensors registers = leaves;
  registers.resize(program.registers);
  const auto differentiate = [&] {
    Tensors roots, gradients;
    for (const Root& root : program.roots) {
      roots.push_back(registers[root.value]);
      gradients.push_back(root.gradient < 0 ? at::Tensor() : registers[root.gradient]);
    }
    if (!roots.empty()) backward(roots, gradients);
  };
  for (size_t i = 0; i < program.instructions.size(); ++i) {
    if (static_cast<int>(i) == program.backward_after) differentiate();
    const Instruction& instruction = program.instructions[i];
    Tensors arguments;
    for (int argument : instruction.arguments) arguments.push_back(registers[argument]);
    const bool differs = instruction.mode.autocast != program.outer.autocast;
    if (!differs) inner.reset();
    if (differs && !inner) inner.emplace(instruction.mode.autocast);
    const Tensors results = execute_in_scope(instruction, arguments);
    arguments.clear();
    SMP_CHECK(static_cast<int>(results.size()) == instruction.results, instruction.operation->name,
              ": expected ", instruction.results, " results, got ", results.size());
    for (int r = 0; r < instruction.results; ++r) {
      registers[instruction.first_result + r] = results[r];
    }
    const auto drop = [&](int index) {
      if (uses[index] == static_cast<int>(i)) registers[index].reset();
    };
    for (int argument : instruction.arguments) drop(argument);
    for (int r = 0; r < instruction.results; ++r) drop(instruction.first_result + r);
  }
  const auto length = static_cast<int>(program.instructions.size());
  if (program.backward_after < 0 || program.backward_after >= length) differentiate();
  Tensors outputs;
  for (int output : program.outputs) outputs.push_back(registers[output]);
  return outputs;
}

Program with_other_numbers(Program program, Random& random) {
  static const std::set<std::string> kFactors = {"mul_scalar",  "add_scalar",    "add",
                                                 "mul_scalar_", "add_",          "fill_",
                                                 "dropout",     "alpha_dropout", "filled"};
  for (Instruction& instruction : program.instructions) {
    if (kFactors.count(instruction.operation->name) == 0 || random.chance(40)) continue;
    const bool zeros = random.chance(20);
    for (int64_t& quarters : instruction.numbers) quarters = zeros ? 0 : random.below(5);
  }
  return program;
}

Program with_one_more(Program program, Random& random) {
  const auto index = random.below(static_cast<int64_t>(program.instructions.size()) + 1);
  const Instruction more{&operation("tanh"), {0}, {}, {}, program.registers++, 1};
  program.instructions.insert(program.instructions.begin() + index, more);
  if (index <= program.backward_after) ++program.backward_after;
  return program;
}

at::Tensor make_leaf(const Program& program, size_t index, int step, int microbatch) {
  const Leaf& leaf = program.leaves[index];
  const bool input = leaf.kind == Leaf::Kind::kInput;
  const uint64_t stream = input ? 1 + 16 * step + microbatch : 0;
  auto generator =
      at::make_generator<at::CPUGeneratorImpl>(program.seed * 4096 + index * 128 + stream);
  const at::Tensor numbers = at::rand(leaf.sizes, generator) * 2 - 1;
  at::Tensor tensor = at::isIntegralType(leaf.dtype, /*includeBool=*/false)
                          ? ((numbers + 1) * 2).to(leaf.dtype)
                      : leaf.dtype == at::kBool ? numbers > 0
                      : leaf.kind == Leaf::Kind::kBuffer  // running variances are positive
                          ? (numbers + 1.5).to(leaf.dtype)
                          : numbers.to(leaf.dtype);
  if (leaf.kind == Leaf::Kind::kParameter) tensor.set_requires_grad(program.trains);
  return tensor;
}

}  // namespace smp::random_programs
