// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

/// Random programs on tensors: a possible `forward` of a user, as a list of instructions.
namespace smp::random_programs {

using Tensors = std::vector<at::Tensor>;
using Numbers = std::vector<int64_t>;

/// A seeded source of choices, the same on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  /// From 0 to `count` - 1; 0 if `count` is not positive.
  int64_t below(int64_t count) {
    return count <= 1 ? 0 : static_cast<int64_t>(engine_() % static_cast<uint64_t>(count));
  }
  bool chance(int percent) { return below(100) < percent; }

 private:
  std::mt19937_64 engine_;
};

/// Something that an instruction may do: one or a few calls of ATen functions.
struct Operation {
  const char* name;
  int weight;  ///< how often it is chosen
  /// One letter per tensor argument, see `Generator::fits`.
  const char* needs;
  /// Chooses the numbers: axes, sizes, factors in quarters.
  Numbers (*choose)(Random& random, const Tensors& arguments);
  Tensors (*run)(const Tensors& arguments, const Numbers& numbers);
};

/// All operations a program may be made of.
const std::vector<Operation>& operations();
/// The one with this name.
const Operation& operation(const std::string& name);

/// Modes that something runs under.
struct Mode {
  bool no_grad = false;
  bool autocast = false;
};

struct Instruction {
  const Operation* operation;
  std::vector<int> arguments;  ///< registers
  Numbers numbers;
  Mode mode;
  int first_result;  ///< register
  int results;
};

/// A tensor that exists before the program runs; leaf i is in register i.
struct Leaf {
  enum class Kind { kInput, kParameter, kBuffer, kConstant };
  Kind kind;
  std::string name;
  std::vector<int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
  int tied_to = -1;  ///< the leaf that it is the same tensor as
};

/// The registers on which `backward` is called. Without a gradient (-1) it is ones.
struct Root {
  int value;
  int gradient = -1;
};

struct Program {
  uint64_t seed = 0;
  /// Around the whole program. An instruction whose mode differs has a scope of its own inside.
  Mode outer;
  bool trains = true;  ///< parameters require grad
  std::vector<Leaf> leaves;
  std::vector<Instruction> instructions;
  std::vector<int> outputs;  ///< registers
  std::vector<Root> roots;
  int backward_after = -1;  ///< the number of instructions before `backward`; -1: all
  int registers = 0;

  /// One line per leaf and instruction, for people to read.
  std::string to_string() const;
};

/// Takes the roots and the gradient of each; undefined ones: ones.
using Backward = std::function<void(const Tensors& roots, const Tensors& gradients)>;

/// Runs a program on its leaves, as a user's function would, and returns its outputs. Registers are
/// dropped after their last use. `backward` is called where the program does, if it has roots.
Tensors execute(const Program& program, const Tensors& leaves, const Backward& backward);

/// The program with other factors, probabilities and host data, 0 and 1 among them.
Program with_other_numbers(Program program, Random& random);

/// The program with one more instruction somewhere, whose result is not used.
Program with_one_more(Program program, Random& random);

/// Runs one instruction on its arguments under its mode.
Tensors execute(const Instruction& instruction, const Tensors& arguments);

/// The content of leaf `index` for step and microbatch (which only inputs depend on).
at::Tensor make_leaf(const Program& program, size_t index, int step, int microbatch);

}  // namespace smp::random_programs
