// SPDX-License-Identifier: Apache-2.0
// The parts of a tracer, each alone.
#include <gmock/gmock.h>

#include "core/check.h"
#include "graph/histories.h"
#include "graph/host_data.h"
#include "graph/known_tensors.h"
#include "graph/location.h"
#include "graph/module_scope.h"
#include "graph/shapes.h"
#include "tests/error_of.h"
#include "tests/graph/harness.h"

namespace smp::graph::testing {
namespace {

using ::testing::HasSubstr;

c10::OperatorHandle handle_of(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

/// The text of the `CaptureError` that `body` throws; empty if it throws none.
template <class Body>
std::string capture_error(const Body& body) {
  try {
    body();
  } catch (const CaptureError& error) {
    return error.what();
  }
  return "";
}

TEST(TraceOptions, NeedATable) {
  TraceOptions options;
  options.step_name = "train";
  EXPECT_THAT(smp::testing::error_of([&] { Tracer tracer(options); }),
              HasSubstr("step function \"train\" is traced without a table of its tensors"));
}

/// A run whose graph the test makes. Notes what it is told.
class FakeRun final : public RunGraph {
 public:
  FakeRun() {
    for (int set = 0; set < 3; ++set) {
      graph_.values.emplace_back();
      graph_.values.back().alias_set = set;
    }
    graph_.alias_sets = 3;
  }
  const Graph& graph() const override { return graph_; }
  const Value& value(ValueId id) const override { return graph_.values[id]; }
  bool requires_grad(ValueId) override { return false; }
  void settle(const HostMemory& memory, bool for_read) override {
    settled.emplace_back(memory.id, memory.filled(for_read));
  }
  void set_user(ValueId id, const at::Tensor&) override { users.push_back(id); }

  Graph graph_;
  std::vector<std::pair<ValueId, bool>> settled;
  std::vector<ValueId> users;
};

TEST(Location, IsTheModuleOfTheLastParameterOrTheRunningOne) {
  const torch::Tensor tied = torch::ones(2);
  TensorTable table;
  table.add(ValueKind::kParameter, "embedding.table", tied);
  table.add(ValueKind::kParameter, "head.fc.weight", tied);
  Location location("train", table);
  EXPECT_EQ(location.to_string(), "step function \"train\"");
  location.note_operator(0);
  location.note_read_parameter("encoder.norm.bias");
  EXPECT_EQ(location.to_string(), "step function \"train\", in or after module \"encoder.norm\"");
  location.note_read_parameter("scale");
  EXPECT_EQ(location.module(), "");
  {
    const RunningModule head{"", tied, "fc.weight"};
    const ModuleScope scope(head);
    EXPECT_EQ(location.module(), "head");
    location.note_operator(2);
    const RunningModule inner{"act", tied, "weight"};
    const ModuleScope inner_scope(inner);
    EXPECT_EQ(location.module(), "head.fc.act");
  }
  EXPECT_EQ(location.modules_known(), (std::vector<bool>{false, false, true}));
  EXPECT_EQ(capture_error([&] { location.refuse("does that", "Do this"); }),
            "[smp] step function \"train\": does that. Do this.");
}

TEST(KnownTensors, KnowsTensorsByIdentityAndTheLastOnAStorage) {
  KnownTensors known;
  const torch::Tensor a = torch::arange(6.), b = a.slice(0, 2), c = torch::zeros(2);
  known.bind(a, 3);
  known.bind(b, 4);
  EXPECT_EQ(known.find(a)->id, 3);
  EXPECT_EQ(known.find(b)->offset, 2);
  EXPECT_EQ(known.find(c), nullptr);
  EXPECT_EQ(known.find_on_storage(a)->id, 4);
  EXPECT_EQ(known.find_on_storage(c), nullptr);
  EXPECT_TRUE(known.find_shallow_copy(a.detach()).is_same(a));
  EXPECT_TRUE(known.find_shallow_copy(b.variable_data()).is_same(b));
  EXPECT_FALSE(known.find_shallow_copy(a.slice(0, 3)).defined());
  known.bind(a, 7);
  EXPECT_EQ(known.find(a)->id, 7);
  EXPECT_FALSE(known.find(a)->requires_grad);
  {
    const torch::Tensor gone = torch::ones(1);
    known.bind(gone, 8);
    EXPECT_EQ(known.alive().size(), 3);
  }
  EXPECT_EQ(known.alive().size(), 2);
}

TEST(KnownTensors, LeavesBehindWhatIsHeldBesideTheResult) {
  KnownTensors known;
  const auto add = [&](ValueId id) {
    torch::Tensor tensor = make_placeholder({{2}, {1}, at::kFloat}, "train");
    known.bind(tensor, id);
    return tensor;
  };
  std::vector<torch::Tensor> outputs = {add(0)};
  add(1);
  const std::vector<torch::Tensor> result = outputs;
  EXPECT_TRUE(known.left_behind(outputs).empty());
  const torch::Tensor held = add(2), with_data = torch::ones(1);
  known.bind(with_data, 3);
  EXPECT_EQ(known.left_behind(outputs), std::vector<ValueId>{2});
  const torch::Tensor member = outputs[0];
  EXPECT_EQ(known.left_behind(outputs).size(), 2);
}

TEST(HostData, TellsWhetherHostCodeFilledAFactorysResult) {
  HostData data;
  FakeRun run;
  torch::Tensor zeros = torch::zeros(3);
  const torch::Tensor empty = torch::empty(3);
  data.add_factory(0, 0, handle_of("aten::zeros"), zeros);
  data.add_factory(1, 1, handle_of("aten::empty", "memory_format"), empty);
  EXPECT_FALSE(data.find(0)->filled(/*for_read=*/true));
  EXPECT_TRUE(data.find(1)->filled(/*for_read=*/true));
  EXPECT_FALSE(data.find(1)->filled(/*for_read=*/false));
  EXPECT_EQ(data.find(2), nullptr);

  TracedCall call;
  call.ids = {0};
  const Operator relu(handle_of("aten::relu"));
  EXPECT_EQ(data.filled_unlike(run.graph_, relu, call, run), std::nullopt);
  zeros.data_ptr<float>()[1] = 5;
  EXPECT_EQ(data.filled_unlike(run.graph_, relu, call, run), 0);
  run.graph_.values[0].kind = ValueKind::kLiteral;  // it was filled then, too
  EXPECT_EQ(data.filled_unlike(run.graph_, relu, call, run), std::nullopt);
}

TEST(HostData, HasOneContentFromTheFirstReadOn) {
  const TensorTable table;
  const Location location("train", table);
  HostData data;
  FakeRun run;
  torch::Tensor zeros = torch::zeros(3), constant = torch::ones(2);
  data.add_factory(0, 0, handle_of("aten::zeros"), zeros);
  data.add_constants({{1, constant}}, run);
  zeros.data_ptr<float>()[1] = 5;
  data.settle_read(0, run, location);
  data.settle_read(0, run, location);  // settled once
  EXPECT_EQ(run.settled, (std::vector<std::pair<ValueId, bool>>{{0, true}}));
  zeros.data_ptr<float>()[1] = 6;
  EXPECT_THAT(capture_error([&] { data.settle_read(0, run, location); }),
              HasSubstr("step function \"train\": changes the data of a tensor of shape [3] on the "
                        "host after an operator has read it. A tensor that host code fills has"));
  constant.data_ptr<float>()[0] = 6;
  EXPECT_THAT(capture_error([&] { data.settle_read(1, run, location); }), HasSubstr("shape [2]"));
}

TEST(HostData, IsTheRunsFromTheFirstWriteOn) {
  const TensorTable table;
  const Location location("train", table);
  HostData data;
  FakeRun run;
  const torch::Tensor zeros = torch::zeros(3);
  data.add_factory(2, 2, handle_of("aten::zeros"), zeros);
  Operator write(handle_of("aten::relu_"));
  write.writes = {2};
  data.settle_written(write, run, location);
  EXPECT_EQ(run.settled, (std::vector<std::pair<ValueId, bool>>{{2, false}}));
  EXPECT_EQ(run.users, std::vector<ValueId>{2});
  EXPECT_TRUE(is_placeholder(zeros));
  EXPECT_EQ(data.find(2), nullptr);
}

TEST(RunHistories, EndWithTheRunOnRegisteredTensors) {
  torch::Tensor buffer = torch::zeros(3), other = torch::zeros(3);
  TensorTable table;
  table.add(ValueKind::kBuffer, "running", buffer);
  const Location location("train", table);
  RunHistories histories(location);
  TensorMeta meta = TensorMeta::of(buffer);
  histories.follow(buffer, meta);
  EXPECT_FALSE(histories.take_begun());
  meta.requires_grad = true;
  histories.follow(buffer, meta);
  EXPECT_TRUE(histories.take_begun());
  EXPECT_FALSE(histories.take_begun());
  histories.spread_to(other);
  EXPECT_TRUE(buffer.requires_grad() && other.requires_grad());
  histories.hide_while([&] { EXPECT_FALSE(buffer.requires_grad()); });
  EXPECT_TRUE(buffer.requires_grad());
  EXPECT_THROW(histories.hide_while([] { throw std::runtime_error("in a leaf"); }),
               std::runtime_error);
  EXPECT_TRUE(buffer.requires_grad());
  histories.end();
  EXPECT_FALSE(buffer.requires_grad());
  EXPECT_TRUE(other.requires_grad());
}

TEST(RunHistories, RefusesHooksOnTensors) {
  const TensorTable table;
  const Location location("train", table);
  const RunHistories histories(location);
  TensorMeta meta = TensorMeta::of(torch::zeros(3));
  meta.requires_grad = true;
  const torch::Tensor tensor = make_placeholder(meta, "train");
  EXPECT_EQ(capture_error([&] { histories.check_hooks(); }), "");
  tensor.register_hook([](const torch::Tensor& gradient) { return gradient; });
  EXPECT_THAT(capture_error([&] { histories.check_hooks(); }),
              HasSubstr("registers a hook on a tensor (register_hook)"));
  EXPECT_EQ(capture_error([&] { histories.check_hooks(); }), "");
}

}  // namespace
}  // namespace smp::graph::testing
