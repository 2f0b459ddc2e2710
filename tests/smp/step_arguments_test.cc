// SPDX-License-Identifier: Apache-2.0
// Types by which tensors reach a step function and leave it, and those by which they do not.

#include <deque>
#include <list>
#include <set>
#include <variant>

#include "tests/smp/errors.h"

namespace theirs {

struct Batch {
  torch::Tensor x, y;
};

/// Neither describes its content.
class Secret {
 public:
  explicit Secret(torch::Tensor tensor) : tensor_(std::move(tensor)) {}
  const torch::Tensor& tensor() const { return tensor_; }

 private:
  torch::Tensor tensor_;
};

struct Vocabulary {
  std::map<std::string, int> words;
};

}  // namespace theirs

template <>
struct smp::Fields<theirs::Batch> {
  template <class T>
  static auto of(T& batch) {
    return std::tie(batch.x, batch.y);
  }
};
template <>
inline constexpr bool smp::holds_no_tensors<theirs::Vocabulary> = true;

namespace smp::testing {
namespace {

using torch::Tensor;
using XY = std::pair<Tensor, Tensor>;

struct OwnBatch {
  Tensor x, y;
  double weight = 1;
  SMP_FIELDS(x, y, weight)
};

class StepArguments : public ErrorsTest {
 protected:
  void SetUp() override {
    ErrorsTest::SetUp();
    out_ = plain(x_);
  }

  /// An argument that holds x_ and y_, which `take` finds in the function's arguments: the parts of
  /// a microbatch. The caller's object stays as it is.
  template <class Argument, class Take>
  void expect_cut(const std::string& what, DistributedModel<Mlp>& model, const Argument& argument,
                  const Take& take) const {
    auto function = step([&](const detail::AsArgument<Argument>& batch) {
      const auto [x, y] = take(batch);
      return std::make_pair(model(x) * y, x.sum(1).ge(-1e9).sum());
    });
    for (int call = 0; call < 2; ++call) {
      auto [product, count] = function(argument);
      expect_equal(product.outputs(), {out_[0] * part(y_, 2, 0), out_[1] * part(y_, 2, 1)},
                   what + " as an argument");
      EXPECT_EQ(count.reduce_sum().template item<int64_t>(), 8) << what;
      const auto [x, y] = take(detail::as_argument(argument));
      EXPECT_TRUE(x.is_same(x_) && y.is_same(y_)) << what << " of the caller";
    }
  }

  /// A result that `make` builds of two tensors; `get` finds their outputs in the result.
  template <class Make, class Get>
  void expect_returned(const std::string& what, DistributedModel<Mlp>& model, const Make& make,
                       const Get& get) const {
    auto function = step([&](Tensor x) {
      const auto out = model(x);
      return make(out, out * 2);
    });
    for (int call = 0; call < 2; ++call) {
      const std::pair<Tensors, Tensors> outputs = get(function(x_));
      expect_equal(outputs.first, out_, what + " as a result, first");
      expect_equal(outputs.second, {out_[0] * 2, out_[1] * 2}, what + " as a result, second");
    }
  }

  Tensors out_;
};

TEST_F(StepArguments, SequencesAreCut) {
  on_stages([&](DistributedModel<Mlp>& model) {
    const auto first_two = [](const auto& list) { return XY(list[0], list[1]); };
    expect_cut("std::vector", model, Tensors{x_, y_}, first_two);
    expect_cut("std::deque", model, std::deque<Tensor>{x_, y_}, first_two);
    expect_cut("std::list", model, std::list<Tensor>{x_, y_},
               [](const auto& list) { return XY(list.front(), list.back()); });
    expect_cut("std::array", model, std::array<Tensor, 2>{x_, y_}, first_two);
    const Tensors owner{x_, y_};
    expect_cut("at::TensorList", model, at::TensorList(owner), first_two);
    expect_cut("c10::List", model, c10::List<Tensor>({x_, y_}),
               [](const c10::List<Tensor>& list) { return XY(list.get(0), list.get(1)); });
  });
}

TEST_F(StepArguments, MapsAreCut) {
  on_stages([&](DistributedModel<Mlp>& model) {
    const auto by_key = [](const auto& map) { return XY(map.at("x"), map.at("y")); };
    using Pairs = std::initializer_list<std::pair<const std::string, Tensor>>;
    const Pairs pairs = {{"x", x_}, {"y", y_}};
    expect_cut("std::map", model, std::map<std::string, Tensor>(pairs), by_key);
    expect_cut("std::unordered_map", model, std::unordered_map<std::string, Tensor>(pairs), by_key);
    torch::OrderedDict<std::string, Tensor> ordered;
    c10::Dict<std::string, Tensor> dict;
    for (const auto& [key, tensor] : pairs) {
      ordered.insert(key, tensor);
      dict.insert(key, tensor);
    }
    expect_cut("torch::OrderedDict", model, ordered,
               [](const auto& map) { return XY(map["x"], map["y"]); });
    expect_cut("c10::Dict", model, dict, by_key);
  });
}

TEST_F(StepArguments, StructsAndTuplesAreCut) {
  on_stages([&](DistributedModel<Mlp>& model) {
    const auto by_name = [](const auto& batch) { return XY(batch.x, batch.y); };
    expect_cut("SMP_FIELDS", model, OwnBatch{x_, y_, 3.0}, by_name);
    expect_cut("smp::Fields", model, theirs::Batch{x_, y_}, by_name);
    const auto data = [](const auto& example) { return XY(example.data, example.target); };
    expect_cut("torch::data::Example<>", model, torch::data::Example<>(x_, y_), data);
    using Nested = torch::data::Example<torch::data::TensorExample, Tensors>;
    expect_cut("torch::data::Example<Example, vector>", model, Nested({x_}, {y_}),
               [](const Nested& example) { return XY(example.data.data, example.target[0]); });
    expect_cut("std::pair", model, XY(x_, y_), [](const XY& pair) { return pair; });
    expect_cut("std::tuple", model, std::make_tuple(x_, 7, y_), [](const auto& tuple) {
      EXPECT_EQ(std::get<1>(tuple), 7);
      return XY(std::get<0>(tuple), std::get<2>(tuple));
    });
  });
}

TEST_F(StepArguments, HoldersAndVariantsAreCut) {
  on_stages([&](DistributedModel<Mlp>& model) {
    expect_cut("std::optional", model, std::make_optional(XY(x_, y_)),
               [](const auto& pair) { return *pair; });
    expect_cut("std::shared_ptr", model, std::make_shared<OwnBatch>(OwnBatch{x_, y_}),
               [](const auto& batch) { return XY(batch->x, batch->y); });
    expect_cut("std::shared_ptr<const>", model, std::make_shared<const XY>(x_, y_),
               [](const auto& pair) { return *pair; });
    using Choice = std::variant<std::monostate, Tensor, OwnBatch>;
    expect_cut("std::variant", model, Choice(OwnBatch{x_, y_}), [](const Choice& choice) {
      return XY(std::get<OwnBatch>(choice).x, std::get<OwnBatch>(choice).y);
    });
    using Value = c10::IValue;
    const auto value = c10::ivalue::Tuple::create(
        std::vector<Value>{c10::List<Tensor>({x_}), 5, c10::ivalue::Tuple::create({Value(y_)})});
    expect_cut("c10::IValue", model, Value(value), [](const Value& all) {
      const auto& elements = all.toTupleRef().elements();
      EXPECT_EQ(elements[1].toInt(), 5);
      return XY(elements[0].toTensorVector()[0], elements[2].toTupleRef().elements()[0].toTensor());
    });
    using Deep = std::map<std::string, std::vector<std::shared_ptr<torch::data::Example<>>>>;
    expect_cut("all of it", model,
               Deep{{"a", {nullptr, std::make_shared<torch::data::Example<>>(x_, y_)}}},
               [](const Deep& deep) { return XY(deep.at("a")[1]->data, deep.at("a")[1]->target); });
  });
}

TEST_F(StepArguments, SequencesAndMapsAreReturned) {
  on_stages([&](DistributedModel<Mlp>& model) {
    const auto both = [](const StepOutput& a, const StepOutput& b) {
      return std::make_pair(a.outputs(), b.outputs());
    };
    const auto first_two = [&](const auto& list) { return both(list.front(), list.back()); };
    const auto by_key = [&](const auto& map) { return both(map.at("a"), map.at("b")); };
    expect_returned(
        "std::deque", model,
        [](Tensor a, Tensor b) {
          return std::deque<Tensor>{a, b};
        },
        first_two);
    expect_returned(
        "std::list", model,
        [](Tensor a, Tensor b) {
          return std::list<Tensor>{a, b};
        },
        first_two);
    expect_returned(
        "c10::List", model,
        [](Tensor a, Tensor b) {
          return c10::List<Tensor>({a, b});
        },
        first_two);
    expect_returned(
        "c10::Dict", model,
        [](Tensor a, Tensor b) {
          c10::Dict<std::string, Tensor> dict;
          dict.insert("b", b);
          dict.insert("a", a);
          return dict;
        },
        by_key);
  });
}

TEST_F(StepArguments, StructsHoldersAndVariantsAreReturned) {
  on_stages([&](DistributedModel<Mlp>& model) {
    const auto both = [](const StepOutput& a, const StepOutput& b) {
      return std::make_pair(a.outputs(), b.outputs());
    };
    expect_returned(
        "SMP_FIELDS", model,
        [](Tensor a, Tensor b) {
          return OwnBatch{a, b, 2.5};
        },
        [&](const auto& fields) {
          const auto& [x, y, weight] = fields;
          EXPECT_EQ(weight, (std::vector<double>{2.5, 2.5}));
          return both(x, y);
        });
    expect_returned(
        "smp::Fields", model,
        [](Tensor a, Tensor b) {
          return theirs::Batch{a, b};
        },
        [&](const std::tuple<StepOutput, StepOutput>& fields) {
          return both(std::get<0>(fields), std::get<1>(fields));
        });
    expect_returned(
        "torch::data::Example<>", model,
        [](Tensor a, Tensor b) { return torch::data::Example<>(a, b); },
        [&](const std::tuple<StepOutput, StepOutput>& fields) {
          return both(std::get<0>(fields), std::get<1>(fields));
        });
    expect_returned(
        "std::shared_ptr", model, [](Tensor a, Tensor b) { return std::make_shared<XY>(a, b); },
        [&](const std::shared_ptr<std::pair<StepOutput, StepOutput>>& pair) {
          return both(pair->first, pair->second);
        });
    expect_returned(
        "std::optional", model, [](Tensor a, Tensor b) { return std::make_optional(XY(a, b)); },
        [&](const std::optional<std::pair<StepOutput, StepOutput>>& pair) {
          return both(pair->first, pair->second);
        });
    expect_returned(
        "std::variant", model,
        [](Tensor a, Tensor b) { return std::variant<Tensor, int, XY>(XY(a, b)); },
        [&](const auto& choice) {
          static_assert(
              std::is_same_v<
                  std::decay_t<decltype(choice)>,
                  std::variant<StepOutput, std::vector<int>, std::pair<StepOutput, StepOutput>>>);
          return both(std::get<2>(choice).first, std::get<2>(choice).second);
        });
    expect_returned(
        "c10::IValue", model,
        [](Tensor a, Tensor b) {
          return c10::IValue(
              c10::ivalue::Tuple::create({c10::IValue(a), c10::IValue("text"), c10::IValue(b)}));
        },
        [](const std::vector<c10::IValue>& values) {
          std::pair<Tensors, Tensors> outputs;
          for (const c10::IValue& value : values) {
            const auto& elements = value.toTupleRef().elements();
            EXPECT_EQ(elements[1].toStringRef(), "text");
            outputs.first.push_back(elements[0].toTensor());
            outputs.second.push_back(elements[2].toTensor());
          }
          return outputs;
        });
    expect_returned(
        "all of it", model,
        [](Tensor a, Tensor b) {
          return std::map<int, std::deque<std::shared_ptr<OwnBatch>>>{
              {3, {nullptr, std::make_shared<OwnBatch>(OwnBatch{a, b})}}};
        },
        [&](const auto& deep) {
          EXPECT_EQ(deep.at(3)[0], nullptr);
          return both(std::get<0>(*deep.at(3)[1]), std::get<1>(*deep.at(3)[1]));
        });
  });
}

/// Cuts itself, wherever it lies.
struct Scale {
  std::vector<double> values;
  Scale smp_slice(int64_t, int64_t microbatch, int64_t) const { return {{values[microbatch]}}; }
};

TEST_F(StepArguments, ObjectsThatSliceThemselvesDoSoInsideOfOthers) {
  on_stages([&](DistributedModel<Mlp>& model) {
    auto scaled = step([&](std::pair<Tensor, std::vector<Scale>> batch) {
      return model(batch.first) * batch.second[0].values[0];
    });
    const auto scales = std::vector<Scale>{Scale{{2.0, 3.0}}};
    expect_equal(scaled(std::make_pair(x_, scales)).outputs(), {out_[0] * 2.0, out_[1] * 3.0},
                 "scaled");
  });
}

TEST_F(StepArguments, ATrainedModelIsThatOfOneProcess) {
  Mlp net(4);
  copy_values(*prototype_, *net);
  torch::optim::SGD plain(net->parameters(), 0.2);
  for (int i = 0; i < 3; ++i) {
    plain.zero_grad();
    plain_backward(net->parameters(), 1, 2,
                   [&](int m) { return torch::mse_loss(net(part(x_, 2, m)), part(y_, 2, m)); });
    plain.step();
  }
  on_stages([&](DistributedModel<Mlp>& model) {
    DistributedOptimizer<torch::optim::SGD> optimizer(model->parameters(), 0.2);
    auto train = step([&](torch::data::Example<> batch) {
      auto loss = torch::mse_loss(model->forward(batch.data), batch.target);
      model->backward(loss);
      return loss;
    });
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      train(torch::data::Example<>(x_, y_));
      optimizer.step();
    }
    expect_equal(to_map(model->state_dict()), state_of(*net), "weight");
  });
}

/// In C++ that is the optional mask.
TEST_F(StepArguments, UndefinedTensorsStayUndefined) {
  const auto mask = torch::rand({8, MlpImpl::kWidth}).gt(0.5);
  for (const char* guard : {"every_step", "first_step"}) {
    for (int count : {1, 2}) {
      run_as_threads(count, stages(count).guard(guard), [&] {
        Mlp net(4);
        copy_values(*prototype_, *net);
        DistributedModel<Mlp> model(net);
        auto masked = step([&](Tensor x, Tensor mask, Tensor other) {
          if (mask.defined()) x = x * mask;
          if (other.defined()) x = x + other;
          return model(x);
        });
        for (int call = 0; call < 2; ++call) {
          expect_equal(masked(x_, Tensor(), Tensor()).outputs(), out_, "without a mask");
          expect_equal(masked(x_, mask, Tensor()).outputs(), plain(x_ * mask), "with a mask");
          expect_equal(masked(x_, Tensor(), mask).outputs(), plain(x_ + mask), "with another");
        }
      });
    }
  }
}

TEST_F(StepArguments, WholeArgumentsAreNotCut) {
  const auto offset = torch::randn({4, MlpImpl::kWidth});
  const Tensors expected = plain(x_.view({2, 4, -1}).add(offset).view_as(x_));
  on_stages([&](DistributedModel<Mlp>& model) {
    auto one = step([&](Tensor x, Tensor offset) { return model(x + offset); });
    expect_equal(one(x_, smp::whole(offset)).outputs(), expected, "a tensor");
    auto list = step([&](Tensor x, const Tensors& offsets) { return model(x + offsets[0]); });
    expect_equal(list(x_, smp::whole(Tensors{offset})).outputs(), expected, "a list");
    auto none = step([&](Tensor x, const theirs::Secret& secret) {
      return model(x + smp::whole(secret.tensor()));
    });
    expect_equal(none(x_, smp::whole(theirs::Secret(offset))).outputs(), expected, "an object");
    auto both = step([&](Tensor x, const OwnBatch& batch) { return model(x) + batch.y.sum() * 0; });
    expect_equal(both(x_, smp::whole(OwnBatch{x_.narrow(0, 0, 3), y_.narrow(0, 0, 5)})).outputs(),
                 out_, "tensors of any size");
  });
}

/// A step function whose tensor `captured` is none of its arguments.
template <class Declare>
std::string error_of_capture(const Tensor& x, const Tensor& captured, const Declare& declare,
                             int microbatches = 2) {
  return error_of_run<CaptureError>(1, stages(1).microbatches(microbatches), [&] {
    DistributedModel<Mlp> model(Mlp(4));
    auto train = step([&](Tensor part) { return model(part).sum() + declare(captured).sum(); },
                      StepOptions().name("train"));
    train(x);
    throw CaptureError("it went well");
  });
}

TEST_F(StepArguments, ACapturedBatchIsRefused) {
  const auto as_it_is = [](const Tensor& tensor) { return tensor; };
  expect_has(
      error_of_capture(x_, y_, as_it_is),
      {"step function \"train\", in or after module \"head\"",
       "calls operator aten::sum on a tensor Float[8, 1] that is none of its arguments, and "
       "has the size of the batch (8) on axis 0: each of the 2 microbatches would get the "
       "whole of it. If it is part of the batch, pass it to the step function as an argument",
       "smp::whole(tensor), or register it as a buffer of the module"});
  const auto fine = [&](const Tensor& captured, int microbatches = 2) {
    expect_has(error_of_capture(x_, captured, as_it_is, microbatches), {"it went well"});
  };
  fine(torch::ones({MlpImpl::kWidth}));
  fine(torch::ones({1, 8}));
  fine(torch::ones({}));
  fine(y_, /*microbatches=*/1);
  expect_has(error_of_capture(x_, y_, [](const Tensor& tensor) { return smp::whole(tensor); }),
             {"it went well"});
}

TEST_F(StepArguments, ABatchThatIsCapturedInPlaceOfAnyArgumentIsRefused) {
  const auto text = error_of_run<CaptureError>(2, stages(2), [&] {
    DistributedModel<Mlp> model(Mlp(4));
    step([&] { return torch::mse_loss(model(x_), y_); })();
  });
  expect_has(text,
             {"step function \"step 0\", in or after module \"in\": calls operator aten::",
              " on a tensor Float[8, 6] that is none of its arguments, and the function has no "
              "tensor among its arguments: each of the 2 microbatches would get the whole of "
              "it"});
}

/// Keeps a table of constants that has as many rows as the batch, made when it is first needed.
struct WithTableImpl : torch::nn::Module {
  WithTableImpl() { layer = register_module("layer", torch::nn::Linear(MlpImpl::kWidth, 1)); }
  Tensor forward(Tensor x) {
    if (!table.defined()) table = torch::arange(8, torch::kFloat).mul(0.5);
    if (!listed.defined()) listed = torch::tensor(std::vector<float>(8, 2.0f));
    return layer(x) * (table * listed).sum();
  }
  torch::nn::Linear layer{nullptr};
  Tensor table, listed;
};
TORCH_MODULE(WithTable);

TEST_F(StepArguments, WhatTheFunctionMakesOfConstantsAndKeepsMayHaveTheSizeOfTheBatch) {
  WithTable prototype;
  Tensors expected;
  {
    torch::NoGradGuard no_grad;
    for (int m = 0; m < 2; ++m) expected.push_back(prototype->layer(part(x_, 2, m)) * 28);
  }
  for (int count : {1, 2}) {
    run_as_threads(count, stages(count), [&] {
      WithTable net;
      copy_values(*prototype, *net);
      DistributedModel<WithTable> model(net);
      auto forward = step([&](Tensor x) { return model(x); });
      auto again = step([&](Tensor x) { return model(x) + 0; });
      for (int call = 0; call < 2; ++call) {
        expect_equal(forward(x_).outputs(), expected, "first function");
        expect_equal(again(x_).outputs(), expected, "second function");
      }
    });
  }
}

TEST_F(StepArguments, WholeIsSaidOfTensorsFromOutside) {
  const auto text = error_of_run<UsageError>(1, stages(1), [&] {
    DistributedModel<Mlp> model(Mlp(4));
    step([&](Tensor x) { return model(smp::whole(x)); })(x_);
  });
  expect_has(text, {"smp::whole was given a tensor of shape [4, 6] that a step function computes, "
                    "or got as an argument, so it is that of one microbatch. Say it of an argument "
                    "where the step function is called: train(x, smp::whole(mask))"});
  EXPECT_TRUE(smp::whole(x_).is_same(x_)) << "outside of a program with ranks";
}

TEST_F(StepArguments, TensorsOfTwoBatches) {
  const auto call = [&](int microbatches, const Tensor& x, const Tensor& y, StepOptions options) {
    return error_of_run<UsageError>(1, stages(1).microbatches(microbatches), [&] {
      DistributedModel<Mlp> model(Mlp(4));
      step([&](Tensor x, Tensor y) { return model(x).sum() + y.sum(); }, options.name("train"))(x,
                                                                                                y);
      throw UsageError("it went well");
    });
  };
  const auto half = y_.narrow(0, 0, 4);
  expect_has(
      call(2, x_, half, {}),
      {"step function \"train\": input tensor 0 of shape [8, 6] has 8 samples on axis 0, and "
       "input tensor 1 of shape [4, 1] has 4. Both are cut into 2 microbatches, so they must "
       "be of one batch. Pass a tensor that is none by smp::whole(x)",
       "StepOptions().input_split_axes({{argument, 0}})"});
  expect_has(call(1, x_, half, {}), {"it went well"});
  expect_has(call(2, x_, half, StepOptions().input_split_axes({{1, 0}})), {"it went well"});
  expect_has(call(2, x_, half, StepOptions().non_split_inputs({1})), {"it went well"});
  expect_has(
      call(2, x_, x_.to_sparse(), {}),
      {"input tensor 1 has the layout Sparse, which is neither cut into microbatches nor sent "
       "between ranks. Pass x.to_dense()"});
}

TEST_F(StepArguments, ValuesWhoseTensorsAreOutOfReach) {
  const auto text = error_of_run<UsageError>(1, stages(1), [&] {
    DistributedModel<Mlp> model(Mlp(4));
    auto function = step([&](Tensor x, c10::IValue) { return model(x); });
    function(x_, c10::IValue::make_capsule(c10::make_intrusive<torch::CustomClassHolder>()));
  });
  expect_has(text, {"a c10::IValue of type Capsule is an argument or a result of a step function, "
                    "which cannot find the tensors in it"});
}

TEST_F(StepArguments, ResultsOfAnotherStructureForAnotherMicrobatch) {
  const auto text = error_of_run<UsageError>(1, stages(1), [&] {
    DistributedModel<Mlp> model(Mlp(4));
    auto function = step([&](Tensor x, Scale scale) {
      const auto out = model(x);
      using Lists = std::pair<Tensors, Tensors>;
      return scale.values[0] > 2 ? Lists{{out}, {out, out}} : Lists{{out, out}, {out}};
    });
    function(x_, Scale{{2.0, 3.0}});
  });
  expect_has(text, {"a step function has returned a list, map, optional, pointer or variant of "
                    "another kind or length for one microbatch than for another"});
}

TEST_F(StepArguments, TheModelIsCalledAsThePlainOneIs) {
  on_stages([&](DistributedModel<Mlp>& model) {
    auto object = step([&](Tensor x) { return model.forward(x); });
    auto pointer = step([&](Tensor x) { return model->forward(x); });
    expect_equal(object(x_).outputs(), out_, "model.forward(x)");
    expect_equal(pointer(x_).outputs(), out_, "model->forward(x)");
  });
}

/// The rest does not compile, by static assertions.
TEST_F(StepArguments, TypesThatSayWhereTheirTensorsAre) {
  using detail::content_of;
  struct Closed : theirs::Secret {};
  struct Plain {
    int64_t epoch;
    double rate;
  };
  struct Named {
    std::string name;
  };
  static_assert(content_of<double>().none() && content_of<const char*>().none());
  static_assert(content_of<std::string>().none() && content_of<torch::Device>().none());
  static_assert(content_of<torch::TensorOptions>().none() && content_of<torch::Scalar>().none());
  static_assert(content_of<std::map<std::string, std::vector<int>>>().none());
  static_assert(content_of<std::set<std::string>>().none() && content_of<Plain>().none());
  static_assert(content_of<std::shared_ptr<Plain>>().none() && content_of<Plain*>().none());
  static_assert(content_of<at::IntArrayRef>().none() && content_of<std::monostate>().none());
  static_assert(content_of<Mlp>().none() && content_of<MlpImpl*>().none());
  static_assert(content_of<std::shared_ptr<MlpImpl>>().none());
  static_assert(content_of<DistributedModel<Mlp>*>().none());
  static_assert(content_of<theirs::Vocabulary>().none());
  static_assert(content_of<std::unique_ptr<int>>().none());

  static_assert(content_of<theirs::Secret>().unknown && content_of<Closed>().unknown);
  static_assert(content_of<Named>().unknown);
  static_assert(content_of<std::vector<theirs::Secret>>().unknown);
  static_assert(content_of<std::function<void()>>().unknown && content_of<std::any>().unknown);
  static_assert(content_of<Tensor*>().unknown && content_of<std::unique_ptr<Tensor>>().unknown);
  static_assert(content_of<std::reference_wrapper<Tensor>>().unknown);
  static_assert(content_of<at::TensorList>().unknown);  // used as a result
  static_assert(content_of<StepOutput>().unknown);
  static_assert(!content_of<detail::AsArgument<at::TensorList>>().unknown);
  static_assert(detail::finds_tensors_of_argument<Whole<theirs::Secret>>());
  using Loader = torch::data::DataLoaderBase<torch::data::datasets::TensorDataset,
                                             std::vector<Tensor>, std::vector<size_t>>;
  static_assert(detail::IsDataLoader<std::unique_ptr<Loader>>::value);

  static_assert(detail::is_holder<Mlp>() && detail::is_holder<std::shared_ptr<MlpImpl>>());
  static_assert(!detail::is_holder<MlpImpl>());
}

}  // namespace
}  // namespace smp::testing
