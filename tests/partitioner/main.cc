// SPDX-License-Identifier: Apache-2.0
#include <ATen/Parallel.h>
#include <gmock/gmock.h>

/// The main program of all tests of this folder: they run graphs, whose bits depend on the number
/// of threads.
int main(int argc, char** argv) {
  at::set_num_threads(1);
  ::testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
