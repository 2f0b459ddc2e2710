// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace gpt {

/// Input bytes and the bytes that come after each of them, both `[batch, sequence]` of int64.
struct Batch {
  at::Tensor x;
  at::Tensor y;
};

/// `bytes` as a one-dimensional int64 tensor, one element a byte.
at::Tensor to_tensor(const std::string& bytes);

/// A text split into a part to train on and a part to judge by. Every tenth block of 2 KiB is held
/// out. Immutable; every method is a pure function, so any rank, at any time, after any restart,
/// draws the same batches.
class TextData {
 public:
  /// Bytes of a block.
  static constexpr int64_t kBlock = 2048;
  /// One block of so many is held out, the last of each group.
  static constexpr int64_t kHeldOutEvery = 10;

  /// Splits `text`; `name` is its name in errors. Throws `c10::ValueError` if the text is shorter
  /// than `kHeldOutEvery` blocks, as there would be nothing to hold out.
  TextData(const std::string& text, const std::string& name);

  /// Reads `files`, in this order. Throws `c10::ValueError` with the name of a file that is
  /// missing, unreadable or empty, or with all names if they are too short together.
  static TextData from_files(const std::vector<std::string>& files);

  /// The licence texts in `folder`, in order of their names. Links are left out: each is a second
  /// name for a text that is there already, and would put held-out blocks among the training text.
  static TextData from_folder(const std::string& folder = "/usr/share/common-licenses");

  const std::string& training_text() const { return training_; }
  const std::string& held_out_text() const { return held_out_; }

  /// `rows` random windows of the training text: a function of its arguments alone.
  /// Throws `c10::ValueError` if the text has fewer than `sequence` + 1 bytes.
  Batch batch(uint64_t seed, int64_t step, int64_t rows, int64_t sequence) const;

  /// The whole held-out text in windows spread evenly over it, in the fewest batches of `rows`
  /// windows that cover it. Throws `c10::ValueError` if it has fewer than `sequence` + 1 bytes.
  std::vector<Batch> held_out_batches(int64_t rows, int64_t sequence) const;

 private:
  std::string name_;
  std::string training_;
  std::string held_out_;
};

}  // namespace gpt
