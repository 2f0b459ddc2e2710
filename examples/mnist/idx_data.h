// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace mnist {

/// Reads an idx file of unsigned bytes, plain or gzipped, as a uint8 tensor of the file's shape.
/// Throws `c10::ValueError` with the file's name, the expectation and the content if the file is
/// missing, truncated, too long or of another format.
at::Tensor read_idx(const std::string& file);

/// Labelled digits.
struct Digits {
  at::Tensor images;  ///< float `[count, 1, 28, 28]`, normalised by MNIST's mean and deviation
  at::Tensor labels;  ///< int64 `[count]`

  int64_t size() const { return labels.size(0); }

  /// The digits at `indices`, an int64 tensor.
  Digits select(const at::Tensor& indices) const;
};

/// The digits to train on and those to test with.
struct DataSet {
  Digits training;
  Digits test;
  std::string description;  ///< where they come from, for people
};

/// Reads MNIST from `folder`, which holds the four files `train-images-idx3-ubyte`,
/// `train-labels-idx1-ubyte`, `t10k-images-idx3-ubyte` and `t10k-labels-idx1-ubyte`, each plain or
/// with the ending `.gz`. Where only the t10k files exist, their first nine tenths are for training
/// and the rest is for testing. Throws `c10::ValueError` naming a file that is missing, with how to
/// get it, or malformed.
DataSet load_mnist(const std::string& folder);

/// Draws the batches of one epoch from a shuffled order. A function of its arguments alone, so all
/// ranks draw the same ones.
class EpochSampler {
 public:
  /// `count` digits in batches of `batch_size`. Throws `c10::ValueError` if they do not fill one.
  EpochSampler(int64_t count, int64_t batch_size, uint64_t seed);

  /// Indices (int64) of each batch of `epoch`. Digits that do not fill a batch are dropped.
  std::vector<at::Tensor> batches(int64_t epoch) const;

 private:
  const int64_t count_, batch_size_;
  const uint64_t seed_;
};

}  // namespace mnist
