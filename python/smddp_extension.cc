// SPDX-License-Identifier: Apache-2.0
// The compiled part of the Python package smdistributed.dataparallel.torch.torch_smddp: the creator
// of backends that torch.distributed calls. It uses the libtorch that `import torch` has loaded.

#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "smp/c10d.h"

// The holder that torch's own bindings use for these classes.
PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)

namespace py = pybind11;

PYBIND11_MODULE(_smddp, module) {
  module.def("make_backend", &smp::smddp::make_backend, py::arg("store"), py::arg("rank"),
             py::arg("size"), py::arg("timeout"), py::arg("group"),
             py::call_guard<py::gil_scoped_release>(),
             "A torch.distributed Backend of the processes that meet at the store.");
  module.def("before_interpreter_ends", &smp::smddp::before_interpreter_ends,
             py::call_guard<py::gil_scoped_release>(),
             "Ends what threads of the library do with objects of Python.");
}
