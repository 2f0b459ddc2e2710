// SPDX-License-Identifier: Apache-2.0
// Bugs that random programs have found, as small programs.

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "tests/random/check.h"
#include "tests/random/program.h"

namespace smp::random_programs {
namespace {

using Kind = Leaf::Kind;

/// Writes a program down, register by register.
class Writer {
 public:
  int leaf(Kind kind, const std::string& name, Numbers sizes) {
    program_.leaves.push_back({kind, name, std::move(sizes)});
    return program_.registers++;
  }

  /// Calls an operation and returns its first result.
  int call(const char* name, std::vector<int> arguments, Numbers numbers = {}, Mode mode = {},
           int results = 1) {
    const int first = program_.registers;
    program_.instructions.push_back(
        {&operation(name), std::move(arguments), std::move(numbers), mode, first, results});
    program_.registers += results;
    return first;
  }

  void backward(int value, int gradient = -1) {
    program_.roots.push_back({value, gradient});
    program_.backward_after = static_cast<int>(program_.instructions.size());
  }

  /// Fails unless every cut and schedule tried gives the bits of eager execution; some has stages.
  void expect_equal() {
    int most_stages = 0;
    for (uint64_t seed = 0; seed < 24; ++seed) {
      program_.seed = seed;  // also of the leaves, the schedule and the number of microbatches
      const Verdict verdict = check(program_, Fault::kNone, seed);
      ASSERT_EQ(verdict.skipped, "") << "seed " << seed;
      ASSERT_EQ(verdict.rejection + verdict.failure, "") << "seed " << seed;
      most_stages = std::max(most_stages, verdict.stages);
    }
    EXPECT_GT(most_stages, 1);
  }

 private:
  Program program_;
};

constexpr Mode kAutocast = {/*no_grad=*/false, /*autocast=*/true};

/// Its history is where it was written, although its gradient is complete later only.
TEST(Found, BackwardFromABufferThatWasWrittenThroughAView) {
  Writer p;
  const int bias = p.leaf(Kind::kParameter, "bias", {6});
  const int state = p.leaf(Kind::kBuffer, "state", {4, 6});
  const int activated = p.call("tanh", {bias});
  const int row = p.call("select", {state}, {0, 1});
  p.call("add_", {row, activated}, {4});
  p.backward(state, p.call("loss_gradient", {state}));
  p.expect_equal();
}

/// The backward starts from a tensor that later operators use: their gradients come after its own.
TEST(Found, BackwardFromATensorThatIsUsedLater) {
  Writer p;
  const int input = p.leaf(Kind::kInput, "0", {4, 6});
  const int weight = p.leaf(Kind::kParameter, "weight", {6, 6});
  const int hidden = p.call("matmul", {input, weight});
  int loss = -1;
  for (const char* use : {"tanh", "sigmoid", "sin"}) {
    const int term = p.call("loss_term", {p.call(use, {hidden})});
    loss = loss < 0 ? term : p.call("loss_add", {loss, term});
  }
  p.backward(hidden, input);
  p.backward(loss);
  p.expect_equal();
}

/// Later microbatches write the buffer before the backward of earlier ones runs.
TEST(Found, AWrittenBufferIsTheGradientOfARoot) {
  Writer p;
  const int input = p.leaf(Kind::kInput, "0", {4, 6});
  const int weight = p.leaf(Kind::kParameter, "weight", {6, 6});
  const int state = p.leaf(Kind::kBuffer, "state", {4, 6});
  const int activated = p.call("tanh", {p.call("matmul", {input, weight})});
  p.call("mul_scalar_", {state}, {2});
  p.call("add_", {state, input}, {4});
  p.backward(activated, state);
  p.expect_equal();
}

/// The stage of the root makes its gradient again instead of receiving it.
TEST(Found, TheGradientOfARootIsMadeAgain) {
  Writer p;
  const int input = p.leaf(Kind::kInput, "0", {4, 6});
  const int bias = p.leaf(Kind::kParameter, "bias", {6});
  const int scaled = p.call("mul_scalar", {input}, {5});
  p.call("zeros", {}, {2});
  p.backward(p.call("mul", {scaled, bias}), scaled);
  p.expect_equal();
}

/// Normalisation in evaluation saves the running statistics, which others update.
TEST(Found, StatisticsReadInEvaluationAreWritten) {
  Writer p;
  const int input = p.leaf(Kind::kInput, "0", {4, 6});
  const int weight = p.leaf(Kind::kParameter, "weight", {6, 6});
  const int mean = p.leaf(Kind::kBuffer, "mean", {6});
  const int variance = p.leaf(Kind::kBuffer, "var", {6});
  const int hidden = p.call("matmul", {input, weight});
  const int frozen = p.call("batch_norm_eval", {hidden, mean, variance});
  const int normal = p.call("batch_norm", {p.call("tanh", {frozen}), mean, variance});
  p.backward(p.call("loss_term", {p.call("sin", {normal})}));
  p.expect_equal();
}

/// That update is no write for autograd, which would find any other.
TEST(Found, StatisticsThatAProductReadAreUpdatedAfterBackward) {
  Writer p;
  const int input = p.leaf(Kind::kInput, "0", {4, 6});
  const int weight = p.leaf(Kind::kParameter, "weight", {6, 6});
  const int mean = p.leaf(Kind::kBuffer, "mean", {6});
  const int variance = p.leaf(Kind::kBuffer, "var", {6});
  const int hidden = p.call("tanh", {p.call("matmul", {input, weight})});
  const int product = p.call("mul", {hidden, mean});
  p.backward(p.call("loss_term", {p.call("sin", {product})}));
  p.call("tanh", {p.call("batch_norm", {input, mean, variance})});
  p.expect_equal();
}

/// Stages of one rank share memory, but no count of its writes.
TEST(Found, AnActivationIsWrittenAfterBackwardOnAnotherStage) {
  for (const bool indices : {true, false}) {
    Writer p;
    const int input = p.leaf(Kind::kInput, "0", {4, 6});
    const int weight = p.leaf(Kind::kParameter, "weight", {6, 6});
    const int hidden = p.call("tanh", {p.call("matmul", {input, weight})});
    const int values = p.call("max", {hidden}, {0}, {}, /*results=*/2);
    p.backward(p.call("loss_term", {p.call("sin", {values})}));
    if (indices) {
      p.call("int_add_", {values + 1});
    } else {
      p.call("tanh_", {hidden});
    }
    p.expect_equal();
  }
}

/// Autocast casts a weight once in a scope, and adds up gradients in the lower precision.
TEST(Found, AWeightUsedTwiceUnderAutocast) {
  Writer p;
  const int input = p.leaf(Kind::kInput, "0", {4, 6});
  const int weight = p.leaf(Kind::kParameter, "weight", {6, 6});
  int x = p.call("tanh", {input});
  for (int use = 0; use < 3; ++use) {
    x = p.call("tanh", {p.call("matmul", {x, weight}, {}, kAutocast)}, {}, kAutocast);
  }
  x = p.call("matmul", {p.call("to_float", {x}), weight});
  for (int use = 0; use < 2; ++use) x = p.call("matmul", {x, weight}, {}, kAutocast);
  p.backward(p.call("loss_term", {p.call("sin", {x})}));
  p.expect_equal();
}

/// A view without elements shares its memory's version, too.
TEST(FoundPrograms, AnEmptyPartOfABufferIsWrittenAfterBackward) {
  Writer program;
  const int weight = program.leaf(Kind::kParameter, "weight", {6, 6});
  const int mean = program.leaf(Kind::kBuffer, "mean", {6});
  const int var = program.leaf(Kind::kBuffer, "var", {6});
  const int h = program.call("tanh", {weight});
  program.backward(program.call("loss_term", {program.call("batch_norm", {h, mean, var})}));
  program.call("mul_out_part", {mean, var}, {0, 5, 0});
  program.expect_equal();
}

/// The operator that gave a buffer a history gives one to the memory that it is added to.
TEST(FoundPrograms, ASlopeOfMemoryThatGotItsHistoryFromABuffer) {
  Writer program;
  const int weight = program.leaf(Kind::kParameter, "weight", {6, 6});
  const int bias = program.leaf(Kind::kParameter, "bias", {6});
  const int other = program.leaf(Kind::kParameter, "other", {4, 6});
  const int mean = program.leaf(Kind::kBuffer, "mean", {6});
  program.call("copy_", {mean, bias});
  const int noise = program.call("rand_like", {weight});
  program.call("add_to_part", {noise, mean}, {0, 4, 2});
  program.call("slope", {noise, other}, {0});
  program.expect_equal();
}

/// A part of nothing may begin after the end of its memory.
TEST(FoundPrograms, APartOfAnEmptyTensorIsWrittenAfterBackward) {
  Writer program;
  const int weight = program.leaf(Kind::kParameter, "weight", {4, 6});
  const int empty = program.leaf(Kind::kConstant, "empty", {0, 6});
  const int scale = program.leaf(Kind::kConstant, "scale", {6});
  const int sum = program.call("add", {empty, scale}, {3});
  program.backward(program.call("loss_term", {program.call("tanh", {weight})}));
  program.call("add_to_part", {sum, scale}, {1, 4, 1}, {/*no_grad=*/true, false});
  program.expect_equal();
}

/// The gradient of a write through an overlapping view depends on the memory below it.
TEST(FoundPrograms, AnOverlappingViewIsWritten) {
  Writer program;
  const int input = program.leaf(Kind::kInput, "0", {4, 6});
  const int weight = program.leaf(Kind::kParameter, "weight", {4, 6});
  const int product = program.call("mul", {weight, input});
  const int windows = program.call("unfold", {product}, {1});
  program.call("copy_into_part", {windows, windows}, {1, 0, 3});
  const int term = program.call("loss_term", {windows});
  program.backward(program.call("loss_add", {program.call("loss_term", {weight}), term}));
  program.expect_equal();
}

TEST(FoundPrograms, AViewMadeBeforeABufferGotItsHistory) {
  Writer program;
  const int input = program.leaf(Kind::kInput, "0", {4, 6});
  const int weight = program.leaf(Kind::kParameter, "weight", {4, 6});
  const int var = program.leaf(Kind::kBuffer, "var", {6});
  const int row = program.call("select", {program.call("mul", {weight, input})}, {0, 1});
  const int part = program.call("narrow", {var}, {0, 0, 5});
  program.call("add_to_part", {var, row}, {0, 3, 3});
  const int shown = program.call("view", {part}, {5}, kAutocast);
  program.backward(program.call("loss_term", {shown}));
  program.expect_equal();
}

TEST(FoundPrograms, TheImaginaryPartIsWritten) {
  Writer program;
  const int weight = program.leaf(Kind::kParameter, "weight", {4, 6});
  const int stacked = program.call("stack", {weight, weight}, {1});
  const int number = program.call("complex", {stacked, stacked});
  const int imag = program.call("imag", {number});
  program.call("mul_scalar_", {imag}, {1});
  program.backward(program.call("loss_term", {imag}));
  program.expect_equal();
}

/// `out=` takes no tensor that requires a gradient, which the buffer does later only.
TEST(FoundPrograms, ABufferIsAnOutBeforeItGetsItsHistory) {
  Writer program;
  const int weight = program.leaf(Kind::kParameter, "weight", {6, 6});
  const int var = program.leaf(Kind::kBuffer, "var", {6});
  const int state = program.leaf(Kind::kBuffer, "state", {4, 6});
  const int highest = program.call("max", {weight}, {1}, {}, /*results=*/2);
  const int part = program.call("mul_out_part", {state, var}, {0, 0, 3});
  program.call("copy_into_part", {part, highest}, {0, 1, 2});
  const int slope = program.call("slope", {highest, highest}, {1});
  program.call("tanh", {program.call("sin", {slope})});
  program.expect_equal();
}

/// A tensor that a list operator writes has another history from then on, though the operator
/// returns nothing.
TEST(FoundPrograms, ASlopeWithRespectToWhatAListOperatorWroteSince) {
  Writer program;
  const int input = program.leaf(Kind::kInput, "0", {4, 6});
  const int other = program.leaf(Kind::kParameter, "other", {4, 6});
  const int var = program.leaf(Kind::kBuffer, "var", {6});
  const int state = program.leaf(Kind::kBuffer, "state", {4, 6});
  const int part = program.call("copy_into_part", {input, other}, {1, 1, 2});
  const int product = program.call("mul", {var, input});
  program.call("foreach_add_", {part, state}, {}, {}, /*results=*/0);
  const int slope = program.call("slope", {product, input}, {1});
  program.call("tanh_out", {state, slope}, {}, {/*no_grad=*/true, false});
  program.call("tanh", {program.call("sin", {other})});
  program.expect_equal();
}

/// The function makes a view of its input itself; the caller's batch stays as it is.
TEST(FoundPrograms, AnInputIsViewedInPlace) {
  Writer program;
  const int input = program.leaf(Kind::kInput, "0", {4, 6});
  const int weight = program.leaf(Kind::kParameter, "weight", {4, 6});
  const int before = program.call("tanh", {program.call("add", {input, weight}, {4})});
  program.call("transpose_", {input}, {0, 1});
  program.call("unsqueeze_", {input});
  const int after = program.call("sin", {program.call("squeeze", {input})});
  program.backward(program.call("loss_term", {program.call("matmul", {after, before})}));
  program.expect_equal();
}

/// A list operator returns nothing, and yet its writes lead to its reads, which another stage has
/// made.
TEST(FoundPrograms, AListIsWrittenFromWhatRequiresAGradient) {
  Writer program;
  const int input = program.leaf(Kind::kInput, "0", {4, 6});
  const int weight = program.leaf(Kind::kParameter, "weight", {4, 6});
  const int other = program.leaf(Kind::kParameter, "other", {4, 6});
  const int factor = program.call("sin", {program.call("tanh", {weight})});
  const int first = program.call("tanh", {input});
  const int second = program.call("sigmoid", {first});
  program.call("foreach_mul_", {first, second, factor}, {}, {}, /*results=*/0);
  const int third = program.call("mul", {program.call("sin", {second}), other});
  program.call("foreach_scale_", {third, first, factor}, {}, {}, /*results=*/0);
  const int sum = program.call("add", {program.call("tanh", {third}), first}, {4});
  program.backward(program.call("loss_term", {sum}));
  program.expect_equal();
}

/// A capture on data lets go of tensors that the program cannot reach any more, and of nothing
/// else.
TEST(FoundPrograms, AVariableIsReadAgainMuchLater) {
  Writer program;
  const int weight = program.leaf(Kind::kParameter, "weight", {6, 6});
  const int variable = program.call("variable", {weight});
  int term = program.call("loss_term", {program.call("sin", {variable})});
  for (int i = 0; i < 150; ++i) term = program.call("tanh", {term});
  program.call("slope", {program.call("mul", {variable, term}), variable}, {1});
  program.call("tanh", {program.call("sin", {weight})});
  program.expect_equal();
}

/// Only the library holds the end of the variable's history, which is one in all scopes.
TEST(FoundPrograms, AVariableIsReadUnderAutocast) {
  Writer program;
  const int input = program.leaf(Kind::kInput, "0", {4, 6});
  const int weight = program.leaf(Kind::kParameter, "weight", {4, 6});
  const int variable = program.call("variable", {input});
  const int cast = program.call("add", {variable, weight}, {4}, kAutocast);
  const int slope = program.call("slope", {cast, variable}, {1});
  const int both = program.call("mul", {cast, program.call("sin", {variable})});
  const int slope_of_both = program.call("slope", {both, variable}, {1});
  const int sum = program.call("add", {program.call("tanh", {slope}), slope_of_both}, {4});
  program.backward(program.call("loss_term", {program.call("sin", {sum})}));
  program.expect_equal();
}

/// No gradient goes through `detach_`, whatever is written to its result later.
TEST(FoundPrograms, WhatWasDetachedInPlaceIsWrittenWithAHistory) {
  Writer program;
  const int weight = program.leaf(Kind::kParameter, "weight", {6, 6});
  const int state = program.call("detach_", {program.call("tanh", {weight})});
  const int other = program.call("sin", {program.call("sigmoid", {weight})});
  program.call("copy_into_part", {state, other}, {1, 3, 2});
  program.backward(program.call("loss_term", {program.call("sin", {state})}));
  program.expect_equal();
}

/// It is none any more: the program asks whether it requires a gradient.
TEST(FoundPrograms, AVariableIsDetachedInPlace) {
  Writer program;
  const int input = program.leaf(Kind::kInput, "0", {4, 6});
  const int weight = program.leaf(Kind::kParameter, "weight", {4, 6});
  const int variable = program.call("detach_", {program.call("variable", {input})});
  const int product = program.call("mul", {variable, weight});
  const int slope = program.call("slope", {product, variable}, {1});
  const int sum = program.call("add", {program.call("sin", {product}), slope}, {4});
  program.backward(program.call("loss_term", {program.call("tanh", {sum})}));
  program.expect_equal();
}

/// The history of a view that changes its shape under no_grad is that of its base, looked at anew.
TEST(FoundPrograms, AViewIsTransposedInPlaceUnderNoGrad) {
  Writer program;
  const int weight = program.leaf(Kind::kParameter, "weight", {6, 6});
  const int base = program.call("add", {weight, program.call("sin", {weight})}, {4});
  const int view = program.call("slice", {base}, {0});
  program.call("swapaxes_", {view}, {1, 0}, {/*no_grad=*/true, false});
  program.backward(program.call("loss_term", {program.call("sin", {view})}));
  program.expect_equal();
}

/// Products of a part that does not begin at a multiple of 64 bytes may differ in their last bits.
/// A tensor that is no view keeps the history of the shape that it had then.
TEST(FoundPrograms, AResultIsTransposedTwiceUnderNoGrad) {
  constexpr Mode kNoGrad = {/*no_grad=*/true, /*autocast=*/false};
  Writer program;
  const int weight = program.leaf(Kind::kParameter, "weight", {4, 6});
  const int result = program.call("sin", {program.call("tanh", {weight})});
  program.call("swapaxes_", {result}, {1, 0}, kNoGrad);
  program.call("swapaxes_", {result}, {1, 0}, kNoGrad);
  program.backward(program.call("loss_term", {program.call("sin", {result})}));
  program.expect_equal();
}

TEST(FoundPrograms, APartFromTheMiddleCrossesACut) {
  Writer program;
  const int weight = program.leaf(Kind::kParameter, "weight", {6, 6});
  const int other = program.leaf(Kind::kParameter, "other", {4, 6});
  const int part = program.call("narrow", {weight}, {0, 3, 2});
  const int product = program.call("matmul_transposed", {part, program.call("sin", {other})});
  program.backward(program.call("loss_term", {program.call("tanh", {product})}));
  program.expect_equal();
}

/// It requires a gradient, but none goes back from it: an operator in place saves nothing for one.
TEST(FoundPrograms, AViewMadeUnderNoGradCrossesACut) {
  Writer program;
  const int input = program.leaf(Kind::kInput, "0", {4, 6});
  const int bias = program.leaf(Kind::kParameter, "bias", {6});
  const int scale = program.leaf(Kind::kConstant, "scale", {6});
  const int state = program.call("slope", {scale, scale}, {1});
  const int view = program.call("transpose", {bias}, {0, 0}, {/*no_grad=*/true, false});
  const int sum = program.call("addcmul_", {state, state, view});
  program.call("sin", {input});
  program.backward(sum, sum);
  program.expect_equal();
}

/// It is the tensor that it was, whichever operator read it before.
TEST(FoundPrograms, ASlopeWithRespectToWhatWasWrittenUnderNoGrad) {
  constexpr Mode kNoGrad = {/*no_grad=*/true, /*autocast=*/false};
  for (const bool shape : {true, false}) {
    Writer program;
    const int weight = program.leaf(Kind::kParameter, "weight", {6, 6});
    const int mean = program.leaf(Kind::kBuffer, "mean", {6});
    const int product = program.call("addmm", {weight, weight, mean});
    const int scaled = program.call("mul_scalar", {product}, {-6});
    const int written = shape ? program.call("unsqueeze_", {product}, {}, kNoGrad)
                              : program.call("mul_scalar_", {product}, {2}, kNoGrad);
    const int slope = program.call("slope", {scaled, written}, {1});
    program.call("sin", {program.call("tanh", {weight})});
    program.backward(program.call("loss_term", {program.call("tanh", {slope})}));
    program.expect_equal();
  }
}

/// A view that is older than its history: the write that made the value with respect to which it
/// differentiates gave both of them one.
TEST(FoundPrograms, ASlopeOfAnOlderViewOfWhatWasWritten) {
  Writer program;
  const int weight = program.leaf(Kind::kParameter, "weight", {6});
  const int scale = program.leaf(Kind::kConstant, "scale", {6});
  const int base = program.call("sin", {scale});
  const int part = program.call("narrow", {base}, {0, 1, 5});
  const int written = program.call("copy_", {base, program.call("tanh", {weight})});
  const int slope = program.call("slope", {part, written}, {1});
  const int both = program.call("add", {program.call("sin", {slope}), written}, {4});
  program.backward(program.call("loss_term", {program.call("tanh", {both})}));
  program.expect_equal();
}

/// A variable begins a history of its own, also under no_grad.
TEST(FoundPrograms, AVariableIsMadeAndWrittenUnderNoGrad) {
  constexpr Mode kNoGrad = {/*no_grad=*/true, /*autocast=*/false};
  Writer program;
  const int input = program.leaf(Kind::kInput, "0", {4, 6});
  const int coarse = program.leaf(Kind::kParameter, "weight", {6});
  const int noise = program.call("rand_like", {input});
  const int variable = program.call("variable", {program.call("sin", {noise})});
  const int written = program.call("mul_scalar_", {variable}, {2}, kNoGrad);
  const int one = program.call("loss_term", {program.call("tanh", {coarse})});
  const int other = program.call("loss_term", {program.call("sin", {written})});
  program.backward(program.call("loss_add", {one, other}));
  program.expect_equal();
}

/// The gradient of a write through a view is laid out anew on the way back.
TEST(FoundPrograms, AViewIsWrittenBeyondACut) {
  Writer program;
  const int bias = program.leaf(Kind::kParameter, "bias", {2});
  const int kernel = program.leaf(Kind::kParameter, "kernel", {4, 3, 2});
  const int other = program.call("tanh", {bias});
  const int product = program.call("mul", {bias, kernel});
  const int view = program.call("permute", {product}, {0, 2, 1});
  program.call("foreach_scale_", {other, view, view}, {}, {}, /*results=*/0);
  program.backward(program.call("loss_term", {view}));
  program.expect_equal();
}

TEST(FoundPrograms, ASlopeWithRespectToWhatWasReturnedAsItIs) {
  Writer program;
  const int weight = program.leaf(Kind::kParameter, "weight", {6, 6});
  const int mean = program.leaf(Kind::kBuffer, "mean", {6});
  const int line = program.call("add", {program.call("sin", {weight}), mean}, {4});
  const int product = program.call("matmul", {line, weight});
  const int same = program.call("to_float", {line});
  const int slope = program.call("slope", {product, same}, {1});
  program.backward(program.call("loss_term", {program.call("tanh", {slope})}));
  program.expect_equal();
}

/// Its views are still views of it, and get the history that a write gives it.
TEST(FoundPrograms, WhatWasDetachedInPlaceIsWrittenAndSeenThroughAView) {
  Writer program;
  const int input = program.leaf(Kind::kInput, "0", {4, 6});
  const int other = program.leaf(Kind::kParameter, "other", {4, 6});
  const int view = program.call("unsqueeze", {input}, {1});
  program.call("detach_", {input});
  program.call("mul_", {input, program.call("tanh", {other})});
  program.backward(program.call("loss_term", {program.call("sin", {view})}));
  program.expect_equal();
}

/// The kept tensor of a gradient needs no history, which libtorch refuses to tell of this view.
TEST(FoundPrograms, TheGradientOfARootIsAViewWrittenUnderNoGrad) {
  constexpr Mode kNoGrad = {/*no_grad=*/true, /*autocast=*/false};
  Writer program;
  const int input = program.leaf(Kind::kInput, "0", {4, 6});
  const int weight = program.leaf(Kind::kParameter, "weight", {4, 6});
  const int product = program.call("mul", {program.call("sin", {weight}), input});
  const int shown = program.call("view", {product}, {4, 6});
  const int part = program.call("copy_into_part", {shown, input}, {0, 0, 4}, kNoGrad);
  program.backward(shown, part);
  program.call("mul_scalar_", {shown}, {2});
  program.expect_equal();
}

/// It shares memory that is written with a history, and is no view of it.
TEST(FoundPrograms, ABufferIsAddedToItselfAndItsDetachedViewIsWritten) {
  Writer program;
  const int weight = program.leaf(Kind::kParameter, "weight", {4, 6});
  const int bias = program.leaf(Kind::kParameter, "bias", {6});
  const int mean = program.leaf(Kind::kBuffer, "mean", {6});
  const int var = program.leaf(Kind::kBuffer, "var", {6});
  const int detached = program.call("detach", {var});
  program.call("add_", {var, detached}, {3});
  const int copy = program.call("copy_", {mean, program.call("mul_", {detached, bias})});
  const int slope = program.call("slope", {var, copy}, {0});
  const int product = program.call("mul", {program.call("sin", {weight}), slope});
  const int sum = program.call("add", {program.call("tanh", {weight}), product}, {4});
  program.backward(program.call("loss_term", {sum}));
  program.expect_equal();
}

/// An operator reads the sizes of a tensor that shares its memory, and is no view of that.
TEST(FoundPrograms, ADetachedViewIsExpandedAsWhatItWasDetachedFrom) {
  Writer program;
  const int state = program.leaf(Kind::kBuffer, "state", {4, 6});
  const int weight = program.leaf(Kind::kParameter, "weight", {6, 6});
  const int product = program.call("matmul", {state, weight});
  const int detached = program.call("detach", {product});
  const int copy = program.call("copy_into_part", {product, detached}, {1, 4, 2});
  program.call("mul_out_part", {detached, detached}, {0, 0, 2});
  program.call("slope", {weight, copy}, {1});
  program.backward(
      program.call("loss_term", {program.call("tanh", {program.call("sin", {weight})})}));
  program.expect_equal();
}

/// Plain libtorch sends a gradient through the write of the last view only, and fails where a part
/// of the gradients is asked for: a backward that the schedule would divide runs as a whole.
TEST(FoundPrograms, AListGivesSeveralViewsOfOneMemoryTheirHistory) {
  for (const bool same : {true, false}) {
    Writer program;
    const int input = program.leaf(Kind::kInput, "0", {4, 6});
    const int weight = program.leaf(Kind::kParameter, "weight", {4, 6});
    const int factor = program.call("sin", {program.call("tanh", {weight})});
    const int base = program.call("sigmoid", {input});
    const int first = program.call("select", {base}, {0, 1});
    const int second = same ? first : program.call("select", {base}, {0, 2});
    program.call("foreach_scale_", {first, second, factor}, {}, {}, /*results=*/0);
    program.backward(program.call("loss_term", {program.call("tanh", {base})}));
    program.expect_equal();
  }
}

}  // namespace
}  // namespace smp::random_programs
