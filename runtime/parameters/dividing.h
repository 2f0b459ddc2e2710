// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/refusal.h"
#include "graph/graph.h"
#include "nn/rewrite/divide.h"
#include "runtime/runtime.h"
#include "smp/nn/parameter_split.h"

// Models that are divided by rewriting their captured graphs. Internal.
namespace smp::runtime {

/// How a captured graph would be divided. Nothing follows from it until `divide_graph` settles it.
struct Division {
  core::Refusal refusal;  ///< why nothing of the graph can be divided
  nn::rewrite::DividedGraph made;

  /// The graph that the ranks would run; null: as captured.
  const graph::Graph* graph() const { return made.parameters.empty() ? nullptr : &made.graph; }
};

/// Divides a captured graph, whose costs are known. Every rank gets it by itself; null without
/// tensor parallelism.
std::shared_ptr<Division> preview_division(Runtime& runtime, const graph::Graph& captured,
                                           const std::string& step_name);

/// The graph with divided layers that the ranks of tensor-parallel groups run in place of a
/// captured one: that of its `preview`, which is made here where it is null. Null: as captured,
/// because there is one rank, or nothing can be divided, or is worth it. The first graph settles
/// how parameters are divided, and the report; later ones follow it.
///
/// Collective over the world for the first graph, else over the ranks that run it together. Throws
/// `UsageError` on all ranks where they marked different modules, and, with
/// `strict_tensor_parallelism`, for parameters that could not be divided.
std::shared_ptr<const nn::rewrite::DividedGraph> divide_graph(
    Runtime& runtime, const graph::Graph& captured, const std::string& step_name,
    std::shared_ptr<Division> preview = nullptr);

/// Leaves this rank its part of a parameter that was whole: the same tensor, with local sizes. One
/// without data, since it belongs to another rank of the pipeline, gets the sizes. Its gradient is
/// divided with it. To be called when parameters have owners.
void divide_parameter(Runtime& runtime, const ParameterTable::Entry& entry,
                      const nn::ParameterSplit& split);

/// The sizes and the data of a tensor that is shown with others meanwhile.
struct SetAside {
  at::Tensor tensor;
  std::vector<int64_t> sizes, strides;
  c10::intrusive_ptr<c10::StorageImpl> data;  ///< null where this rank has none

  explicit SetAside(const at::Tensor& shown);
  void restore() const;
};

/// Divided parameters, whole and with data on all ranks of a tensor-parallel group, for the program
/// to use as a plain module's. Meanwhile modules that divide them themselves do not communicate
/// (`Runtime::tensor_group`). The program's changes to them and to their gradients are not kept.
class LentWholes {
 public:
  /// Lends those of which this rank's group has parts. Collective over it.
  explicit LentWholes(Runtime& runtime);
  /// The parts again, as they were.
  void take_back();

 private:
  struct Lent {
    SetAside part;
    at::Tensor gradient;
  };
  std::vector<Lent> lent_;
};

/// Has operators refuse what cannot be computed from this rank's parts of parameters whose use was
/// captured on the whole (graph/part.h): when the first step that divides them ends.
void mark_parts(const Runtime& runtime);

/// The library's own use of parameters, which knows of parts: while it lives, they are not marked.
/// Takes back the lent wholes when it begins.
class OwnUse {
 public:
  explicit OwnUse(Runtime& runtime);
  ~OwnUse();
  OwnUse(const OwnUse&) = delete;
  OwnUse& operator=(const OwnUse&) = delete;

 private:
  Runtime& runtime_;
  std::vector<at::Tensor> parts_;
};

/// That of a call of the user's. Throws `UsageError` in a step function; `call` is the call, for
/// errors.
[[nodiscard]] OwnUse begin_outside_step(Runtime& runtime, const char* call);

/// While it lives, divided parameters whose use was captured on the whole have the whole's sizes,
/// and no data: the user's code sees them so when it is captured or guarded again.
class WholeShapes {
 public:
  explicit WholeShapes(const ParameterTable& table);
  ~WholeShapes();
  WholeShapes(const WholeShapes&) = delete;
  WholeShapes& operator=(const WholeShapes&) = delete;

 private:
  std::vector<SetAside> parts_;
};

}  // namespace smp::runtime
