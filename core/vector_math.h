// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace smp::core {

/// Lets MKL's vector mathematics find out which CPU it runs on; later calls do nothing.
///
/// libtorch's CPU kernels of exp, tanh, erf, sqrt and others call it. Its first call in a process
/// finds the type of CPU and notes it in two writes without a lock: first by its number in the
/// whole of MKL, then by that in the tables of vector functions. A thread that comes between the
/// two takes a kernel from the wrong entry, and half of the bits of one operator are wrong
/// (https://github.com/pytorch/pytorch/issues/188792). So this is called before ranks are threads,
/// and before a rank's intra-op threads share an operator.
void prepare_vector_math();

}  // namespace smp::core
